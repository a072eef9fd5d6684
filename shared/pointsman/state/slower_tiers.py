"""Blocks that engines hold beyond device memory, by tier, and how fast each engine loads them back. A prompt's hit on an
instance is what the device holds from its start, then what slower tiers hold without a break: vLLM looks its connectors
up from where the device's hit ends. A block may be in several tiers, and the first that has it serves it.

Each tier is a `PrefixIndex` of lone blocks, since a tier need not hold a prompt's beginning. All tiers give an instance
the same bit, so their masks combine. They exist only once a slower tier reports. The `external` tier has one holder,
the pool's store; every instance connected to it can load what any of them stored there.

Engines also lose blocks silently (LMCache in the engine, Mooncake's store): what a delivery shows to be gone counts as
missing for some minutes (`refute`), while the index keeps agreeing with its worker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import get_args

from pointsman.contracts.cache import SlowerTier
from pointsman.contracts.decisions import TierTokens
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, WallSeconds
from pointsman.state.fleet import Instance
from pointsman.state.prefix_index import ROOT, PrefixIndex
from pointsman.state.reported_hits import forget_oldest, forget_until

TIERS: tuple[SlowerTier, ...] = get_args(SlowerTier)
STORE = InstanceId("")
"""The holder of the `external` tier."""

REFUTED_WALL_SECONDS: WallSeconds = WallSeconds(300.0)
RATE_SECONDS: EngineSeconds = 300.0
"""After which a learned rate is forgotten."""
REFUTED_KEYS_MAX = 65_536
"""Per instance; the oldest count as held again."""

LOAD_SHARES: dict[SlowerTier, float] = {"host": 1 / 16, "storage": 1 / 4, "external": 1 / 8}
"""Before anything is learned: seconds to load a token, as a share of the seconds to compute it."""
PRIOR_TOKENS = 4096
FADE = 0.97
LOAD_SHARE_MIN = 0.1
"""Of the prior: observed loads may be hidden behind other work, so that they seem free."""

TierBlocks = dict[SlowerTier, int]


@dataclass(slots=True)
class LoadRate:
    """Fading sums over observed loads. `at`: of the last one."""

    seconds: EngineSeconds = 0.0
    tokens: float = 0.0
    at: EngineSeconds = 0.0

    def per_token(self, prior: EngineSeconds) -> EngineSeconds:
        learned = (PRIOR_TOKENS * prior + self.seconds) / (PRIOR_TOKENS + self.tokens)
        return max(learned, LOAD_SHARE_MIN * prior)


class SlowerTiers:
    def __init__(self) -> None:
        self._indexes: dict[SlowerTier, PrefixIndex] = {}
        self._members: dict[InstanceId, bool] = {}
        """Instances, and whether they load from the shared store."""
        self._refuted: dict[InstanceId, dict[BlockKey, EngineSeconds]] = {}
        self._reporting: dict[InstanceId, None] = {}
        """Instances that told of a slower tier in this epoch."""
        self._rates: dict[InstanceId, dict[SlowerTier, LoadRate]] = {}

    def __bool__(self) -> bool:
        return bool(self._indexes)

    def join(self, instance: InstanceId, *, shared_store: bool) -> None:
        self._members[instance] = shared_store
        for index in self._indexes.values():
            index.add(instance)

    def drop(self, instance: InstanceId) -> None:
        """The store is dropped with the last instance that uses it."""
        self._members.pop(instance, None)
        self._reporting.pop(instance, None)
        self._refuted.pop(instance, None)
        self._rates.pop(instance, None)
        for index in self._indexes.values():
            index.drop(instance)
        if self._indexes and not any(self._members.values()):
            self._indexes["external"].clear(STORE)

    def store(self, tier: SlowerTier, instance: InstanceId, keys: list[BlockKey]) -> None:
        if not self._indexes:
            self._begin()
        self._reporting[instance] = None
        index, holder = self._indexes[tier], self._holder(tier, instance)
        if tier == "external":
            self._members[instance] = True
        for key in keys:
            index.store(holder, ROOT, [key])
        for refuted in self._refuted.values() if tier == "external" else (self._refuted.get(instance, {}),):
            for key in keys if refuted else ():
                refuted.pop(key, None)

    def drop_indexes(self) -> None:
        self._indexes.clear()
        self._refuted.clear()

    def reports(self, instance: InstanceId) -> bool:
        """Its connector may hold more than its events describe, also after `AllBlocksCleared`."""
        return instance in self._reporting

    def remove(self, tier: SlowerTier, instance: InstanceId, keys: list[BlockKey]) -> None:
        if self._indexes:
            self._indexes[tier].remove(self._holder(tier, instance), keys)

    def clear(self, instance: InstanceId) -> None:
        self._refuted.pop(instance, None)
        for index in self._indexes.values():
            index.clear(instance)

    def blocks(self, tier: SlowerTier, instance: InstanceId) -> int:
        return self._indexes[tier].blocks(self._holder(tier, instance)) if self._indexes else 0

    def digest(self, tier: SlowerTier, instance: InstanceId) -> int:
        return self._indexes[tier].digest(self._holder(tier, instance)) if self._indexes else 0

    def keys(self, tier: SlowerTier, instance: InstanceId) -> frozenset[BlockKey]:
        return self._indexes[tier].keys(self._holder(tier, instance)) if self._indexes else frozenset()

    def loads(self, keys: list[BlockKey], hits: dict[InstanceId, int]) -> dict[InstanceId, TierBlocks]:
        """Blocks of a prompt that each instance loads after its `hits` (leading blocks on the device), by tier; absent:
        none. O(len(keys)), and for each instance with loads O(blocks loaded); with a shared store, for each instance."""
        indexes = [(tier, index) for tier, index in self._indexes.items() if index.has_blocks]
        if not indexes:
            return {}
        first = indexes[0][1]
        shared = 0
        if any(tier == "external" for tier, _ in indexes):
            shared = first.bits(instance for instance, uses in self._members.items() if uses)
        masks = [self._mask(indexes, key, shared) for key in keys]
        names = first.instances_of(reduce(or_, masks, 0))
        if not names:
            return {}
        starts: dict[int, int] = {}
        for bit, instance in names.items():
            start = hits.get(instance, 0)
            starts[start] = starts.get(start, 0) | bit
        found: dict[InstanceId, TierBlocks] = {}
        for instance, end in _ends(masks, starts, names):
            start = hits.get(instance, 0)
            refuted = self._refuted.get(instance)
            if refuted:
                end = next((place for place in range(start, end) if keys[place] in refuted), end)
            if end > start:
                found[instance] = self._by_tier(instance, keys[start:end], indexes)
        return found

    def depth(self, instance: InstanceId, keys: list[BlockKey], start: int) -> int:
        """Leading blocks of which the instance holds the first `start` on its device and the rest in slower tiers."""
        loads = self.loads(keys, {instance: start}) if self._indexes else {}
        return start + sum(loads.get(instance, {}).values())

    def refute(self, instance: InstanceId, keys: list[BlockKey], until: EngineSeconds) -> None:
        """A delivery showed that the instance cannot load these."""
        known = self._refuted.setdefault(instance, {})
        for key in keys:
            known.pop(key, None)
            known[key] = until
        forget_oldest(known, REFUTED_KEYS_MAX)

    def forget_rates(self, until: EngineSeconds) -> None:
        """Those last seen before: where a load was slow once, nothing is sent that would show how fast it is now."""
        for rates in self._rates.values():
            for tier in [tier for tier, rate in rates.items() if rate.at < until]:
                del rates[tier]

    def settle(self, now: EngineSeconds) -> None:
        for instance, known in list(self._refuted.items()):
            forget_until(known, now)
            if not known:
                del self._refuted[instance]

    def load_seconds(self, instance: Instance, loads: Sequence[TierTokens]) -> EngineSeconds:
        rates = self._rates.get(instance.id, {})
        seconds = 0.0
        for load in loads:
            prior = LOAD_SHARES[load.tier] * instance.cost.per_token_s
            rate = rates.get(load.tier)
            seconds += load.tokens * (rate.per_token(prior) if rate else prior)
        return seconds

    def learn(
        self, instance: Instance, loads: Sequence[TierTokens], observed: EngineSeconds, now: EngineSeconds
    ) -> None:
        """`observed`: seconds of a first token beyond its prefill; shared among the tiers as predicted."""
        predicted = self.load_seconds(instance, loads)
        if predicted <= 0:
            return
        rates = self._rates.setdefault(instance.id, {})
        for load in loads:
            share = self.load_seconds(instance, (load,)) / predicted
            rate = rates.setdefault(load.tier, LoadRate())
            rate.seconds = FADE * rate.seconds + observed * share
            rate.tokens = FADE * rate.tokens + load.tokens
            rate.at = now

    def _begin(self) -> None:
        for tier in TIERS:
            index = self._indexes[tier] = PrefixIndex()
            for instance in (STORE, *self._members):
                index.add(instance)

    def _holder(self, tier: SlowerTier, instance: InstanceId) -> InstanceId:
        return STORE if tier == "external" else instance

    def _mask(self, indexes: list[tuple[SlowerTier, PrefixIndex]], key: BlockKey, shared: int) -> int:
        mask = 0
        for tier, index in indexes:
            holders = index.holders(key)
            mask |= shared if holders and tier == "external" else holders
        return mask

    def _by_tier(
        self, instance: InstanceId, keys: list[BlockKey], indexes: list[tuple[SlowerTier, PrefixIndex]]
    ) -> TierBlocks:
        if len(indexes) == 1:
            return {indexes[0][0]: len(keys)}
        found: TierBlocks = {}
        for key in keys:
            tier = next(tier for tier, index in indexes if index.holds(self._holder(tier, instance), key))
            found[tier] = found.get(tier, 0) + 1
        return found


def _ends(masks: list[int], starts: dict[int, int], names: dict[int, InstanceId]) -> Iterator[tuple[InstanceId, int]]:
    """Where each instance's run of blocks ends that begins at its start; only of those that have any. `starts`: bits by
    the block at which they begin."""
    running = 0
    for place, mask in enumerate(masks):
        running |= starts.get(place, 0) & mask
        gone = running & ~mask
        running &= mask
        while gone:
            bit = gone & -gone
            yield names[bit], place
            gone ^= bit
    while running:
        bit = running & -running
        yield names[bit], len(masks)
        running ^= bit
