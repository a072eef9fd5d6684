"""The fleet in virtual time: the production State, policies and engine model, with nothing real but the arithmetic.

A discrete-event simulation. What a running fleet does by messages happens here by calls in the order of a clock that
jumps: an arrival is routed by the same `Dispatcher` that the scheduler service drives, a grant submits to the same
`EngineModel` that `pointsman-engine-sim` serves, and what the engine caches and answers is folded by the same `State`.
Deterministic: equal scenarios and requests give equal outcomes.

Scenarios bend what is perfect here: knowledge that lags, cache events that come late or never, wrong estimates, slow
and failing instances, a fleet that grows and shrinks.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

import msgspec
from typing_extensions import override

from pointsman.contracts.block_keys import pack_keys, unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheSnapshot, Run
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import HandOverRequest, RouteRequest
from pointsman.contracts.decisions import (
    HandOverRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.contracts.fleet import InstanceDraining, InstanceJoined, InstanceLeft, InstanceReported, Role
from pointsman.contracts.requests import PrefillFinished, RequestFailed, RequestFinished
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.policies.seeded_random import uniform
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, Seconds, SessionId, Tenant, Term, Tokens
from pointsman.simulation.block_cache import BlocksEvicted, CacheChange, CacheReset, RunCached
from pointsman.simulation.engine_model import EngineModel, EngineSettings, HashedPrompt, PrefillEnded, StepResult
from pointsman.simulation.outcome import LoadSample, Outcome, RequestRow
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES, EngineProfile
from pointsman.state.fleet import Instance
from pointsman.state.latency_model import LatencyModel
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Stage

TRACE_BLOCK_TOKENS = 512
SAMPLE_SECONDS = 1.0
REBALANCE_SECONDS = 0.25
REPORT_SECONDS = 1.0
NOTICE_SECONDS = 1.0
"""How long a fleet takes to notice that an engine is gone: the worker's report."""

RETRIES_MAX = 2
FUSED_STEPS_MAX = 512
SLO_TPOT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    """Instance number `instance` (from 0) dies at `at` and is back, empty, at `back_at`; never if that is None."""

    at: Seconds
    instance: int
    back_at: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated. Times are engine seconds."""

    instances: int = 8
    profile: str = DEFAULT_PROFILE
    routing: str = "dualmap"
    routing_settings: Settings = field(default_factory=dict)
    ordering: str = "fcfs"
    admission: str = "none"
    rebalancing: str = "off"
    eviction: str = "lru"
    slo_ttft_s: Seconds = 5.0
    prefill_only: bool = True
    """Answers of one token: the prefill-bound model. False: decoding shares the engine."""
    split: tuple[int, int] = (0, 0)
    """The first so many instances only prefill, the next so many only decode; all others do everything."""
    kv_transfer_gb_per_s: float = 12.5
    """How fast a decode instance fetches KV caches, 1e9 bytes a second."""
    kv_capacity_tokens: Tokens | None = None
    block_tokens: Tokens = TRACE_BLOCK_TOKENS
    prefill_window_tokens: Tokens = 16_384
    max_num_batched_tokens: Tokens = 8192
    hot_share: float = 1.0
    cold_share: float = 0.5
    load_lag_s: Seconds = 0.0
    """Policies see nothing that happened in the last so many seconds, their own dispatches included."""
    event_delay_s: Seconds = 0.0
    event_loss: float = 0.0
    """Share of cache events that are lost; reports reveal it and a snapshot heals it."""
    estimate_error: tuple[float, float] = (0.0, 0.0)
    """Share of prompts whose prefill is estimated wrongly, and by how much (0.5: half too long or too short)."""
    slow_instances: dict[int, float] = field(default_factory=dict)
    """Instance number to its speed (0.5: half as fast). Nobody is told."""
    failures: tuple[Failure, ...] = ()
    scale_at: tuple[tuple[Seconds, int], ...] = ()
    seed: int = 0


def block_keys(request: WorkloadRequest, block_tokens: Tokens) -> list[BlockKey]:
    """Keys of the prompt's whole blocks. A block id of the workload stands for its whole prefix, so it is the key; of
    smaller blocks each id gives several."""
    parts = TRACE_BLOCK_TOKENS // block_tokens
    whole = request.input_length // block_tokens
    keys = [
        BlockKey(_scrambled(block_id * parts + part + 1)) for block_id in request.block_ids for part in range(parts)
    ]
    return keys[:whole]


def numbered_name(number: int) -> InstanceId:
    """What instance number `number` (from 0) is called where nobody says otherwise."""
    return InstanceId(f"engine-{number:03}")


@dataclass(frozen=True, kw_only=True)
class FleetMirror:
    """What is taken over from a fleet that really runs, so that its twin here decides each request as it does.

    None of it makes a fleet better or worse. Names and keys say where on a hash ring instances and prompts lie, and
    break ties; promises last wall seconds, which are more engine seconds at a higher speed. `profile` is for engines
    whose cost was measured: it stands for the scenario's, which can only be named.
    """

    name_of: Callable[[int], InstanceId] = numbered_name
    keys_of: Callable[[WorkloadRequest, Tokens], list[BlockKey]] = block_keys
    speed: float = 1.0
    profile: EngineProfile | None = None
    way_of: Callable[[WorkloadRequest], Seconds] | None = None
    """What passes between a grant and its engine's hearing of it: the time that processes and sockets take. None: none."""


