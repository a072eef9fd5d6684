"""The engine's cache over all tiers: a BlockTranslator for the device, and one for each slower tier that its events tell
of. Slower tiers have their own blocks, since a block stays in host memory after the device evicted it.

- vLLM's offloading tells of a block by its hash alone unless `self_describing_kv_events` is set; the device's store of
  the same block says what it is. Blocks that neither knows count as ignored.
- LMCache has hashes of its own, for chunks of several engine blocks: each is taken apart.
- A connector need not tell of removals, nor need an engine that lies, so each tier drops its oldest blocks beyond a bound.
- `AllBlocksCleared` names no tier, so it clears all of the engine's: a hit missed, never one promised in vain. The shared
  store is not the engine's. It outlives it, too."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from pointsman.adapters.kv_events.events import (
    BLOCKS_PER_EVENT_MAX,
    EngineBlockRemoved,
    EngineBlockStored,
    EngineCacheCleared,
    EngineEvent,
    EngineHash,
)
from pointsman.contracts.block_keys import KeyChain, unpack_keys
from pointsman.contracts.cache import BlocksRemoved, SlowerTier
from pointsman.contracts.fleet import TierDigest
from pointsman.primitives import Seconds, Tokens
from pointsman_worker.block_rules import tier_of
from pointsman_worker.engine_blocks import HeldBlock
from pointsman_worker.event_sequencer import CacheEvents
from pointsman_worker.held_keys import Work
from pointsman_worker.translator import BLOCK_WORK, REMOVAL_WORK, BlockTranslator, HeldBlocks

WORK_PER_BATCH_MAX: Final = 1_000_000
"""Takes 0.4 s, in which other engines wait: 80,000 blocks, so 1.3 million tokens at 16 a block. The beginning of a span on
which many blocks build is as much work as those each time it is removed or stored again."""
EXPIRY_WORK_MAX: Final = 30_000
"""At once: 6,000 blocks, 40 ms."""
EVENT_WORK: Final = 50
TIER_BLOCKS_MAX: Final = 1_048_576
"""Engine blocks of one slower tier; 16 million tokens at 16 a block."""
DEVICE_BLOCKS_MAX: Final = 2_097_152
"""Whatever the engine says of its capacity; 33 million tokens at 16 a block, for which eight GPUs of 141 GB have no room.
They take 1 GB in the worker."""

STORE: Final = "external"
"""The tier that all engines share."""


@dataclass(slots=True)
class _Chunk:
    """LMCache's chunk that was taken apart. `parts`: its engine blocks; `copies`: stored and not yet removed."""

    parts: int
    copies: int


class HeldTiers(msgspec.Struct, frozen=True):
    """A fully verified cache. `slower`: its slower tiers, parents before children."""

    device: HeldBlocks
    slower: dict[SlowerTier, list[HeldBlock]] = {}


