"""Converts a log to a workload and an outcome of the simulator, while the log is folded; dates are the leader's. Cancelled
and unended requests are left out, as are those that engines refused for what their clients asked; others that failed count
as late. Requests before `since`, or before the checkpoint of a truncated log, only warm the caches."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median_low

from msgspec import structs
from typing_extensions import override

from pointsman.analysis.calibration import profile_of, usual_profile
from pointsman.analysis.client_faults import is_clients_fault
from pointsman.analysis.log_time import Passed
from pointsman.analysis.placed_alone import is_told_again
from pointsman.analysis.restarts import Restarts
from pointsman.contracts.block_keys import KEY_BYTES, unpack_keys
from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    LeaderElected,
    RequestEnd,
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    Settings,
    is_final_end,
    may_come_again,
)
from pointsman.contracts.envelope import is_fenced
from pointsman.contracts.fleet import InstanceEjected, InstanceJoined
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestEvent, RequestFailed, RequestFinished
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import LogEntry
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, RequestId, Sequence, Term, Tokens
from pointsman.simulation.outcome import LoadSample, Outcome, RequestRow
from pointsman.simulation.replay import BaseState
from pointsman.simulation.replay.folding import copy_state
from pointsman.simulation.workload import TRACE_BLOCK_TOKENS, WorkloadRequest
from pointsman.simulation.workload.requests import blocks_for
from pointsman.state.fleet import Instance
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import EMPTY_QUEUE

ANSWERS_MIN = 30
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TrafficBounds:
    """Of what is kept in memory to be simulated."""

    requests: int = 100_000
    key_bytes: int = 128 * 2**20

    @override
    def __str__(self) -> str:
        return f"{self.requests:,} requests or {self.key_bytes >> 20} MiB of prefixes"


class UnusableTrafficError(ValueError):
    """The log has too few answers, or does not say what the engines were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest(WorkloadRequest):
    number: int
    keys: bytes
    way_s: EngineSeconds | None
    """Client to leader plus grant to engine; None if it reached no engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    origin: str
    settings: PoolSettings
    policy: str
    policy_settings: Settings
    tenant_policies: list[tuple[EngineSeconds, TenantPolicies]]
    """Those in force when the first request arrived, at 0, and later ones."""
    requests: list[RecordedRequest]
    outcome: Outcome
    warmup: int
    instances: list[InstanceId]
    joins: dict[InstanceId, InstanceJoined]
    notes: list[str]


def read_record(
    entries: Iterable[LogEntry],
    *,
    origin: str,
    settings: PoolSettings,
    known: BaseState | None = None,
    begins: Passed | None = None,
    since: Passed | None = None,
    until: Passed | None = None,
    bounds: TrafficBounds = TrafficBounds(),
) -> Record:
    """Reads the log once. `known`: initial state; a copy is used. Requests from `begins` on are simulated, those from
    `since` on are counted; None: all. Of those that only warm the caches the latest are kept. Raises
    UnusableTrafficError."""
    state = State(settings) if known is None else copy_state(known.state)
    start = 1 if known is None else known.state.sequence + 1
    reader: TrafficReader | None = None
    for entry in entries:
        if reader is None and (begins is None or begins(entry)):
            reader = TrafficReader(
                state,
                policies=known.policies if known else None,
                fleet_from=start,
                since=since,
                until=until,
                bounds=bounds,
            )
        if entry.sequence >= start:
            state.apply_entry(entry)
        if reader is not None:
            reader.take(entry)
            reader.make_room()
    return (reader or TrafficReader(state)).record(origin)


def recorded_keys(request: WorkloadRequest, _block_tokens: Tokens) -> list[BlockKey]:
    assert isinstance(request, RecordedRequest)
    return unpack_keys(request.keys)


@dataclass(slots=True)
class _TracedRequest:
    arrival: RequestArrived
    counted: bool
    row: RequestRow
    way: EngineSeconds | None = None
    output_tokens: Tokens = -1
    """Of one answer."""
    may_come_again: bool = False


class TrafficReader:
    def __init__(
        self,
        state: State,
        *,
        policies: PolicySet | None = None,
        fleet_from: Sequence = 1,
        since: Passed | None = None,
        until: Passed | None = None,
        bounds: TrafficBounds = TrafficBounds(),
    ) -> None:
        """`state` is the caller's, who applies each entry before `take`; entries before `fleet_from` are in it already.
        `policies`: those in force, if known. Requests arriving after `until` are left out."""
        self._state = state
        self._fleet_from = fleet_from
        self._since, self._until = since, until
        self._bounds = bounds
        self._since_passed = self._until_passed = False
        self._term = Term(0)
        self._first: Sequence = 0
        self._requests: dict[RequestId, _TracedRequest] = {}
        self._open: set[RequestId] = set()
        self.key_bytes = 0
        self._joins = {instance.id: _join_of(instance, state.settings) for instance in state.fleet.instances}
        self._samples: list[LoadSample] = []
        self._ready: Counter[tuple[InstanceId, ...]] = Counter()
        self._policies: Counter[str] = Counter()
        self._policy = policies.routing.name if policies else ""
        self._policy_settings: Settings = policies.settings if policies else {}
        self._tenant_policies: list[tuple[EngineSeconds, TenantPolicies]] = []
        if state.tenants.policies is not None:
            self._tenant_policies.append((0.0, state.tenants.policies))
        self._restarts = Restarts()
        self._restarted = self._ejected = self._forgotten = 0
        self._split = False
        self._due: EngineSeconds = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def counted(self) -> int:
        return sum(request.counted for request in self._requests.values())

    @property
    def is_too_large(self) -> bool:
        return len(self._requests) > self._bounds.requests or self.key_bytes > self._bounds.key_bytes

    def make_room(self) -> None:
        """Forgets the oldest requests that only warm the caches. Raises UnusableTrafficError."""
        while self.is_too_large:
            oldest = next(iter(self._requests))
            if self._requests[oldest].counted:
                raise UnusableTrafficError(
                    f"the span has more than {self._bounds}: give --since or --until for a shorter one"
                )
            self._forget(oldest)
            self._forgotten += 1

    @property
    def is_complete(self) -> bool:
        """No later entry can add a request, or end one."""
        return self._until_passed and not self._open

    def take(self, entry: LogEntry) -> None:
        event = entry.event
        self._first = self._first or entry.sequence
        self._until_passed = self._until_passed or (self._until is not None and self._until(entry))
        fleet_known = entry.sequence >= self._fleet_from
        self._since_passed = self._since_passed or (fleet_known and (self._since is None or self._since(entry)))
        if isinstance(event, RequestEvent) and event.stamp is None and (known := self._requests.get(event.request)):
            event = structs.replace(event, at=event.at + known.arrival.clock_offset)
        if event is not None and not is_fenced(event.stamp, self._term):
            self._note(event)
        if not fleet_known or event is None:
            return
        self._note_fleet(event)
        is_due = isinstance(event, RequestEvent) and event.at >= self._due  # a worker's date may be wrong
        if self._requests and not self._until_passed and is_due:
            self._due = event.at + SAMPLE_SECONDS
            self._sample(event.at)

    def _note(self, event: LogEvent) -> None:
        if isinstance(event, RequestEnd) and event.request in self._open:
            self._requests[event.request].may_come_again = may_come_again(event)
        match event:
            case LeaderElected():
                self._term = max(self._term, event.term)
                if event.policy and not self._policy:
                    self._policy, self._policy_settings = event.policy, event.settings
            case RequestArrived():
                if not self._until_passed and event.request not in self._requests:
                    self._arrive(event)
            case TenantPoliciesSet():
                if not self._until_passed:
                    self._tenant_policies.append((event.at, event.policies))
            case RequestPlaced() | RequestRejected() | RequestMigrated() | RequestGranted() | PrefillFinished():
                if request := self._requests.get(event.request):
                    self._step(request, event)
            case RequestFailed() if is_clients_fault(event):
                pass
            case RequestFinished() | RequestFailed():
                if (request := self._requests.get(event.request)) and request.row.end == "unfinished":
                    _end(request, event)
            case _:
                pass
        if is_final_end(event):
            self._open.discard(event.request)

    def _arrive(self, event: RequestArrived) -> None:
        before = self._requests.get(event.instead_of)
        if before is not None and before.may_come_again and before.arrival.tenant == event.tenant:
            self._forget(event.instead_of)  # it is the same request
        event = structs.replace(event, arrived_at=event.arrived_at + event.clock_offset)
        self._requests[event.request] = _traced_request(event, counted=self._since_passed)
        self._open.add(event.request)
        self.key_bytes += len(event.keys)

    def _forget(self, name: RequestId) -> None:
        self.key_bytes -= len(self._requests.pop(name).arrival.keys)
        self._open.discard(name)

    def _note_fleet(self, event: LogEvent) -> None:
        if isinstance(event, InstanceJoined | CacheEvent):
            self._restarted += self._restarts.take(event, was_there=event.instance in self._joins) is not None
        if isinstance(event, InstanceJoined):
            self._joins[event.instance] = event
        self._ejected += isinstance(event, InstanceEjected)

    def _step(
        self,
        request: _TracedRequest,
        event: RequestPlaced | RequestRejected | RequestMigrated | RequestGranted | PrefillFinished,
    ) -> None:
        row, arrived_at = request.row, request.arrival.arrived_at
        match event:
            case RequestPlaced():
                self._policies[event.policy] += request.counted
                if settings := self._state.settings_of(event):
                    self._policy, self._policy_settings = event.policy, settings
                row.instance = event.instance
                row.predicted_ttft = event.at - arrived_at + event.predicted_ttft
                row.predicted_cached_tokens = row.prompt_tokens - event.uncached_tokens
                row.retries = event.attempt - 1
            case RequestMigrated():
                row.instance = event.instance
                row.predicted_cached_tokens = row.prompt_tokens - event.uncached_tokens
                row.migrations += 1
            case RequestGranted() if row.first_token_at and is_told_again(event, row.instance):
                pass
            case RequestGranted():
                row.instance, row.granted_at = event.instance, event.at
            case PrefillFinished():
                if event.stamp is None:
                    sent_at = event.at - event.prefill
                    request.way = max(0.0, request.arrival.at - arrived_at) + max(
                        0.0, sent_at - (row.granted_at or sent_at)
                    )
                    row.granted_at = sent_at
                row.first_token_at = event.at
            case RequestRejected():
                row.end, row.reason, row.ended_at = "rejected", event.reason, event.at

    def _sample(self, now: EngineSeconds) -> None:
        queues, instances = self._state.workload.queues, self._state.fleet.ready
        pending = tuple(queues.get(name, EMPTY_QUEUE).queued_tokens for name in instances)
        running = tuple(len(queues.get(name, EMPTY_QUEUE).decoding) for name in instances)
        self._samples.append(LoadSample(now, pending, running, instances))
        if instances:
            self._ready[instances] += 1
        self._split = self._split or self._state.fleet.split

    def record(self, origin: str) -> Record:
        """Raises UnusableTrafficError."""
        requests = sorted(
            (request for request in self._requests.values() if request.row.end != "unfinished"),
            key=lambda request: request.arrival.arrived_at,
        )
        self._require_enough(requests)
        start = requests[0].arrival.arrived_at
        warmup = next(number for number, request in enumerate(requests) if request.counted)
        size = len(self._ready.most_common(1)[0][0])
        instances = self._usual_instances(size)
        outcome = Outcome(
            [_row(request.row, number, start) for number, request in enumerate(requests)],
            samples=[replace(sample, at=sample.at - start) for sample in self._samples],
            migrations=sum(request.row.migrations for request in requests),
            virtual_seconds=max(request.row.ended_at or 0.0 for request in requests) - start,
            instance_changes=[(0.0, size)],
        )
        output_lengths = [request.output_tokens for request in requests if request.output_tokens > 0]
        usual = median_low(output_lengths or [1])
        return Record(
            origin=origin,
            settings=self._state.settings,
            policy=self._policy,
            policy_settings=self._policy_settings,
            tenant_policies=[(max(0.0, at - start), policies) for at, policies in self._tenant_policies],
            requests=[
                _request(request, number, start, usual, self._state.settings) for number, request in enumerate(requests)
            ],
            outcome=outcome,
            warmup=warmup,
            instances=instances,
            joins=self._joins,
            notes=self._notes(requests, instances),
        )

    def _usual_instances(self, size: int) -> list[InstanceId]:
        samples: Counter[InstanceId] = Counter()
        for instances, count in self._ready.items():
            samples.update(dict.fromkeys(instances, count))
        longest = {name for name, _ in samples.most_common(size)}
        return [name for name in self._joins if name in longest]

    def _require_enough(self, requests: list[_TracedRequest]) -> None:
        answered = sum(request.counted and request.row.end == "finished" for request in requests)
        if answered < ANSWERS_MIN:
            raise UnusableTrafficError(
                f"{answered} answered requests in this span are too few to compare policies by; {ANSWERS_MIN} is the "
                "least. Take a longer span, or run more traffic (pointsman bench)"
            )
        unknown = {
            request.row.instance for request in requests if request.counted and request.row.instance
        } - self._joins.keys()
        if unknown:
            raise UnusableTrafficError(
                f"{', '.join(sorted(unknown))} took requests and joined before the log begins: what engines they are is not "
                "in it. Use the archive, or count from when they joined again (--since)"
            )
        if self._split:
            raise UnusableTrafficError(
                "some instances only prefill or only decode in this span; only pools whose instances all do both can be "
                "simulated as they were. Take a span without such instances (--since, --until), or compare split pools by a "
                "workload (pointsman simulate --split)"
            )
        if not self._ready:
            raise UnusableTrafficError("no instance took requests in this span, according to the log")

    def _notes(self, requests: list[_TracedRequest], instances: list[InstanceId]) -> list[str]:
        left_out = [request for request in self._requests.values() if request.row.end == "unfinished"]
        restarts = self._restarted + len(self._restarts.open())
        sizes = {len(instances) for instances in self._ready}
        failed = sum(request.row.end == "failed" for request in requests)
        moved = sum(request.row.migrations for request in requests)
        not_streamed = sum(not request.arrival.streaming for request in requests)
        several = sum(request.arrival.answers > 1 for request in requests)
        adapted = sum(bool(request.arrival.adapter) for request in requests)
        unknown = sum(_is_known_in_part(request.arrival, self._state.settings) for request in requests)
        joins = [self._joins[name] for name in instances]
        usual = usual_profile(joins)
        others = [join.instance for join in joins if profile_of(join) != usual]
        notes = {
            f"{len(left_out):,} requests are left out: cancelled, refused by engines for what their clients asked, or without an end": bool(left_out),
            f"{failed:,} requests failed; failures are not simulated": bool(failed),
            f"the fleet had {min(sizes)} to {max(sizes)} instances; what it had most of the time is simulated": len(sizes) > 1,
            f"instances restarted ({restarts:,} in all); that is not simulated": bool(restarts),
            f"{self._ejected:,} times an engine was ejected; what was slow or failing there is not simulated": bool(self._ejected),
            f"{moved:,} times a request was moved to another instance; that is not simulated": bool(moved),
            "budgets of tenants for a day begin with the record; what they had used before is not counted": self._has_budgets(),
            f"{not_streamed:,} requests are not streamed: their first token is only assumed": bool(not_streamed),
            f"{several:,} requests asked for several answers (n): one of each is simulated, with its mean length": bool(several),
            f"{', '.join(others)}: another cost model or KV cache than most; simulated as one of them": bool(others),
            "engines load from slower cache tiers: they are not simulated, and what is only there is computed": bool(self._state.slower),
            f"{adapted:,} requests are for LoRA adapters: every simulated engine has them all": bool(adapted),
            f"{unknown:,} requests have prompts that are not known in whole (embeddings, images, several prompts): the rest counts as new": bool(unknown),
            f"{self._forgotten:,} earlier requests are left out: the latest, {self._bounds}, are simulated": bool(self._forgotten),
            f"several policies placed these requests: {', '.join(self._policies)}; compared with the last": len(self._policies) > 1,
            f"before entry {self._first:,} nothing is simulated: the caches begin empty there": self._first > 1,
            f"requests are counted from entry {self._fleet_from:,} on; earlier ones warm the caches": self._fleet_from > 1,
        }  # fmt: skip
        return [note for note, applies in notes.items() if applies]

    def _has_budgets(self) -> bool:
        sets = (policies for _, policies in self._tenant_policies)
        return any(one.tokens_per_day for known in sets for one in (known.default, *known.tenants.values()))


def _join_of(instance: Instance, settings: PoolSettings) -> InstanceJoined:
    """Of an instance that joined before the log begins."""
    return InstanceJoined(
        at=instance.joined_at,
        instance=instance.id,
        epoch=instance.epoch,
        url=instance.url,
        model=instance.model,
        block_tokens=instance.block_tokens,
        engine_block_tokens=instance.engine_block_tokens,
        kv_capacity_tokens=instance.kv_capacity_tokens,
        max_model_len=instance.max_model_len,
        prefill=instance.cost,
        decode=instance.decode,
        speed=settings.speed,
        transfer_tokens_per_s=instance.transfer_tokens_per_s,
        fetches=instance.fetches,
    )


def _traced_request(event: RequestArrived, *, counted: bool) -> _TracedRequest:
    row = RequestRow(
        number=0,
        tenant=event.tenant,
        arrived_at=event.arrived_at,
        prompt_tokens=event.prompt_tokens,
        output_tokens=0,
        slo_ttft=event.slo_ttft,
        slo_tpot=event.slo_tpot,
    )
    return _TracedRequest(event, counted, row)


def _end(request: _TracedRequest, event: RequestFinished | RequestFailed) -> None:
    row = request.row
    match event:
        case RequestFinished():
            row.end, row.ended_at, row.instance = "finished", event.at, event.instance
            row.cached_tokens = event.cached_tokens if event.cached_tokens >= 0 else row.predicted_cached_tokens
            request.output_tokens = math.ceil(event.completion_tokens / request.arrival.answers)
            row.output_tokens = max(1, request.output_tokens)
            row.tbt_p90 = event.tbt_p90 or None
            if row.first_token_at is None:
                row.first_token_at = row.arrived_at + event.ttft
        case RequestFailed():
            row.end, row.reason, row.ended_at, row.first_token_at = "failed", event.reason, event.at, None


def _request(
    request: _TracedRequest, number: int, start: EngineSeconds, usual: Tokens, settings: PoolSettings
) -> RecordedRequest:
    arrival = request.arrival
    output = request.output_tokens if request.output_tokens > 0 else min(usual, arrival.max_output_tokens)
    return RecordedRequest(
        arrival_s=arrival.arrived_at - start,
        block_ids=_block_ids(arrival, number, settings),
        input_length=arrival.prompt_tokens,
        output_tokens=max(1, output),
        max_output_tokens=arrival.max_output_tokens if output else 1,
        tenant=arrival.tenant,
        session=arrival.session,
        slo_ttft_s=arrival.slo_ttft,
        slo_tpot_s=arrival.slo_tpot,
        priority=arrival.priority,
        number=number,
        keys=arrival.keys,
        way_s=request.way,
    )


def _is_known_in_part(arrival: RequestArrived, settings: PoolSettings) -> bool:
    return len(arrival.keys) // KEY_BYTES < arrival.prompt_tokens // settings.block_tokens


def _block_ids(arrival: RequestArrived, number: int, settings: PoolSettings) -> tuple[int, ...]:
    """The workload's larger blocks, each by its last key; a block without a key is unique."""
    keys = unpack_keys(arrival.keys)
    within = max(1, TRACE_BLOCK_TOKENS // settings.block_tokens)
    blocks = range(blocks_for(arrival.prompt_tokens))
    return tuple(
        keys[min((block + 1) * within, len(keys)) - 1] if block * within < len(keys) else -number - 1
        for block in blocks
    )


def _row(row: RequestRow, number: int, start: EngineSeconds) -> RequestRow:
    row.number = number
    row.arrived_at -= start
    for name in ("granted_at", "first_token_at", "ended_at"):
        at = getattr(row, name)
        setattr(row, name, None if at is None else at - start)
    return row