NO_MIRROR = FleetMirror()


def simulate(scenario: Scenario, requests: Sequence[WorkloadRequest], *, mirror: FleetMirror = NO_MIRROR) -> Outcome:
    """Run the requests, which are in the order of arrival, until the last one has ended or nothing can end any more:
    what waits for an instance that never comes back stays `unfinished`."""
    return _Simulation(scenario, requests, mirror).run()


class _NoisyLatency(LatencyModel):
    """A cost model that is wrong for a share of the prompts, always in the same way for the same length."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.block_tokens)
        self._scenario = scenario

    @override
    def prefill_seconds(self, instance: Instance, prompt_tokens: Tokens, cached_tokens: Tokens) -> Seconds:
        share, size = self._scenario.estimate_error
        seconds = super().prefill_seconds(instance, prompt_tokens, cached_tokens)
        draw = uniform(self._scenario.seed, "estimate", str(prompt_tokens))
        if draw >= share:
            return seconds
        return seconds * (1 + size if draw < share / 2 else 1 - size)


@dataclass(slots=True, eq=False)
class _Engine:
    """One simulated instance. `wake` invalidates wake-ups that a cut step has made wrong."""

    id: InstanceId
    epoch: Epoch
    model: EngineModel
    alive: bool = True
    sequence: int = 0
    wake: int = 0
    parents: dict[BlockKey, BlockKey] = field(default_factory=dict)
    """Parent of every block it holds, parents before children."""


class _Simulation:
    def __init__(
        self, scenario: Scenario, requests: Sequence[WorkloadRequest], mirror: FleetMirror = NO_MIRROR
    ) -> None:
        self._scenario = scenario
        self._requests = requests
        self._mirror = mirror
        self._profile = mirror.profile or PROFILES[scenario.profile]
        self._policies = policy_set(
            routing=scenario.routing,
            admission=scenario.admission,
            ordering=scenario.ordering,
            settings=scenario.routing_settings,
            prefill_window_tokens=scenario.prefill_window_tokens,
            pending_max=10**9,
        )
        self._state = self._new_state()
        self._seen = self._new_state() if scenario.load_lag_s > 0 else self._state
        self._unseen: deque[tuple[Seconds, LogEvent]] = deque()
        self._dispatcher = Dispatcher(self._state, self._policies, term=Term(1), policy_state=self._seen)
        self._rebalancing = REBALANCING_POLICIES[scenario.rebalancing]()
        self._engines: dict[InstanceId, _Engine] = {}
        self._agenda: list[tuple[Seconds, int, Callable[[Seconds], None]]] = []
        self._order = count()
        self._upkeep = 0
        """How much of the agenda only looks after things. When nothing else is left, what has not ended never will."""
        self._now = 0.0
        self._open = len(requests)
        self._ready = 0
        self._outcome = Outcome([row_of(number, request, scenario) for number, request in enumerate(requests)])
        self._commands: dict[RequestId, RouteRequest] = {}
        self._lost = count()

    def run(self) -> Outcome:
        scenario = self._scenario
        for number in range(scenario.instances):
            self._join(number, 0.0)
        self._catch_up(scenario.load_lag_s)
        for number, request in enumerate(self._requests):
            self._at(request.arrival_s, lambda now, n=number: self._arrive(n, now))  # type: ignore[misc]
        for failure in scenario.failures:
            self._at(failure.at, lambda now, f=failure: self._fail(f, now))  # type: ignore[misc]
        for at, wanted in scenario.scale_at:
            self._at(at, lambda now, w=wanted: self._scale(w, now))  # type: ignore[misc]
        self._every(SAMPLE_SECONDS, self._sample, first=0.0)
        if scenario.rebalancing != "off":
            self._every(REBALANCE_SECONDS, self._rebalance, first=REBALANCE_SECONDS)
        if scenario.event_loss > 0:
            self._every(REPORT_SECONDS, self._report, first=REPORT_SECONDS)
        while self._open and len(self._agenda) > self._upkeep:
            self._now, _, act = heappop(self._agenda)
            act(self._now)
        self._outcome.virtual_seconds = self._now
        return self._outcome

    # Time and events

    def _at(self, at: Seconds, act: Callable[[Seconds], None]) -> None:
        heappush(self._agenda, (at, next(self._order), act))

    def _every(self, seconds: Seconds, act: Callable[[Seconds], None], *, first: Seconds) -> None:
        """Upkeep: again and again, while anything else is still to come."""

        def turn(now: Seconds) -> None:
            act(now)
            self._at(now + seconds, turn)

        self._upkeep += 1
        self._at(first, turn)

    def _apply(self, event: LogEvent, now: Seconds) -> None:
        self._state.apply(event)
        self._show_later(event, now)

    def _show_later(self, event: LogEvent, now: Seconds) -> None:
        if self._seen is not self._state:
            self._unseen.append((now + self._scenario.load_lag_s, event))

    def _catch_up(self, now: Seconds) -> None:
        """Show policies what has become old enough to be seen."""
        unseen = self._unseen
        while unseen and unseen[0][0] <= now:
            self._seen.apply(unseen.popleft()[1])

    def _new_state(self) -> State:
        scenario = self._scenario
        settings = PoolSettings(
            block_tokens=scenario.block_tokens,
            speed=self._mirror.speed,
            affinity_level_tokens=max(512, scenario.block_tokens),
            hot_share=scenario.hot_share,
            cold_share=scenario.cold_share,
        )
        latency = _NoisyLatency(scenario) if scenario.estimate_error[0] else None
        return State(settings, self._policies.trackers(), latency=latency)

    # The fleet

    def _join(self, number: int, now: Seconds) -> None:
        scenario = self._scenario
        capacity = scenario.kv_capacity_tokens or self._profile.kv_capacity_tokens
        name = self._mirror.name_of(number)
        before = self._engines.get(name)
        epoch = Epoch(before.epoch + 1 if before else 1)
        settings = EngineSettings(
            block_size=scenario.block_tokens,
            num_gpu_blocks=capacity // scenario.block_tokens,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            eviction=scenario.eviction,
            seed=scenario.seed,
        )
        profile = _slowed(self._profile, scenario.slow_instances.get(number, 1.0))
        self._engines[name] = _Engine(name, epoch, EngineModel(profile, settings))
        self._apply(
            InstanceJoined(
                at=now,
                instance=name,
                epoch=epoch,
                url="",
                model="",
                block_tokens=scenario.block_tokens,
                engine_block_tokens=scenario.block_tokens,
                kv_capacity_tokens=capacity,
                max_model_len=capacity,
                prefill=self._profile.prefill_cost,
                role=self._role(number),
                decode=self._profile.decode_cost if self._splits else None,
                transfer_tokens_per_s=self._transfer_tokens_per_s if self._splits else 0.0,
            ),
            now,
        )
        self._carry_out(self._dispatcher.relocate_pending(now), now)
        self._note_size(now)

    @property
    def _splits(self) -> bool:
        return self._scenario.split != (0, 0)

    @property
    def _transfer_tokens_per_s(self) -> float:
        return self._scenario.kv_transfer_gb_per_s * 1e9 / self._profile.kv_bytes_per_token

    def _role(self, number: int) -> Role:
        prefill, decode = self._scenario.split
        if number < prefill:
            return "prefill"
        return "decode" if number < prefill + decode else "both"

    def _leave(self, engine: _Engine, now: Seconds, reason: str) -> None:
        self._apply(InstanceLeft(at=now, instance=engine.id, epoch=engine.epoch, reason=reason), now)
        engine.alive = False
        self._note_size(now)

    def _scale(self, wanted: int, now: Seconds) -> None:
        ready = [engine for engine in self._engines.values() if engine.id in self._state.fleet.ready]
        for number in range(len(self._engines), len(self._engines) + max(0, wanted - len(ready))):
            self._join(number, now)
        for engine in reversed(ready[wanted:]):
            self._apply(InstanceDraining(at=now, instance=engine.id, epoch=engine.epoch), now)
            self._at(now, lambda at, e=engine: self._leave_when_idle(e, at))  # type: ignore[misc]
        self._carry_out(self._dispatcher.relocate_pending(now), now)
        self._note_size(now)

    def _leave_when_idle(self, engine: _Engine, now: Seconds) -> None:
        line = self._state.workload.queues.get(engine.id)
        if engine.alive and line is not None and line.requests:
            self._at(now + NOTICE_SECONDS, lambda at: self._leave_when_idle(engine, at))
        else:
            self._leave(engine, now, "drained")

    def _fail(self, failure: Failure, now: Seconds) -> None:
        engine = self._engines[self._mirror.name_of(failure.instance)]
        engine.alive = False
        engine.wake += 1
        # Who is inside is known before the first is lost: losing one may grant another to the dead engine, and that
        # one is refused by `_submit`.
        inside = [(r.id, r.stage) for r in self._state.workload.requests.values() if r.instance == engine.id]
        for request_id, stage in inside:
            if stage in (Stage.PREFILL, Stage.HANDED_OVER, Stage.DECODING):
                self._lose(request_id, engine, now, retry=stage is not Stage.DECODING)
        self._at(now + NOTICE_SECONDS, lambda at: self._notice(engine, at))
        if failure.back_at is not None:
            self._at(failure.back_at, lambda at: self._join(failure.instance, at))

    def _notice(self, engine: _Engine, now: Seconds) -> None:
        if self._engines[engine.id] is engine:
            self._apply(_report_of(engine, now, serving=False), now)
            self._carry_out(self._dispatcher.relocate_pending(now), now)
            self._note_size(now)

    def _note_size(self, now: Seconds) -> None:
        ready = len(self._state.fleet.ready)
        if ready != self._ready:
            self._ready = ready
            self._outcome.instance_changes.append((now, ready))

    # Requests

    def _arrive(self, number: int, now: Seconds) -> None:
        scenario, request = self._scenario, self._requests[number]
        command = RouteRequest(
            request=RequestId(str(number)),
            ingress="",
            arrived_at=now,
            tenant=Tenant(request.tenant),
            session=SessionId(request.session),
            keys=pack_keys(self._mirror.keys_of(request, scenario.block_tokens)),
            prompt_tokens=request.input_length,
            max_output_tokens=request.output_tokens,
            slo_ttft=_objective(request, scenario),
            slo_tpot=SLO_TPOT_SECONDS,
        )
        self._commands[command.request] = command
        self._route(command, now)

    def _route(self, command: RouteRequest, now: Seconds) -> None:
        self._catch_up(now)
        started = time.process_time()
        events = self._dispatcher.route(command, now)
        self._outcome.decision_seconds += time.process_time() - started
        self._outcome.decisions += 1
        self._carry_out(events, now)
        placed = self._state.workload.requests.get(command.request)
        if placed is not None and placed.instance not in self._state.fleet.ready:
            # Only a view that lags behind places where nobody takes requests any more.
            self._carry_out(self._dispatcher.relocate_pending(now), now)

    def _carry_out(self, events: list[LogEvent], now: Seconds) -> None:
        """Decisions are applied already; here they have their effect on engines and rows."""
        for event in events:
            self._show_later(event, now)
            match event:
                case RequestPlaced():
                    row = self._row(event.request)
                    row.instance = event.instance
                    row.predicted_ttft = now - row.arrived_at + event.predicted_ttft
                    row.predicted_cached_tokens = row.prompt_tokens - event.uncached_tokens
                case RequestMigrated():
                    row = self._row(event.request)
                    row.instance = event.instance
                    row.predicted_cached_tokens = row.prompt_tokens - event.uncached_tokens
                    row.migrations += 1
                    self._outcome.migrations += 1
                case RequestGranted():
                    self._row(event.request).granted_at = now
                    self._send(event.request, event.instance, now)
                case RequestHandedOver():
                    self._fetch(event, now)
                case HandOverRefused():
                    self._give_up(event, now)
                case RequestRejected():
                    self._end(event.request, now, "rejected", event.reason)
                case _:
                    pass

    def _send(self, request_id: RequestId, instance: InstanceId, now: Seconds) -> None:
        way = self._mirror.way_of(self._requests[int(request_id)]) if self._mirror.way_of else 0.0
        if not way:
            self._submit(request_id, instance, now)
            return

        def come(at: Seconds) -> None:
            request = self._state.workload.requests.get(request_id)
            if request is not None and request.instance == instance and request.granted_at == now:
                self._submit(request_id, instance, at)

        self._at(now + way, come)

    def _submit(self, request_id: RequestId, instance: InstanceId, now: Seconds) -> None:
        engine = self._engines[instance]
        if not engine.alive:
            # The connection is refused: as soon as this decision is carried out, the ingress asks again.
            self._at(now, lambda at: self._lose(request_id, engine, at, retry=True))
            return
        command = self._commands[request_id]
        prompt = HashedPrompt(command.prompt_tokens, unpack_keys(command.keys))
        hands_over = self._hands_over(request_id)
        tokens = 1 if hands_over else self._row(request_id).output_tokens
        engine.model.submit(request_id, prompt, max_tokens=tokens, now=now, held=hands_over)
        self._turn(engine, now)

    def _hands_over(self, request_id: RequestId) -> bool:
        """Whether it is prefilled where it is, to be decoded elsewhere."""
        return self._splits and bool(self._state.workload.requests[request_id].decode)

    def _hand_over(self, engine: _Engine, ended: PrefillEnded, now: Seconds) -> None:
        """Its prefill is over: the ingress asks where it goes on."""
        request = self._state.workload.requests[ended.request]
        self._row(ended.request).cached_tokens = ended.cached_tokens
        command = HandOverRequest(
            request=request.id, attempt=request.attempt, instance=engine.id, prefill=now - request.granted_at
        )
        self._carry_out(self._dispatcher.hand_over(command, now), now)

    def _give_up(self, event: HandOverRefused, now: Seconds) -> None:
        """Nobody decodes it: its ingress tells the client."""
        self._engines[event.source].model.release_kv(event.request)
        failed = RequestFailed(at=now, request=event.request, reason=event.reason, status=429, instance=event.source)
        self._apply(failed, now)
        self._end(event.request, now, "rejected", event.reason)

    def _fetch(self, event: RequestHandedOver, now: Seconds) -> None:
        """The KV cache is on its way; when it has come, the decode begins."""
        source, target, command = (
            self._engines[event.source],
            self._engines[event.instance],
            self._commands[event.request],
        )
        prompt = HashedPrompt(command.prompt_tokens, unpack_keys(command.keys))
        missing = max(0, prompt.length - target.model.cached_tokens(prompt))

        def come(at: Seconds) -> None:
            source.model.release_kv(event.request)
            request = self._state.workload.requests.get(event.request)
            if request is None or request.attempt != event.attempt or request.instance != event.instance:
                return
            if not (source.alive and target.alive):
                self._lose(event.request, target, at, retry=True)
                return
            row = self._row(event.request)
            row.instance = target.id
            target.model.submit(request.id, prompt, max_tokens=row.output_tokens, now=at, received=prompt.length)
            self._turn(target, at)

        self._at(now + missing / self._transfer_tokens_per_s, come)

    def _lose(self, request_id: RequestId, engine: _Engine, now: Seconds, *, retry: bool) -> None:
        """An engine failed a request: another place, or the end."""
        row, command = self._row(request_id), self._commands[request_id]
        if retry and row.retries < RETRIES_MAX:
            row.retries += 1
            excluded = [*command.excluded, engine.id]
            again = msgspec.structs.replace(command, attempt=command.attempt + 1, excluded=excluded)
            self._commands[request_id] = again
            self._route(again, now)
            return
        event = RequestFailed(at=now, request=request_id, reason="engine_failed", status=502, instance=engine.id)
        self._apply(event, now)
        self._end(request_id, now, "failed", "engine_failed")

    def _end(self, request_id: RequestId, now: Seconds, end: str, reason: str = "") -> None:
        row = self._row(request_id)
        row.end, row.reason, row.ended_at = end, reason, now  # type: ignore[assignment]
        self._commands.pop(request_id, None)
        self._open -= 1

    def _row(self, request_id: RequestId) -> RequestRow:
        return self._outcome.rows[int(request_id)]

    # Engines

    def _turn(self, engine: _Engine, now: Seconds) -> None:
        """Begin a step if none is under way, and be there when the one under way ends."""
        step = engine.model.step or engine.model.begin_step(now, max_fused_steps=FUSED_STEPS_MAX)
        engine.wake += 1
        if step is not None:
            self._at(step.ends_at, lambda at, w=engine.wake: self._step_ended(engine, w, at))  # type: ignore[misc]

    def _step_ended(self, engine: _Engine, wake: int, now: Seconds) -> None:
        if wake != engine.wake or not engine.alive:
            return
        result = engine.model.end_step(now)
        self._tell_changes(engine, result.changes, now)
        self._answer(engine, result, now)
        self._turn(engine, now)

    def _answer(self, engine: _Engine, result: StepResult, now: Seconds) -> None:
        handed_over = {ended.request for ended in result.first_tokens if self._hands_over(ended.request)}
        for ended in result.first_tokens:
            if ended.request in handed_over:
                self._hand_over(engine, ended, now)
            else:
                self._first_token(engine, ended, now)
        for request_id in result.finished:
            if request_id in handed_over:
                continue
            row = self._row(request_id)
            assert row.first_token_at is not None
            tokens = row.output_tokens
            event = RequestFinished(
                at=now,
                request=request_id,
                instance=engine.id,
                e2e=now - row.arrived_at,
                prompt_tokens=row.prompt_tokens,
                completion_tokens=tokens,
                cached_tokens=row.cached_tokens,
                ttft=row.first_token_at - row.arrived_at,
                tpot=(now - row.first_token_at) / (tokens - 1) if tokens > 1 else 0.0,
            )
            self._apply(event, now)
            self._end(request_id, now, "finished")
        if result.first_tokens or result.finished:
            self._carry_out(self._dispatcher.grant_waiting(engine.id, now), now)

    def _first_token(self, engine: _Engine, ended: PrefillEnded, now: Seconds) -> None:
        row = self._row(ended.request)
        request = self._state.workload.requests[ended.request]
        row.first_token_at, row.instance, granted_at = now, engine.id, request.granted_at
        if not request.prefilled_by:
            row.cached_tokens = ended.cached_tokens
        event = PrefillFinished(
            at=now, request=ended.request, instance=engine.id, ttft=now - row.arrived_at, prefill=now - granted_at
        )
        self._apply(event, now)

    def _tell_changes(self, engine: _Engine, changes: list[CacheChange], now: Seconds) -> None:
        events: list[LogEvent] = []
        for change in changes:
            engine.sequence += 1
            sequence = engine.sequence
            match change:
                case RunCached():
                    run = Run(pack_keys(map(BlockKey, change.hashes)), BlockKey(change.parent or 0))
                    self._remember(engine, change)
                    events.append(
                        BlocksStored(at=now, instance=engine.id, epoch=engine.epoch, sequence=sequence, runs=[run])
                    )
                case BlocksEvicted():
                    for block in change.hashes:
                        engine.parents.pop(BlockKey(block), None)
                    keys = pack_keys(map(BlockKey, change.hashes))
                    events.append(
                        BlocksRemoved(at=now, instance=engine.id, epoch=engine.epoch, sequence=sequence, keys=keys)
                    )
                case CacheReset():
                    engine.parents.clear()
        self._deliver(events, now)

    def _remember(self, engine: _Engine, change: RunCached) -> None:
        parent = BlockKey(change.parent or 0)
        for block in change.hashes:
            engine.parents[BlockKey(block)] = parent
            parent = BlockKey(block)

    def _deliver(self, events: list[LogEvent], now: Seconds) -> None:
        scenario = self._scenario
        for event in events:
            if scenario.event_loss and uniform(scenario.seed, "loss", str(next(self._lost))) < scenario.event_loss:
                continue
            if scenario.event_delay_s:
                self._at(now + scenario.event_delay_s, lambda at, e=event: self._apply(e, at))  # type: ignore[misc]
            else:
                self._apply(event, now)

    # What happens every so often

    def _sample(self, now: Seconds) -> None:
        lines = self._state.workload.queues
        instances = self._state.fleet.ready
        pending = tuple(lines[i].load_tokens if i in lines else 0 for i in instances)
        running = tuple(len(lines[i].decoding) if i in lines else 0 for i in instances)
        self._outcome.samples.append(LoadSample(now, pending, running, instances))

    def _rebalance(self, now: Seconds) -> None:
        self._catch_up(now)
        plan = self._rebalancing.plan(self._seen, now)
        if plan.migrations:
            self._carry_out(self._dispatcher.migrate(plan, now), now)

    def _report(self, now: Seconds) -> None:
        """Anti-entropy: a report shows what was lost, and a snapshot heals it."""
        for engine in self._engines.values():
            if engine.alive and engine.id in self._state.fleet:
                self._apply(_report_of(engine, now, serving=True), now)
                if self._state.fleet[engine.id].doubt:
                    self._apply(_snapshot_of(engine, now), now)


def row_of(number: int, request: WorkloadRequest, scenario: Scenario) -> RequestRow:
    """The row of a request that has just arrived."""
    return RequestRow(
        number=number,
        tenant=request.tenant,
        arrived_at=request.arrival_s,
        prompt_tokens=request.input_length,
        output_tokens=1 if scenario.prefill_only else max(1, request.output_tokens),
        slo_ttft=_objective(request, scenario),
    )


def _objective(request: WorkloadRequest, scenario: Scenario) -> Seconds:
    return scenario.slo_ttft_s if request.slo_ttft_s is None else request.slo_ttft_s


def _scrambled(value: int) -> int:
    """A 64-bit number that no other value gives (an odd factor is invertible), and that is not 0."""
    return value * 0x9E3779B97F4A7C15 % 2**64


def _slowed(profile: EngineProfile, speed: float) -> EngineProfile:
    if speed == 1.0:
        return profile
    return replace(
        profile,
        flops_per_s=profile.flops_per_s * speed,
        memory_bytes_per_s=profile.memory_bytes_per_s * speed,
        step_overhead_s=profile.step_overhead_s / speed,
    )


def _report_of(engine: _Engine, now: Seconds, *, serving: bool) -> InstanceReported:
    digest = 0
    for key in engine.parents:
        digest ^= key
    return InstanceReported(
        at=now,
        instance=engine.id,
        epoch=engine.epoch,
        serving=serving,
        waiting=0,
        running=0,
        kv_usage=0.0,
        sequence=engine.sequence,
        blocks=len(engine.parents),
        digest=digest,
    )


def _snapshot_of(engine: _Engine, now: Seconds) -> CacheSnapshot:
    engine.sequence += 1
    runs = [Run(pack_keys([key]), parent) for key, parent in engine.parents.items()]
    return CacheSnapshot(at=now, instance=engine.id, epoch=engine.epoch, sequence=engine.sequence, runs=runs)