class CacheTranslator:
    def __init__(
        self,
        key_chain: KeyChain,
        engine_block_tokens: Tokens,
        *,
        capacity_blocks: int = 0,
        shared_store: bool = False,
        tier_blocks_max: int = TIER_BLOCKS_MAX,
        device_blocks_max: int = DEVICE_BLOCKS_MAX,
    ) -> None:
        """`capacity_blocks`: of the device, 0 if unknown. `shared_store`: slower blocks are in a store that all engines
        share. Raises ValueError if a pool block is not a multiple of the engine's block."""
        self.chain = key_chain
        self.width = engine_block_tokens
        self._shared_store = shared_store
        self._tier_blocks_max = tier_blocks_max
        self._device_blocks_max = device_blocks_max
        self.device = BlockTranslator(key_chain, engine_block_tokens, capacity_blocks=capacity_blocks)
        self.work = self.device.keys.work
        self.slower: dict[SlowerTier, BlockTranslator] = {}
        self.chunks: dict[SlowerTier, dict[EngineHash, _Chunk]] = {}

    @property
    def changed(self) -> bool:
        return any(translator.keys.changed for translator in self._all())

    @property
    def snapshot_is_smaller(self) -> bool:
        return any(translator.keys.snapshot_is_smaller for translator in self._all())

    @property
    def digests(self) -> list[TierDigest]:
        return [TierDigest(tier, blocks.keys.count, blocks.keys.digest) for tier, blocks in self.slower.items()]

    def apply_all(self, events: Iterable[EngineEvent], now: Seconds) -> int:
        """Returns how many were left out or cut short, because they or those before them were too much work."""
        waiting = deque(events)
        with self._bounded(WORK_PER_BATCH_MAX) as work:
            while waiting and work.done + (needed := self._work_of(waiting[0])) <= work.most:
                work.done += needed
                self.apply(waiting.popleft(), now)
            return len(waiting) + work.over

    def apply(self, event: EngineEvent, now: Seconds = 0.0) -> None:
        """Never raises for an event's contents. `now` is monotonic."""
        if isinstance(event, EngineCacheCleared):
            for own in (self.device, *(blocks for tier, blocks in self.slower.items() if tier != STORE)):
                own.apply(event, now)
            self.chunks = {tier: chunks for tier, chunks in self.chunks.items() if tier == STORE}
            return
        tier = tier_of(event.medium, event.locality, shared_store=self._shared_store)
        if tier == "device":
            self.device.apply(event, now)
            self.device.trim(max(0, self.device.held_blocks - self._device_blocks_max))
        elif tier is None:
            self.device.counters.ignored += 1
        elif isinstance(event, EngineBlockRemoved):
            self._remove(tier, event, now)
        else:
            self._store(tier, event, now)

    @property
    def store(self) -> BlockTranslator | None:
        """What this engine told of the shared store."""
        return self.slower.get(STORE)

    def take_over_store(self, other: "CacheTranslator") -> None:
        """Of the engine's translator until now, since the store will tell of removals by the same hashes. Not from an engine
        of another model or block size."""
        if other.store is None or (other.chain.root(), other.width) != (self.chain.root(), self.width):
            return
        self.slower[STORE] = other.store
        if STORE in other.chunks:
            self.chunks[STORE] = other.chunks[STORE]

    def tell_again(self, unwritten: Iterable[CacheEvents]) -> None:
        """The next epoch begins with a snapshot, which says all but what has gone from the store."""
        for event in unwritten:
            if self.store is not None and isinstance(event, BlocksRemoved) and event.tier == STORE:
                self.store.keys.tell_removed_again(unpack_keys(event.keys))

    def expire(self, until: Seconds) -> int:
        """Also finishes what was too much work before. Returns the number of blocks dropped from the device: if any, there may
        be more."""
        with self._bounded(WORK_PER_BATCH_MAX):
            for translator in self._all():
                translator.keys.finish()
        with self._bounded(EXPIRY_WORK_MAX):
            for translator in self.slower.values():
                translator.expire(until)
                parked_since = translator.orphans.since
                if parked_since is not None and parked_since <= until:
                    translator.orphans.clear()
            return self.device.expire(until)

    def mark_counts_unverified(self, now: Seconds) -> None:
        """Events were lost: perhaps the removals of parked blocks."""
        for translator in self._all():
            translator.verification.mark_counts_unverified(now)
            translator.orphans.clear()
        for chunks in self.chunks.values():
            for chunk in chunks.values():
                chunk.copies = 1

    def set_unverifiable(self, now: Seconds, *, on: bool) -> None:
        for translator in self._all():
            translator.verification.set_unverifiable(now, on=on)

    def dump(self) -> HeldTiers | None:
        """As BlockTranslator.dump."""
        device = self.device.dump()
        slower = {tier: translator.dump() for tier, translator in self.slower.items()}
        if device is None or self.chunks or None in slower.values():
            return None
        return HeldTiers(device, {tier: held.blocks for tier, held in slower.items() if held is not None})

    def restore(self, dump: HeldTiers) -> None:
        """As BlockTranslator.restore."""
        self.device.restore(dump.device)
        for tier, blocks in dump.slower.items():
            self._translator(tier).restore(HeldBlocks(blocks, dump.device.group, several_groups=False))

    @contextlib.contextmanager
    def _bounded(self, work_max: int) -> Iterator[Work]:
        for translator in self._all():
            translator.keys.work = self.work
        self.work.most = self.work.done + work_max
        try:
            yield self.work
        finally:
            self.work.most = Work().most

    def _work_of(self, event: EngineEvent) -> int:
        """As far as it is known before: one part of a span may be as much work as all that build on it."""
        match event:
            case EngineBlockStored():
                blocks = max(len(event.block_hashes), len(event.token_ids) // self.width)
                if event.block_size != self.width:  # chunks are taken apart
                    blocks *= 2
                return EVENT_WORK + BLOCK_WORK * blocks
            case EngineBlockRemoved():
                return EVENT_WORK + REMOVAL_WORK * len(event.block_hashes)
            case EngineCacheCleared():
                return EVENT_WORK

    def _all(self) -> Iterator[BlockTranslator]:
        yield self.device
        yield from self.slower.values()

    def _translator(self, tier: SlowerTier) -> BlockTranslator:
        known = self.slower.get(tier)
        if known is None:
            known = self.slower[tier] = BlockTranslator(self.chain, self.width, confirms_earlier=False)
            known.keys.work = self.work
            known.verification.set_unverifiable(0.0, on=self.device.verification.unverifiable)
        return known

    def _store(self, tier: SlowerTier, event: EngineBlockStored, now: Seconds) -> None:
        translator = self._translator(tier)
        if not event.token_ids:
            self.device.counters.ignored += translator.adopt(event, self.device, now)
        elif event.block_size == self.width:
            translator.adopt_parent(event, self.device)
            translator.apply(event, now)
        else:
            chunks = self._taken_apart(tier, event)
            if chunks is None:
                self.device.counters.ignored += 1
                return
            translator.apply(chunks, now)
        translator.trim(max(0, translator.held_blocks - self._tier_blocks_max))

    def _remove(self, tier: SlowerTier, event: EngineBlockRemoved, now: Seconds) -> None:
        translator = self.slower.get(tier)
        if translator is None:
            self.device.counters.ignored += 1
            return
        chunks = self.chunks.get(tier)
        if chunks:
            hashes = list[EngineHash]()
            for engine_hash in event.block_hashes:
                if self.work.over:
                    break
                parts = _removed_parts(engine_hash, chunks)
                self.work.done += REMOVAL_WORK * len(parts)
                hashes += parts
            event = EngineBlockRemoved(hashes, event.medium, event.group_idx)
        translator.apply(event, now)

    def _taken_apart(self, tier: SlowerTier, event: EngineBlockStored) -> EngineBlockStored | None:
        """The same blocks in the engine's size; None if they are no multiple of it."""
        count, rest = divmod(event.block_size, self.width)
        hashes = len(event.block_hashes)
        if rest or not 0 < count * hashes <= BLOCKS_PER_EVENT_MAX or len(event.token_ids) != event.block_size * hashes:
            return None
        chunks = self.chunks.setdefault(tier, {})
        for engine_hash in event.block_hashes:
            chunk = chunks.pop(engine_hash, None)
            copies = chunk.copies if chunk is not None and chunk.parts == count else 0
            chunks[engine_hash] = _Chunk(count, copies + 1)
        while len(chunks) > self._tier_blocks_max:
            del chunks[next(iter(chunks))]
        return msgspec.structs.replace(
            event,
            block_hashes=[part for h in event.block_hashes for part in _parts(h, count)],
            block_size=self.width,
            extra_keys=None,
        )


def _removed_parts(engine_hash: EngineHash, chunks: dict[EngineHash, _Chunk]) -> list[EngineHash]:
    """Of one copy of a chunk; of no more copies than were stored, so that a short event cannot name blocks without end."""
    chunk = chunks.get(engine_hash)
    if chunk is None:
        return [engine_hash]
    chunk.copies -= 1
    if not chunk.copies:
        del chunks[engine_hash]
    return _parts(engine_hash, chunk.parts)


def _parts(engine_hash: EngineHash, count: int) -> list[EngineHash]:
    """Names for the engine blocks of a chunk; the last has the chunk's own, which the next chunk names as its parent."""
    seed = repr(engine_hash).encode()
    return [*(blake2b(seed + b"/%d" % part, digest_size=16).digest() for part in range(count - 1)), engine_hash]
