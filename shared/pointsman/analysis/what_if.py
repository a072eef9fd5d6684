"""Simulations of recorded traffic: to calibrate the engines, as recorded, and with each change. The same code answers
`pointsman what-if`, the console's what-if and the windows of a shadow policy."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from typing_extensions import override

from pointsman.analysis.calibration import Calibration, calibrate, usual_profile
from pointsman.analysis.comparison import Side, side
from pointsman.analysis.recorded_traffic import Record, RecordedRequest, UnusableTrafficError, recorded_keys
from pointsman.contracts.codec import short_reason
from pointsman.contracts.decisions import Settings
from pointsman.contracts.fleet import InstanceJoined
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.policy_set import ADMISSION_PREFIX, DISPATCH_SETTINGS, ORDERING_PREFIX, explicit, policy_set
from pointsman.policies.setting_text import prefixes_with, settings_of
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import FleetMirror, Scenario, simulate_in_slices
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.engine_profiles import EngineProfile
from pointsman.state.transfers import UNKNOWN_RATE

TENANTS_PREFIX = "tenants."
EVENTS_A_SLICE = 200

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    policy: str | None = None
    texts: Sequence[str] = ()
    """KIND.NAME=VALUE; those of tenants are in `limits` too."""
    ordering: str | None = None
    admission: str | None = None
    instances: int | None = None
    tenants: TenantPolicies | None = None
    """In place of the recorded ones."""
    tenants_from: str = ""
    limits: Callable[[TenantPolicies], TenantPolicies] | None = None
    """Changes each set of tenant policies."""

    @property
    def is_none(self) -> bool:
        return not (
            self.policy or self.texts or self.ordering or self.admission or self.instances or self.tenants is not None
        )

    def of_policies(self, policies: "Policies") -> "Policies":
        """Raises UnknownPolicyError, SettingTextError."""
        settings = dict(policies.settings)
        for prefix, is_other in (
            ("", self.policy is not None and self.policy != policies.routing),
            (ADMISSION_PREFIX, self.admission is not None and self.admission != policies.admission),
            (ORDERING_PREFIX, self.ordering is not None and self.ordering != policies.ordering),
        ):
            if is_other:  # settings of the policy in force do not apply
                settings = {name: value for name, value in settings.items() if _prefix_of(name) != prefix}
        routing, admission = self.policy or policies.routing, self.admission or policies.admission
        ordering = self.ordering or policies.ordering
        texts = [text for text in self.texts if not text.startswith(TENANTS_PREFIX)]
        settings |= settings_of(texts, prefixes_with(routing, admission, ordering))
        changed = Policies(routing, admission, ordering, settings)
        changed.check()
        return changed

    @override
    def __str__(self) -> str:
        parts = [self.policy or "", *self.texts]
        parts += [
            f"order {self.ordering}" if self.ordering else "",
            f"admission {self.admission}" if self.admission else "",
        ]
        parts.append(f"{self.instances} instances" if self.instances else "")
        parts.append(f"tenants of {self.tenants_from}" if self.tenants is not None else "")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Policies:
    """Names, and settings as in the log: those of admission and ordering have prefixes."""

    routing: str
    admission: str
    ordering: str
    settings: Settings

    def check(self) -> None:
        """Raises UnknownPolicyError."""
        policy_set(
            routing=self.routing,
            admission=self.admission,
            ordering=self.ordering,
            settings=self.settings,
            recorded=True,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """`share`: of this run."""

    what: str
    run: int
    runs: int
    share: float


class WhatIf:
    """Read `recorded`, `again`, `changed` and `calibration` when `run` is exhausted. To cancel, stop iterating."""

    def __init__(self, record: Record, changes: Sequence[Change]) -> None:
        """Raises UnknownPolicyError, SettingTextError and errors of `Change.limits`."""
        self.record = record
        self.changes = changes
        self._fleet = ReplayedFleet(record)
        self._scenarios = [self._fleet.changed(change) for change in changes]
        self.calibration = Calibration({}, {}, 0.0)
        self.recorded: Side
        self.again: Side
        self.changed: list[Side] = []

    def run(self) -> Iterator[Progress]:
        """Raises UnusableTrafficError."""
        try:
            yield from self._run()
        except (ValueError, ArithmeticError, LookupError) as error:
            raise UnusableTrafficError(
                f"{self.record.origin} has requests or engines that cannot be simulated: {short_reason(error)}"
            ) from error

    def _run(self) -> Iterator[Progress]:
        record, fleet, runs = self.record, self._fleet, 2 + len(self.changes)
        self.calibration = yield from _told("calibrating the engines", 1, runs, fleet.calibrate())
        self.recorded = side("recorded", record.outcome, fleet.scenario, record)
        again = yield from _told("the same policy again", 2, runs, fleet.run(fleet.scenario))
        self.again = side("re-simulated", again, fleet.scenario, record)
        for number, (change, scenario) in enumerate(zip(self.changes, self._scenarios, strict=True), start=3):
            changed = yield from _told("the change", number, runs, fleet.run(scenario))
            self.changed.append(side(str(change), changed, scenario, record))


def _told(what: str, run: int, runs: int, shares: Generator[float, None, T]) -> Generator[Progress, None, T]:
    yield Progress(what, run, runs, 0.0)
    while True:
        try:
            share = next(shares)
        except StopIteration as end:
            result: T = end.value
            return result
        yield Progress(what, run, runs, share)


class ReplayedFleet:
    """The fleet of a record, as the simulator runs it again."""

    def __init__(self, record: Record) -> None:
        """Raises UnknownPolicyError if the recorded policies are unknown here."""
        self.record = record
        self.profile = usual_profile(record.joins[name] for name in record.instances)
        self.scenario = _scenario_of(record, self.profile)
        self._usual_way = median([request.way_s for request in record.requests if request.way_s is not None] or [0.0])
        self._calibration: Calibration | None = None

    def calibrate(self) -> Generator[float, None, Calibration]:
        """Later runs use it."""
        outcome = yield from self.run(self.scenario)
        cost = self.profile.prefill_cost
        self._calibration = calibrate(self.record.outcome, outcome, cost, self.record.instances)
        return self._calibration

    def changed(self, change: Change) -> Scenario:
        """Raises UnknownPolicyError, SettingTextError, and errors of `Change.limits`."""
        scenario = self.scenario
        policies = change.of_policies(policies_in_force(self.record.policy, self.record.policy_settings))
        return replace(
            scenario,
            routing=policies.routing,
            ordering=policies.ordering,
            admission=policies.admission,
            routing_settings=policies.settings,
            instances=change.instances or scenario.instances,
            tenant_policies=_changed_policies(scenario, change),
        )

    def run(self, scenario: Scenario) -> Generator[float, None, Outcome]:
        mirror = FleetMirror(
            name_of=self._name_of,
            keys_of=recorded_keys,
            speed=self.record.settings.speed,
            profile=self.profile,
            way_of=self._way_of if self._calibration else None,
        )
        requests = [_within(request, self.profile.kv_capacity_tokens) for request in self.record.requests]
        return (yield from simulate_in_slices(self._paced(scenario), requests, mirror=mirror, events=EVENTS_A_SLICE))

    def _paced(self, scenario: Scenario) -> Scenario:
        if self._calibration is None:
            return scenario
        speeds, usual = self._calibration.speeds, self._calibration.usual_speed
        paced = {n: speeds.get(self._name_of(n), usual) for n in range(scenario.instances)}
        return replace(scenario, slow_instances={n: speed for n, speed in paced.items() if speed != 1.0})

    def _name_of(self, number: int) -> InstanceId:
        known = self.record.instances
        return known[number] if number < len(known) else InstanceId(f"extra-{number - len(known) + 1}")

    def _way_of(self, request: WorkloadRequest) -> EngineSeconds:
        assert self._calibration is not None
        assert isinstance(request, RecordedRequest)
        between = self._usual_way if request.way_s is None else request.way_s
        return between + self._calibration.ways.get(request.number, self._calibration.way_seconds)


def policies_in_force(routing: str, recorded: Settings) -> Policies:
    """`recorded`: as in a placement. Without DISPATCH_SETTINGS."""
    settings = {name: value for name, value in explicit(routing, recorded).items() if name not in DISPATCH_SETTINGS}
    admission = str(settings.pop("admission", Scenario.admission))
    return Policies(routing, admission, str(settings.pop("ordering", Scenario.ordering)), settings)


def _scenario_of(record: Record, profile: EngineProfile) -> Scenario:
    policies = policies_in_force(record.policy, record.policy_settings)
    scenario = Scenario(
        instances=len(record.instances),
        profile=profile.name,
        routing=policies.routing,
        admission=policies.admission,
        ordering=policies.ordering,
        routing_settings=policies.settings,
        prefill_only=False,
        transfer_tokens_per_s=_fetch_rate([record.joins[name] for name in record.instances]),
        copies=bool(record.policy_settings.get("copies", False)),
        kv_capacity_tokens=profile.kv_capacity_tokens,
        block_tokens=record.settings.block_tokens,
        prefill_window_tokens=int(record.policy_settings.get("prefill_window_tokens", Scenario.prefill_window_tokens)),
        running_max=int(record.policy_settings.get("running_max", Scenario.running_max)),
        pending_max=int(record.policy_settings.get("pending_max", Scenario.pending_max)),
        tenant_policies=tuple(record.tenant_policies),
        affinity_level_tokens=record.settings.affinity_level_tokens,
        hot_share=record.settings.hot_share,
        cold_share=record.settings.cold_share,
    )
    policies.check()
    return scenario


def _fetch_rate(joins: Sequence[InstanceJoined]) -> float:
    """As announced; 0 if most of them do not fetch prefixes."""
    return median((join.transfer_tokens_per_s or UNKNOWN_RATE) if join.fetches else 0.0 for join in joins)


def _changed_policies(scenario: Scenario, change: Change) -> tuple[tuple[EngineSeconds, TenantPolicies], ...]:
    known = scenario.tenant_policies if change.tenants is None else ((0.0, change.tenants),)
    if change.limits is None:
        return known
    return tuple((at, change.limits(policies)) for at, policies in known or ((0.0, TenantPolicies()),))


def _prefix_of(name: str) -> str:
    return next((prefix for prefix in (ADMISSION_PREFIX, ORDERING_PREFIX) if name.startswith(prefix)), "")


def _within(request: RecordedRequest, capacity: Tokens) -> RecordedRequest:
    room = capacity - request.input_length
    return request if request.output_tokens <= room else replace(request, output_tokens=max(1, room))
