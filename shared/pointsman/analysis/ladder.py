"""The hit-rate ladder: which share of prompt tokens a cache could have had, from an unbounded one down to what engines
delivered. In: events in log order, each after State has applied it. Out: sums by hour and tenant (`ladder_figures`). What
each rung means, and what no log can tell, is in docs/data.md#hit-rate. Costs microseconds a request: nothing here
looks at every engine or at every block of an engine."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pointsman.analysis.hindsight import WATCHED_MAX, Hindsight, Holding, PromptsInFlight
from pointsman.analysis.ladder_figures import LadderFigures
from pointsman.analysis.recent_blocks import RecentBlocks, SeenBlocks
from pointsman.analysis.tier_shares import delivered_by_tier
from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheSnapshot
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    TierTokens,
    may_come_again,
)
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    cached_of_keys,
)
from pointsman.primitives import (
    Answers,
    BlockKey,
    EngineSeconds,
    InstanceId,
    RequestId,
    Sequence,
    Tenant,
    Tokens,
    WallSeconds,
    engine_seconds,
    wall_time_of,
)
from pointsman.state.holdings import CONFIRMATION_WALL_SECONDS
from pointsman.state.state import PoolSettings, State

HINDSIGHT_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
"""How late a cache event may reach the log and still count for placements after its time."""
SEEN_BLOCKS_MIN, SEEN_BLOCKS_MAX = 2_000_000, 8_000_000
"""Blocks that the unbounded cache remembers: twice the fleet's capacity, within these. The second bounds both caches."""
OPEN_MAX = 100_000
"""Requests that are placed and not counted."""


@dataclass(slots=True, eq=False)
class _Placed:
    """A request, from its placement until it is counted. Rungs in tokens; those not known yet are 0."""

    request: RequestId
    tenant: Tenant
    attempt: int
    at: EngineSeconds
    sequence: Sequence
    """Of the log entry that placed it."""
    prompt_tokens: Tokens
    answers: Answers
    block_tokens: Tokens
    usable_tokens: Tokens
    """All but the last, in whole engine blocks: what an engine can take from its cache."""
    holding: Holding
    chosen: Tokens
    loads: list[TierTokens]
    """Of `chosen`."""
    unbounded: Tokens = 0
    capacity: Tokens = 0
    promised: Tokens = 0
    known: Tokens = 0
    settled: bool = False
    """No cache event changes `holding` any more."""
    end: RequestFinished | None = None

    def tokens(self, blocks: int) -> Tokens:
        return min(blocks * self.block_tokens, self.usable_tokens)


