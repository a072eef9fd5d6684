"""What engines held when a request was placed, with hindsight. A cache event tells of its engine at its `at`, and reaches
the log later: one that is older than a placement before it in the log counts for that placement too. Prompts that an
engine has but has not computed count as held (`PromptsInFlight`), as they do for the leader."""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheEvent
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, RequestId
from pointsman.state.prefix_index import PrefixIndex
from pointsman.state.state import State

LEVELS_MAX = 4
"""Different depths at which engines hold a prompt; holders of less than the fourth are not followed."""
WATCHED_MAX = 20_000
"""Placements that late events may still change, and prompts that wait for events, whatever times a log has."""


@dataclass(slots=True, eq=False)
class Holding:
    """How many leading blocks of a prompt engines held at `at`."""

    at: EngineSeconds
    keys: list[BlockKey]
    among: int
    """Bits of the engines that could take the request."""
    levels: list[tuple[int, int]]
    """Depth, and bits of the engines that hold exactly so much, the deepest first."""
    late: dict[int, int] = field(default_factory=dict)
    """Depth by bit, as late events corrected it."""
    watched: list[BlockKey] = field(default_factory=list)

    @property
    def depth(self) -> int:
        corrected = reduce(or_, self.late, 0)
        deepest = max(self.late.values(), default=0)
        unchanged = next((depth for depth, engines in self.levels if engines & ~corrected), 0)
        return max(deepest, unchanged)

    def depth_at(self, bit: int) -> int:
        """Of one engine."""
        known = self.late.get(bit)
        return next((depth for depth, engines in self.levels if engines & bit), 0) if known is None else known


class Hindsight:
    def __init__(self) -> None:
        self._watching: dict[BlockKey, set[Holding]] = {}
        """Placements by the blocks whose storing or removal would change their depth."""
        self._holdings: deque[Holding] = deque()
        self._told: dict[InstanceId, tuple[EngineSeconds, EngineSeconds]] = {}
        """Times of an engine's newest cache events, and of those before."""

    def placed(self, at: EngineSeconds, keys: list[BlockKey], index: PrefixIndex, among: int) -> Holding:
        holding = Holding(at, keys, among, _levels(keys, index, among))
        self._watch(holding, holding.levels[0][0] if holding.levels else 0)
        self._holdings.append(holding)
        if len(self._holdings) > WATCHED_MAX:
            self._forget(self._holdings.popleft())
        return holding

    def settle(self, before: EngineSeconds) -> None:
        """Placements before this moment change no more."""
        while self._holdings and self._holdings[0].at < before:
            self._forget(self._holdings.popleft())

    def apply(self, event: CacheEvent, changed: list[BlockKey], state: State) -> None:
        """`changed`: blocks stored or removed, if the event has only these. Call after State has applied the event."""
        instance = state.current(event.instance, event.epoch)
        if instance is None or instance.sequence != event.sequence:
            return  # it had no effect
        since = self._true_since(event, state)
        if not self._holdings or since >= self._holdings[-1].at:
            return
        if isinstance(event, BlocksStored | BlocksRemoved):
            watching = self._watching
            if watching.keys().isdisjoint(changed):
                return
            touched = {holding for key in changed if key in watching for holding in watching[key]}
        else:
            touched = set(self._holdings)
        bit = state.index.bits([event.instance])
        for holding in touched:
            if holding.at > since and holding.among & bit:
                holding.late[bit] = state.index.depth(event.instance, holding.keys)
                self._watch(holding, holding.depth)

    def left(self, instance: InstanceId) -> None:
        self._told.pop(instance, None)

    def _true_since(self, event: CacheEvent, state: State) -> EngineSeconds:
        """An engine stores blocks at the end of a step, removes them at its beginning, and tells of both at the end. So
        what was removed was gone since the events before, or since the request came that needed the room."""
        newest, before = self._told.get(event.instance, (0.0, 0.0))
        if event.at > newest:
            newest, before = event.at, newest
            self._told[event.instance] = newest, before
        queue = state.workload.queues.get(event.instance)
        if not isinstance(event, BlocksRemoved) or queue is None:
            return event.at
        if queue.prefill:
            needed = next(iter(queue.prefill.values())).granted_at
        elif queue.decoding:
            needed = next(reversed(queue.decoding.values())).granted_at
        else:
            return event.at
        return min(event.at, max(before, needed))

    def _watch(self, holding: Holding, depth: int) -> None:
        """For the last block held at the greatest depth, and the next: only these change it."""
        for key in holding.keys[max(0, depth - 1) : depth + 1]:
            watchers = self._watching.get(key)
            if watchers is None:
                self._watching[key] = {holding}
            else:
                watchers.add(holding)
            holding.watched.append(key)

    def _forget(self, holding: Holding) -> None:
        for key in holding.watched:
            watchers = self._watching.get(key)
            if watchers is not None:
                watchers.discard(holding)
                if not watchers:
                    del self._watching[key]


