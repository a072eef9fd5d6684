"""Simulations of recorded traffic: to calibrate, as recorded, and with the change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from typing_extensions import override

from pointsman.adapters.tenants_file import with_changes
from pointsman.contracts.fleet import PrefillCost
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.policy_set import ADMISSION_PREFIX, ORDERING_PREFIX, policy_set
from pointsman.policies.setting_text import prefixes_with, settings_of
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import FleetMirror, Scenario, simulate
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.engine_profiles import EngineProfile
from pointsman_cli.what_if.calibration import Calibration, calibrate, profile_of
from pointsman_cli.what_if.recorded_traffic import Record, RecordedRequest, recorded_keys

TENANTS_PREFIX = "tenants."
ALL_KINDS = ("prefill_window_tokens", "running_max", "pending_max", "hold_seconds", "hold_max", "rebind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    policy: str | None = None
    texts: Sequence[str] = ()
    ordering: str | None = None
    admission: str | None = None
    instances: int | None = None
    tenants: TenantPolicies | None = None
    """In place of the recorded ones."""
    tenants_from: str = ""

    @property
    def is_none(self) -> bool:
        return not (
            self.policy or self.texts or self.ordering or self.admission or self.instances or self.tenants is not None
        )

    @property
    def policy_texts(self) -> list[str]:
        return [text for text in self.texts if not text.startswith(TENANTS_PREFIX)]

    @property
    def tenant_texts(self) -> list[str]:
        return [text.removeprefix(TENANTS_PREFIX) for text in self.texts if text.startswith(TENANTS_PREFIX)]

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


class SimulatedFleet:
    def __init__(self, record: Record) -> None:
        """Raises UnknownPolicyError if the recorded policies are unknown here."""
        self.record = record
        profiles = [profile_of(record.joins[name]) for name in record.instances]
        self.profile = max(profiles, key=profiles.count)
        self.scenario = _scenario_of(record, self.profile)
        self._usual_way = median([request.way_s for request in record.requests if request.way_s is not None] or [0.0])
        self.calibration: Calibration | None = None

    @property
    def cost(self) -> PrefillCost:
        return self.profile.prefill_cost

    def calibrate(self) -> Calibration:
        outcome = self._run(self.scenario)
        self.calibration = calibrate(self.record.outcome, outcome, self.cost, self.record.instances)
        return self.calibration

    def as_recorded(self) -> Outcome:
        return self._run(self._paced(self.scenario))

    def with_change(self, change: Change) -> Outcome:
        return self._run(self._paced(self.changed(change)))

    def changed(self, change: Change) -> Scenario:
        """Raises UnknownPolicyError, SettingTextError, TenantsFileError."""
        scenario = self.scenario
        settings = dict(scenario.routing_settings)
        for prefix, is_other in (
            ("", change.policy is not None and change.policy != scenario.routing),
            (ADMISSION_PREFIX, change.admission is not None and change.admission != scenario.admission),
            (ORDERING_PREFIX, change.ordering is not None and change.ordering != scenario.ordering),
        ):
            if is_other:  # settings of the recorded policy do not apply
                settings = {name: value for name, value in settings.items() if _prefix_of(name) != prefix}
        routing, admission = change.policy or scenario.routing, change.admission or scenario.admission
        ordering = change.ordering or scenario.ordering
        changed = replace(
            scenario,
            routing=routing,
            ordering=ordering,
            admission=admission,
            routing_settings=settings | settings_of(change.policy_texts, prefixes_with(routing, admission, ordering)),
            instances=change.instances or scenario.instances,
            tenant_policies=_changed_policies(scenario, change),
        )
        _check(changed)
        return changed

    def _paced(self, scenario: Scenario) -> Scenario:
        if self.calibration is None:
            return scenario
        speeds, usual = self.calibration.speeds, self.calibration.usual_speed
        paced = {n: speeds.get(self._name_of(n), usual) for n in range(scenario.instances)}
        return replace(scenario, slow_instances={n: speed for n, speed in paced.items() if speed != 1.0})

    def _name_of(self, number: int) -> InstanceId:
        known = self.record.instances
        return known[number] if number < len(known) else InstanceId(f"extra-{number - len(known) + 1}")

    def _way_of(self, request: WorkloadRequest) -> EngineSeconds:
        assert self.calibration is not None
        assert isinstance(request, RecordedRequest)
        between = self._usual_way if request.way_s is None else request.way_s
        return between + self.calibration.ways.get(request.number, self.calibration.way_seconds)

    def _run(self, scenario: Scenario) -> Outcome:
        like = FleetMirror(
            name_of=self._name_of,
            keys_of=recorded_keys,
            speed=self.record.settings.speed,
            profile=self.profile,
            way_of=self._way_of if self.calibration else None,
        )
        requests = [_within(request, self.profile.kv_capacity_tokens) for request in self.record.requests]
        return simulate(scenario, requests, mirror=like)


def _scenario_of(record: Record, profile: EngineProfile) -> Scenario:
    settings = {name: value for name, value in record.policy_settings.items() if name not in ALL_KINDS}
    scenario = Scenario(
        instances=len(record.instances),
        profile=profile.name,
        routing=record.policy,
        admission=str(settings.pop("admission", Scenario.admission)),
        ordering=str(settings.pop("ordering", Scenario.ordering)),
        routing_settings=settings,
        prefill_only=False,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        block_tokens=record.settings.block_tokens,
        prefill_window_tokens=int(record.policy_settings.get("prefill_window_tokens", Scenario.prefill_window_tokens)),
        pending_max=int(record.policy_settings.get("pending_max", Scenario.pending_max)),
        tenant_policies=tuple(record.tenant_policies),
        hot_share=record.settings.hot_share,
        cold_share=record.settings.cold_share,
    )
    _check(scenario)
    return scenario


def _changed_policies(scenario: Scenario, change: Change) -> tuple[tuple[EngineSeconds, TenantPolicies], ...]:
    known = scenario.tenant_policies if change.tenants is None else ((0.0, change.tenants),)
    if change.tenant_texts and not known:
        known = ((0.0, TenantPolicies()),)
    return tuple((at, with_changes(policies, change.tenant_texts)) for at, policies in known)


def _check(scenario: Scenario) -> None:
    policy_set(
        routing=scenario.routing,
        admission=scenario.admission,
        ordering=scenario.ordering,
        settings=scenario.routing_settings,
    )


def _prefix_of(name: str) -> str:
    return next((prefix for prefix in (ADMISSION_PREFIX, ORDERING_PREFIX) if name.startswith(prefix)), "")


def _within(request: RecordedRequest, capacity: Tokens) -> RecordedRequest:
    room = capacity - request.input_length
    return request if request.output_tokens <= room else replace(request, output_tokens=max(1, room))