class HitRateLadder:
    def __init__(self, settings: PoolSettings) -> None:
        self.figures = LadderFigures()
        self.counts_from: Sequence = 0
        """Requests placed before this log entry only fill the caches."""
        self._settings = settings
        self._seen = SeenBlocks(SEEN_BLOCKS_MIN)
        self._fleet_cache = RecentBlocks(SEEN_BLOCKS_MIN)
        self._hindsight = Hindsight()
        self._in_flight = PromptsInFlight()
        self._open: OrderedDict[RequestId, _Placed] = OrderedDict()
        self._due: deque[_Placed] = deque()
        """Placed, in order, until late cache events can change them no more."""
        self._ready: tuple[InstanceId, ...] = ()
        self._eligible = 0
        self._steps: dict[type, Callable[[Any, State], None]] = {
            RequestPlaced: self._place,
            RequestMigrated: self._move,
            RequestGranted: self._move,
            PrefillFinished: self._compute,
            RequestHandedOver: self._compute,
            RequestFinished: self._finish,
            RequestFailed: self._drop,
            RequestCancelled: self._drop,
            RequestRejected: self._drop,
            BlocksStored: self._store,
            CacheSnapshot: self._store,
            BlocksRemoved: self._remove,
            CacheCleared: self._clear,
            InstanceJoined: self._resize,
            InstanceLeft: self._resize,
        }

    def begin(self, state: State) -> None:
        """Before the first entry, and again if reading starts anew: what engines hold counts as seen."""
        self._hindsight, self._in_flight = Hindsight(), PromptsInFlight()
        self._open.clear()
        self._due.clear()
        for instance in state.index.instances:
            self._keep(list(state.index.keys(instance)))
        self._measure_capacity(state)

    def apply(self, event: LogEvent, state: State) -> None:
        """`state`: has applied the event."""
        step = self._steps.get(type(event))
        if step is not None:
            self._in_flight.expire(state.last_at)
            step(event, state)
            self._settle(state.last_at - engine_seconds(HINDSIGHT_WALL_SECONDS, self._settings.speed), state)

    def settle(self, state: State) -> None:
        """At the end of a log: count all that finished."""
        self._settle(float("inf"), state)

    def _place(self, event: RequestPlaced, state: State) -> None:
        request = state.workload.requests.get(event.request)
        known = self._open.get(event.request)
        if (
            request is None
            or (request.placed_at, request.instance, request.attempt) != (event.at, event.instance, event.attempt)
            or (known is not None and known.attempt >= event.attempt)
        ):
            return  # it had no effect
        keys, engine = request.keys, state.fleet.get(event.instance)
        block_tokens = engine.engine_block_tokens if engine is not None else self._settings.block_tokens
        among = (self._ready_bits(state) | state.index.bits([event.instance])) & ~state.index.bits(event.excluded)
        holding = self._hindsight.placed(event.at, keys, state.index, among)
        placed = _Placed(
            request=request.id,
            tenant=request.tenant,
            attempt=event.attempt,
            at=event.at,
            sequence=state.sequence,
            prompt_tokens=request.prompt_tokens,
            answers=request.answers,
            block_tokens=self._settings.block_tokens,
            usable_tokens=max(0, request.prompt_tokens - 1) // block_tokens * block_tokens,
            holding=holding,
            chosen=request.prompt_tokens - event.uncached_tokens,
            loads=event.loads,
        )
        self._in_flight.gone(request.id)  # an attempt that failed
        held = holding.depth
        placed.promised = placed.tokens(max(self._in_flight.leading(keys), _reported(state, keys)))
        placed.known = max(placed.chosen, placed.promised, placed.tokens(held))
        earlier = known or self._open.pop(request.instead_of, None)
        if earlier is None:
            placed.unbounded = placed.tokens(self._seen.leading(keys))
            placed.capacity = placed.tokens(self._fleet_cache.leading(keys))
            self._seen.use(keys)
            self._fleet_cache.use(keys)
        else:
            placed.unbounded, placed.capacity = earlier.unbounded, earlier.capacity
        self._in_flight.add(event.request, keys)
        self._open[event.request] = placed
        if len(self._open) > OPEN_MAX:
            self._in_flight.gone(self._open.popitem(last=False)[0])
        self._due.append(placed)

    def _move(self, event: RequestMigrated | RequestGranted, state: State) -> None:
        """A grant moves a request if its ingress chose the engine itself."""
        placed, request = self._open.get(event.request), state.workload.requests.get(event.request)
        if placed is not None and request is not None and (event.stamp is None or isinstance(event, RequestMigrated)):
            placed.chosen, placed.loads = request.prompt_tokens - request.uncached_tokens, list(request.loads)
            placed.known = max(placed.known, placed.chosen)

    def _compute(self, event: PrefillFinished | RequestHandedOver | RequestFinished, state: State) -> None:
        deadline = event.at + engine_seconds(CONFIRMATION_WALL_SECONDS, self._settings.speed)
        instance = event.source if isinstance(event, RequestHandedOver) else event.instance
        self._in_flight.computed(event.request, instance, state.index, deadline)

    def _finish(self, event: RequestFinished, state: State) -> None:
        placed = self._open.get(event.request)
        if placed is None or placed.end is not None:
            return
        self._compute(event, state)
        placed.end = event
        if placed.settled:
            self._count(placed, event, state)

    def _drop(self, event: RequestFailed | RequestCancelled | RequestRejected, _state: State) -> None:
        self._in_flight.gone(event.request)
        if not may_come_again(event):
            self._open.pop(event.request, None)

    def _store(self, event: BlocksStored | CacheSnapshot, state: State) -> None:
        if isinstance(event, BlocksStored) and event.tier != "device":
            return
        stored = [key for run in event.runs for key in unpack_keys(run.keys)]
        self._keep(self._seen.unseen(stored))
        self._hindsight.apply(event, stored, state)
        self._in_flight.confirm(event.instance, state.index)

    def _remove(self, event: BlocksRemoved, state: State) -> None:
        if event.tier == "device":
            self._hindsight.apply(event, unpack_keys(event.keys), state)

    def _clear(self, event: CacheCleared, state: State) -> None:
        self._hindsight.apply(event, [], state)

    def _resize(self, event: InstanceJoined | InstanceLeft, state: State) -> None:
        self._hindsight.left(event.instance)
        self._measure_capacity(state)

    def _measure_capacity(self, state: State) -> None:
        engines = [engine for engine in state.fleet.instances if engine.role != "decode"]
        tokens = sum(max(0, engine.kv_capacity_tokens) for engine in engines)
        blocks = tokens // self._settings.block_tokens or SEEN_BLOCKS_MAX  # nobody told
        self._seen.blocks_max = min(SEEN_BLOCKS_MAX, max(SEEN_BLOCKS_MIN, 2 * blocks))
        self._fleet_cache.resize(min(SEEN_BLOCKS_MAX, blocks))

    def _ready_bits(self, state: State) -> int:
        if state.fleet.ready is not self._ready:
            self._ready = state.fleet.ready
            self._eligible = state.index.bits(self._ready)
        return self._eligible

    def _keep(self, keys: list[BlockKey]) -> None:
        self._seen.use(keys)
        self._fleet_cache.use(keys)

    def _settle(self, before: EngineSeconds, state: State) -> None:
        while self._due and (self._due[0].at < before or len(self._due) > WATCHED_MAX):
            placed = self._due.popleft()
            placed.settled = True
            if placed.end is not None and self._open.get(placed.request) is placed:
                self._count(placed, placed.end, state)
        self._hindsight.settle(before)

    def _count(self, placed: _Placed, end: RequestFinished, state: State) -> None:
        del self._open[placed.request]
        delivered = cached_of_keys(end, placed.answers)
        _correct_by_delivery(placed, end.instance, delivered, state)
        if placed.sequence < self.counts_from:
            return
        prompt = max(0, end.prompt_tokens if end.prompt_tokens > 0 else placed.prompt_tokens)
        tokens = [max(0, min(prompt, of_rung)) for of_rung in _rungs(placed, delivered)]
        for tally in self.figures.tallies(wall_time_of(placed.at, self._settings.speed), placed.tenant):
            if delivered < 0:
                tally.untold += 1
            else:
                tally.count(prompt, tokens)
                if placed.loads:
                    by_tier = delivered_by_tier(placed.chosen, placed.loads, tokens[-1])
                    tally.loaded_tokens += tokens[-1] - by_tier["device"]