def _levels(keys: list[BlockKey], index: PrefixIndex, among: int) -> list[tuple[int, int]]:
    levels: list[tuple[int, int]] = []
    holders = index.holders
    high = len(keys)
    while among and high and len(levels) < LEVELS_MAX:
        low = 0
        while low < high:
            middle = (low + high) >> 1
            if holders(keys[middle]) & among:
                low = middle + 1
            else:
                high = middle
        if not low:
            break
        engines = holders(keys[low - 1]) & among
        levels.append((low, engines))
        among &= ~engines
        high = low - 1
    return levels


@dataclass(slots=True, eq=False)
class _Computed:
    instance: InstanceId
    deadline: EngineSeconds
    keys: list[BlockKey]


class PromptsInFlight:
    """Blocks of prompts that were placed and are not yet known to be computed, on whichever engine."""

    def __init__(self) -> None:
        self._blocks: Counter[BlockKey] = Counter()
        self._prompts: dict[RequestId, list[BlockKey]] = {}
        self._computed: deque[_Computed] = deque()
        self._unconfirmed: dict[InstanceId, list[_Computed]] = {}

    def leading(self, keys: list[BlockKey]) -> int:
        blocks = self._blocks
        if not keys or keys[0] not in blocks:
            return 0
        return bisect_left(keys, True, key=lambda key: key not in blocks)

    def add(self, request: RequestId, keys: list[BlockKey]) -> None:
        if keys and request not in self._prompts:
            self._prompts[request] = keys
            self._blocks.update(keys)

    def computed(self, request: RequestId, instance: InstanceId, index: PrefixIndex, deadline: EngineSeconds) -> None:
        """From now on its engine's cache events tell of it; until they do, or `deadline`, it counts here."""
        keys = self._prompts.pop(request, None)
        if keys is None:
            return
        if index.holds(instance, keys[-1]):
            self._release(keys)
            return
        computed = _Computed(instance, deadline, keys)
        self._computed.append(computed)
        self._unconfirmed.setdefault(instance, []).append(computed)

    def gone(self, request: RequestId) -> None:
        self._release(self._prompts.pop(request, []))

    def confirm(self, instance: InstanceId, index: PrefixIndex) -> None:
        """After a cache event of the instance."""
        for computed in list(self._unconfirmed.get(instance, ())):
            if index.holds(instance, computed.keys[-1]):
                self._settle(computed)

    def expire(self, now: EngineSeconds) -> None:
        waiting = self._computed
        while waiting and (waiting[0].deadline <= now or not waiting[0].keys or len(waiting) > WATCHED_MAX):
            self._settle(waiting.popleft())

    def _settle(self, computed: _Computed) -> None:
        if computed.keys:
            self._release(computed.keys)
            computed.keys = []
            of_instance = self._unconfirmed[computed.instance]
            of_instance.remove(computed)
            if not of_instance:
                del self._unconfirmed[computed.instance]

    def _release(self, keys: list[BlockKey]) -> None:
        blocks = self._blocks
        count, forget = blocks.get, blocks.pop
        for key in keys:
            left = count(key, 1) - 1
            if left:
                blocks[key] = left
            else:
                forget(key, None)
