"""A log as a fleet writes it, made by a seed: leaders that are ahead of it, entries that come late, takeovers.

The leader here is the production Dispatcher over a State of its own. It reads the log behind its end, its decisions
reach the log behind its back, and everything else (workers, ingresses, engines) is chance. What a `RecordedFleet` has
written can be folded and verified like any other log.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from random import Random
from typing import Any

from msgspec import structs

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheGap, CacheSnapshot, Run
from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestHandedOver, Settings
from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceDraining,
    InstanceLeft,
    InstanceProbed,
    InstanceReported,
    InstanceUndrained,
    LivenessTimeouts,
    Role,
)
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import (
    AttemptFailure,
    PrefillFinished,
    PrefixCopyEnded,
    PrefixFetchEnded,
    RequestAttemptFailed,
    RequestCancelled,
    RequestEvent,
    RequestFailed,
    RequestFinished,
)
from pointsman.contracts.subjects import subject_of
from pointsman.contracts.tenants import Priority, TenantPolicies, TenantPolicy
from pointsman.policies.admission import ADMISSION_POLICIES, AdmissionPolicy
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.recording import Recording
from pointsman.policies.ordering import ORDERING_POLICIES, OrderingPolicy
from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.policies.routing import ROUTING_POLICIES, RoutingPolicy
from pointsman.ports import LogEntry
from pointsman.primitives import BlockKey, Epoch, InstanceId, PoolName, Tenant, Term
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage
from tests.support.events import BLOCK, joined, route, stored

POOL = PoolName("default")
SETTINGS = PoolSettings(block_tokens=BLOCK)
OUTLIERS: Settings = {"outlier.consecutive_failures": 1, "outlier.base_ejection_seconds": 1.0}
PRIORITIES: list[Priority] = ["batch", "standard", "interactive"]


class RecordedFleet:
    """Engines, all but one of which are there from the start, a leader and chance. `entries` is the log."""

    def __init__(
        self,
        policies: PolicySet,
        seed: int,
        *,
        engines: int = 4,
        roles: Sequence[Role] = (),
        failing: bool = False,
        limited: bool = False,
        fetching: bool = False,
        resending: bool = False,
        odd: bool = False,
        recording: Callable[[], Recording] = Recording,
    ) -> None:
        """`roles` of the engines, in their order, where they do not all do everything. `failing`: whether engines fail
        requests, and are ejected. `limited`: whether tenants have limits, and requests priorities.
        `fetching`: whether engines fetch prefixes from each other. `resending`: whether decisions come behind later
        ones, and clocks differ. `odd`: whether engines come and go, and say what no engine says in order, and ingresses end
        what is anywhere. `recording`: of each leader."""
        self._recording = recording
        self._engines = [InstanceId(f"engine-{number}") for number in range(1, engines + 1)]
        self._failing = failing
        self._limited = limited
        self._fetching = fetching
        self._resending = resending
        self._odd = odd
        self._ahead = 7.5 if resending else 0.0
        self.entries: list[LogEntry] = []
        self._roles = dict(zip(self._engines, roles, strict=False))
        self._policies = policies
        self._random = Random(seed)
        self._now = 1000.0
        self._term = 0
        self._read = 0
        self._unwritten: deque[LogEvent] = deque()
        self._numbers = 0
        self._cache: dict[InstanceId, int] = {}
        self._epochs: dict[InstanceId, int] = {}
        self._leader: Dispatcher
        for engine in self._engines[:-1]:
            self._join(engine)
        self.take_over()

    def live(self, steps: int) -> "RecordedFleet":
        """Let so many things happen."""
        happenings: list[tuple[int, Callable[[], None]]] = [
            (30, self._arrive), (24, self._read_on), (24, self._write_decision), (16, self._first_token),
            (12, self._answer), (8, self._store), (6, self._report), (3, self._check_silence), (2, self._cancel),
            (2, self._ask_again), (2, self._migrate), (2, self._fail), (1, self._drain), (1, self._undecodable),
            (1, self._restart_engine), (1, self._decide_alone), (1, self._abandon),
        ]  # fmt: skip
        if self._roles:
            happenings.append((16, self._hand_over))
        if self._failing:
            happenings += [(6, self._fail_attempt), (4, self._eject)]
        if self._limited:
            happenings.append((1, self._set_tenant_policies))
        if self._resending:
            happenings += [(3, self._drain), (3, self._restart_engine)]
        if self._odd:
            happenings += [(20, self._store), (16, self._oddity), (8, self._other_end), (4, self._come_or_go)]
            happenings.append((2, self.take_over))
        if self._fetching:
            happenings = [
                (weight, happens) for weight, happens in happenings if happens != self._report
            ]  # ends a doubt
            happenings += [
                (30, self._arrive),
                (20, self._end_fetch),
                (4, self._end_copy),
                (40, self._store),
                (40, self._first_token),
            ]
        weights = [weight for weight, _ in happenings]
        for _ in range(steps):
            self._now += self._random.expovariate(20.0)
            self._random.choices(happenings, weights)[0][1]()
        return self

    def take_over(self) -> None:
        """A new leader, which has folded the log in order; what the one before had not yet written is gone."""
        self._unwritten.clear()
        self._term += 1
        as_of = len(self.entries)
        elected = LeaderElected(
            at=self._now,
            term=Term(self._term),
            scheduler=f"scheduler-{self._term}",
            as_of=as_of,
            pool=asdict(SETTINGS),
            policy=self._policies.routing.name,
            settings=self._policies.settings,
        )
        self._append(elected)
        state = State(SETTINGS, self._policies.trackers())
        for entry in self.entries:
            if entry.event is None:
                state.skip(entry.sequence)
            else:
                state.apply(entry.event, entry.sequence)
        self._read = len(self.entries)
        self._leader = Dispatcher(state, self._policies, term=Term(self._term), recording=self._recording())

    def write_all(self) -> "RecordedFleet":
        """Let every decision reach the log."""
        while self._unwritten:
            self._write_decision()
        return self

    # The log

    def _append(self, event: LogEvent) -> None:
        if isinstance(event, RequestEvent) and event.stamp is None:
            event = structs.replace(event, at=event.at + self._ahead)
        payload = encode(event)
        sequence = len(self.entries) + 1
        self.entries.append(LogEntry(sequence, subject_of(POOL, event), payload, decode_event(payload)))

    def _undecodable(self) -> None:
        sequence = len(self.entries) + 1
        self.entries.append(LogEntry(sequence, f"pm.{POOL}.scale", b"\x00no event", None, "not JSON"))

    def _write_decision(self) -> None:
        for _ in range(self._random.randint(1, 4)):
            if self._unwritten:
                if self._resending and self._random.random() < 0.3:
                    self._unwritten.rotate(-1)  # the first waits until others are written
                self._append(self._unwritten.popleft())

    def _decided(self, events: list[LogEvent]) -> None:
        self._unwritten.extend(events)

    # The leader

    @property
    def _state(self) -> State:
        return self._leader.state

    def _read_on(self) -> None:
        """Take in some of what the log has by now, and react as the scheduler does."""
        for entry in self.entries[self._read : self._read + self._random.randint(1, 30)]:
            self._read = entry.sequence
            event = entry.event
            if event is None or (event.stamp is not None and event.stamp.term == self._term):
                self._state.skip(entry.sequence)
                continue
            request = self._state.workload.requests.get(event.request) if isinstance(event, RequestEvent) else None
            touched = request.instance if request else None
            self._state.apply(event, entry.sequence)
            if touched:
                self._decided(self._leader.grant_waiting(touched, self._now))
            elif isinstance(event, FleetEvent):
                self._decided(self._leader.relocate_pending(self._now))

    def _arrive(self) -> None:
        self._numbers += 1
        family = self._random.randint(1, 6) * 1000
        if self._fetching:  # few, and new ones from time to time, so that some are hot and not yet everywhere
            family = self._random.choice((1, 1, 1, 2)) * 1000 + self._numbers // 60 * 10_000
        depth = self._random.randint(0, 60 if self._fetching else 12)
        keys = [family + level for level in range(depth)] + [100_000 + self._numbers]
        fields: dict[str, Any] = {"streaming": self._random.random() < 0.7, "tenant": f"tenant-{family}"}
        if self._limited:
            fields["priority"] = self._random.choice(PRIORITIES)
        if self._resending:
            fields["sent_at"] = self._now + self._ahead
        arrived_at = self._now + self._ahead
        command = route(f"r-{self._numbers}", keys, arrived_at=arrived_at, session=f"s-{family}", **fields)
        self._decided(self._leader.route(command, self._now))

    def _set_tenant_policies(self) -> None:
        policies = random_policies(self._random, [f"tenant-{family}000" for family in range(1, 7)])
        self._decided(self._leader.set_tenant_policies(policies, self._now, by="alice"))

    def _ask_again(self) -> None:
        request = self._one(Stage.PREFILL)
        if request is not None:
            command = route(request.id, [], attempt=request.attempt + 1, excluded=[request.instance])
            self._decided(self._leader.route(command, self._now))

    def _cancel(self) -> None:
        request = self._one(Stage.PENDING)
        if request is not None:
            self._decided(self._leader.cancel_ungranted(request.id, CancelCause.CLIENT_GONE, self._now))

    def _abandon(self) -> None:
        request = self._one(Stage.DECODING)
        if request is not None:
            self._decided(self._leader.cancel_any(request.id, CancelCause.NEVER_ENDED, self._now))

    def _migrate(self) -> None:
        moves = [
            Migration(request.id, request.instance, self._random.choice(self._engines), 1.0, "by chance")
            for request in list(self._state.workload.requests.values())
            if request.stage is Stage.PENDING and self._random.random() < 0.3
        ]
        self._decided(self._leader.migrate(MigrationPlan(self._state.sequence, tuple(moves)), self._now))

    def _hand_over(self) -> None:
        """A prefill is over; now and then nobody answers the ingress that says so."""
        request = self._one(Stage.PREFILL)
        if request is None or not request.decode:
            return
        if self._random.random() < 0.15:
            self._append(
                RequestHandedOver(
                    at=self._now, request=request.id, source=request.instance, instance=request.decode,
                    attempt=request.attempt, prefill=0.5,
                )
            )  # fmt: skip
            return
        command = HandOverRequest(
            request=request.id, attempt=request.attempt, instance=request.instance, prefill=self._now
        )
        self._decided(self._leader.hand_over(command, self._now))

    def _check_silence(self) -> None:
        events = self._leader.check_liveness(
            LivenessTimeouts(heard_since=self._now - 8.0, suspect_after=2.0, leave_after=7.0), self._now
        )
        for line in list(self._state.workload.queues):
            events += self._leader.grant_waiting(line, self._now)
        self._decided(events + self._leader.relocate_pending(self._now))

    def _eject(self) -> None:
        self._decided(self._leader.eject_outliers(self._now))

    # Everybody else

    def _one(self, stage: Stage) -> Request | None:
        found = [request for request in self._state.workload.requests.values() if request.stage is stage]
        return self._random.choice(found) if found else None

    def _end_fetch(self) -> None:
        found = [request for request in self._state.workload.requests.values() if request.fetching]
        if found:
            request = self._random.choice(found)
            self._append(
                PrefixFetchEnded(
                    at=self._now, request=request.id, instance=request.instance, source=request.fetch_from,
                    attempt=request.attempt, tokens=64, seconds=self._random.random(), source_seconds=0.01,
                    failure=self._random.choice(("", "", "", "the source refused with status 500")),
                )
            )  # fmt: skip

    def _end_copy(self) -> None:
        """Also of a request that has ended, and of one that carries none."""
        found = [request for request in self._state.workload.requests.values() if request.copy_to]
        if found:
            request = self._random.choice(found)
            self._append(
                PrefixCopyEnded(
                    at=self._now, request=request.id, instance=request.copy_to, source=request.instance,
                    attempt=request.attempt, tokens=64, seconds=self._random.random(),
                    failure=self._random.choice(("", "", "the source refused with status 500")),
                )
            )  # fmt: skip

    def _first_token(self) -> None:
        request = self._one(Stage.HANDED_OVER) or self._one(Stage.PREFILL)
        if request is not None and request.streaming and not request.decode:
            self._append(
                PrefillFinished(at=self._now, request=request.id, instance=request.instance, ttft=1.0, prefill=0.5)
            )

    def _answer(self) -> None:
        request = self._one(Stage.DECODING)
        if request is not None:
            self._append(
                RequestFinished(
                    at=self._now, request=request.id, instance=request.instance, e2e=2.0, prompt_tokens=request.prompt_tokens,
                    completion_tokens=self._random.randint(1, 200), cached_tokens=0, ttft=1.0, tpot=0.01,
                )
            )  # fmt: skip

    def _fail(self) -> None:
        request = self._one(Stage.PREFILL)
        if request is not None:
            self._append(RequestFailed(at=self._now, request=request.id, reason="engine_failed", status=502))

    def _fail_attempt(self) -> None:
        """Mostly of one engine, which is worse than the others."""
        found = [r for r in self._state.workload.requests.values() if r.stage in (Stage.PREFILL, Stage.DECODING)]
        bad = [request for request in found if request.instance == self._engines[1]]
        request = self._random.choice(bad or found) if found else None
        if request is None:
            return
        failures: list[AttemptFailure] = ["connect_failure", "http_5xx", "stream_reset"]
        failure = self._random.choice(failures)
        self._append(
            RequestAttemptFailed(
                at=self._now, request=request.id, instance=request.instance, attempt=request.attempt, failure=failure,
                status=500 if failure == "http_5xx" else 0,
            )
        )  # fmt: skip
        if self._random.random() < 0.7:
            command = route(request.id, [], attempt=request.attempt + 1, excluded=[request.instance])
            self._decided(self._leader.route(command, self._now))

    def _decide_alone(self) -> None:
        """An ingress that found no scheduler."""
        request = self._one(Stage.PENDING)
        if request is not None:
            chosen = self._random.choice(self._engines)
            self._append(RequestGranted(at=self._now, request=request.id, instance=chosen, tenant=request.tenant))

    def _join(self, engine: InstanceId) -> None:
        self._epochs[engine] = self._epochs.get(engine, 0) + 1
        self._cache[engine] = 0
        role = {"role": self._roles[engine]} if engine in self._roles else {}
        fetches = {"fetches": True, "transfer_tokens_per_s": 100_000.0} if self._fetching else {}
        at = self._now + (self._random.choice((-60.0, 0.0, 60.0)) if self._resending else 0.0)
        self._append(joined(engine, at=at, epoch=self._epochs[engine], **role, **fetches))

    def _restart_engine(self) -> None:
        self._join(self._random.choice(self._engines))

    def _store(self) -> None:
        request = self._one(Stage.DECODING)
        if request is not None and request.instance in self._cache:
            engine = request.instance
            self._cache[engine] += (
                1 if self._fetching else self._random.choice((1, 1, 1, 2))
            )  # now and then one is lost
            self._append(
                stored(
                    engine,
                    self._cache[engine],
                    [int(k) for k in request.keys],
                    epoch=self._epochs[engine],
                    at=self._now,
                )
            )

    def _oddity(self) -> None:
        """Of the cache: of any part of any prompt, whether the engine has it or not."""
        engine = self._random.choice(list(self._epochs))
        self._cache[engine] += self._random.choice((1, 1, 1, 2))
        known: dict[str, Any] = {
            "at": self._now, "instance": engine, "epoch": Epoch(self._epochs[engine]), "sequence": self._cache[engine],
        }  # fmt: skip
        family = self._random.randint(1, 12) * 1000  # half of them nobody asks for
        keys = [BlockKey(family + level) for level in range(12)]
        removed = BlocksRemoved(**known, keys=pack_keys(self._random.sample(keys, 3)))
        kept = BlocksStored(**known, runs=[Run(pack_keys(keys[5:]), keys[4])])
        whole = CacheSnapshot(**known, runs=[Run(pack_keys(keys))])
        gap = CacheGap(**known, missed=1, reason="x")
        self._append(self._random.choice((removed, removed, kept, kept, whole, gap, CacheCleared(**known))))

    def _come_or_go(self) -> None:
        engine = self._random.choice(self._engines)
        epoch = Epoch(self._epochs.get(engine, 1))
        if engine not in self._state.fleet:
            self._join(engine)
        elif self._random.random() < 0.5:
            self._append(InstanceProbed(at=self._now, instance=engine, epoch=epoch, parity=True))
        else:
            self._append(InstanceLeft(at=self._now, instance=engine, epoch=epoch, reason="x"))

    def _other_end(self) -> None:
        request = self._one(self._random.choice(list(Stage)))
        if request is not None:
            instance = self._random.choice(self._engines)
            events: list[LogEvent] = [
                RequestFailed(at=self._now, request=request.id, reason="x", status=502, instance=instance),
                RequestCancelled(at=self._now, request=request.id, reason="x"),
                RequestGranted(at=self._now, request=request.id, instance=instance, attempt=2),
            ]
            self._append(self._random.choice(events))

    def _report(self) -> None:
        engine = self._random.choice(list(self._epochs))
        self._append(
            InstanceReported(
                at=self._now, instance=engine, epoch=Epoch(self._epochs[engine]), serving=self._random.random() < 0.9,
                waiting=0, running=0, kv_usage=0.0, sequence=self._cache[engine], blocks=0, digest=0,
            )
        )  # fmt: skip

    def _drain(self) -> None:
        """By the leader, as people ask for it; now and then as something that was written by another hand."""
        engine = self._random.choice(list(self._epochs))
        if self._random.random() < 0.4:
            leaving = self._random.random() < 0.5
            self._decided(self._leader.drain(engine, "asked for", self._now, leaving=leaving))
            return
        if self._random.random() < 0.6:
            self._decided(self._leader.undrain(engine, self._now))
            return
        kind = self._random.choice((InstanceDraining, InstanceUndrained))
        self._append(kind(at=self._now, instance=engine, epoch=Epoch(self._epochs[engine])))


def random_policies(chance: Random, tenants: Sequence[str]) -> TenantPolicies:
    """Limits that traffic of some 20 requests a second meets now and then."""

    def policy() -> TenantPolicy:
        return TenantPolicy(
            weight=chance.choice((1.0, 1.0, 3.0)),
            requests_per_second=chance.choice((0.0, 0.0, 0.5, 5.0)),
            concurrency=chance.choice((0, 0, 2, 10)),
            tokens_per_minute=chance.choice((0, 0, 20_000, 200_000)),
            tokens_per_day=chance.choice((0, 0, 0, 3_000)),
            kv_share=chance.choice((0.0, 0.0, 0.01, 0.1)),
        )

    named = {Tenant(tenant): policy() for tenant in tenants if chance.random() < 0.5}
    weight = chance.choice((0.0, 0.1))
    return TenantPolicies(default=policy(), tenants=named, cached_token_weight=weight)


def every_tracker() -> tuple[Tracker, ...]:
    """What all policies together would have State remember."""
    policies: tuple[RoutingPolicy | AdmissionPolicy | OrderingPolicy, ...] = (
        *(policy_set(routing=name).routing for name in ROUTING_POLICIES),
        *(policy_set(admission=name).admission for name in ADMISSION_POLICIES),
        *(policy_set(ordering=name).ordering for name in ORDERING_POLICIES),
    )
    return tuple(memory for policy in policies for memory in policy.trackers())


def fresh_state() -> State:
    return State(PoolSettings(), every_tracker())


def random_log(seed: int, steps: int) -> list[LogEvent]:
    """The log of a pool in which everything happens that can."""
    policies = policy_set(prefill_window_tokens=400, settings=OUTLIERS)
    fleet = RecordedFleet(policies, seed, engines=3, failing=True, limited=True, odd=True)
    return [entry.event for entry in fleet.live(steps).entries if entry.event is not None]


def rewritten(entries: list[LogEntry], sequence: int, event: LogEvent) -> list[LogEntry]:
    """The same log with another event in one place, as somebody who tampers would leave it."""
    forged = LogEntry(sequence, subject_of(POOL, event), encode(event), event)
    return [forged if entry.sequence == sequence else entry for entry in entries]


def unnumbered(event: LogEvent) -> LogEntry:
    """An entry whose place `renumbered` gives."""
    return LogEntry(0, subject_of(POOL, event), encode(event), event)


def renumbered(entries: list[LogEntry]) -> list[LogEntry]:
    """A log of these entries, in this order."""
    return [LogEntry(n, e.subject, e.payload, e.event, e.problem) for n, e in enumerate(entries, start=1)]