def _rungs(placed: _Placed, delivered: Tokens) -> list[Tokens]:
    """In the order of RUNGS. What an engine delivered, it held, and somebody had sent before."""
    perfect = max(placed.promised, placed.tokens(placed.holding.depth), delivered)
    if placed.loads:  # hindsight is of devices alone
        perfect = max(perfect, placed.known)
    unbounded = max(placed.unbounded, placed.capacity, perfect)
    return [unbounded, placed.capacity, perfect, placed.known, placed.chosen, delivered]


def _correct_by_delivery(placed: _Placed, instance: InstanceId, tokens: Tokens, state: State) -> None:
    """What the engine did not deliver, although no event says that it lost it since, it did not hold."""
    holding, bit = placed.holding, state.index.bits([instance])
    if not bit or tokens < 0 or tokens >= placed.tokens(holding.depth_at(bit)):
        return
    delivered = tokens // placed.block_tokens
    if not state.contradictions.removed_after(instance, holding.keys[delivered], placed.sequence):
        holding.late[bit] = delivered


def _reported(state: State, keys: list[BlockKey]) -> int:
    """Leading blocks that an engine is known to have delivered of late, where its cache events are not relied on."""
    hits: dict[InstanceId, int] = {}
    state.delivered.extend_hits(keys, hits)
    return max(hits.values(), default=0)
