"""Translates the engine's block events to net changes of pool keys. No I/O, no clock.

- Copies of a block are counted, as vLLM stores and removes each; when events were missed, one remove drops the block.
- A store confirms its blocks and, on the device, those before them. Unverified blocks expire; `trim` enforces the capacity.
- Stores with an unknown parent are parked within a bound, and removes apply to them.
- Blocks keyed by more than tokens (images, prompt embeddings), and their successors, get no key.
- Only full attention counts: no sliding windows or state-space groups.

Each tier of the cache has a translator of its own (`tiers`).
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from pointsman.adapters.kv_events.events import (
    EngineBlockRemoved,
    EngineBlockStored,
    EngineCacheCleared,
    EngineEvent,
    EngineHash,
)
from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import Seconds, Tokens
from pointsman_worker.block_rules import AttentionGroups, layout_error, token_keyed_blocks
from pointsman_worker.engine_blocks import UNVERIFIED_COPIES, VERIFIED, Block, EngineBlocks, HeldBlock
from pointsman_worker.held_keys import HeldKeys
from pointsman_worker.orphans import PARKED_BLOCKS_MAX, Orphans
from pointsman_worker.verification import Verification

CONFIRMED_LATELY_SECONDS: Final = 5.0  # stops the walk that confirms earlier blocks
BLOCK_WORK: Final = 10  # of a store; a unit is a look at a block (`Work`)
REMOVAL_WORK: Final = 4


class HeldBlocks(msgspec.Struct, frozen=True):
    """A fully verified cache, parents before children."""

    blocks: list[HeldBlock]
    group: int | None
    several_groups: bool


@dataclass(slots=True)
class TranslatorCounters:
    """Unused events. `mismatches`: block size or token count contradicts the engine; `keyless`: keyed by more than
    tokens; `ignored`: other tiers and groups."""

    parked_dropped: int = 0
    mismatches: int = 0
    keyless: int = 0
    ignored: int = 0
    problem: str = ""


class BlockTranslator:
    def __init__(
        self,
        key_chain: KeyChain,
        engine_block_tokens: Tokens,
        *,
        parked_blocks_max: int = PARKED_BLOCKS_MAX,
        capacity_blocks: int = 0,
        confirms_earlier: bool = True,
    ) -> None:
        """`capacity_blocks`: 0 if unknown. `confirms_earlier`: no block is held without those before it. Raises
        ValueError if a pool block is not a multiple of the engine's block."""
        self.counters = TranslatorCounters()
        self.blocks = EngineBlocks(key_chain, engine_block_tokens)
        self.keys = HeldKeys(self.blocks.last_index)
        self.orphans = Orphans(parked_blocks_max)
        self.verification = Verification(self.blocks.nodes)
        self._capacity_blocks = capacity_blocks
        self._confirms_earlier = confirms_earlier
        self.groups = AttentionGroups()
        self.held_blocks = 0
        self._now: Seconds = 0.0

    @property
    def blocks_over(self) -> int:
        """0 if the capacity is unknown."""
        known = self._capacity_blocks and not self.groups.several
        return max(0, self.held_blocks - self._capacity_blocks) if known else 0

    def apply(self, event: EngineEvent, now: Seconds = 0.0) -> None:
        """Never raises for an event's contents. `now` is monotonic."""
        self._now = now
        match event:
            case EngineBlockStored():
                self._on_stored(event)
            case EngineBlockRemoved():
                self._on_removed(event)
            case EngineCacheCleared():
                self._on_cleared()

    def expire(self, until: Seconds) -> int:
        """Returns the number of blocks dropped. What is too much work is left to the next time."""
        dropped = 0
        for node in self.verification.expired(until):
            self._give_up(node)
            dropped += 1
            if self.keys.work.over:
                break
        return dropped

    def trim(self, blocks: int | None = None) -> bool:
        """Drops so many of the longest unconfirmed blocks; None: `blocks_over`. Returns True if verified ones were
        dropped: removals were lost unnoticed."""
        verified = False
        for _ in range(self.blocks_over if blocks is None else blocks):
            node = self.verification.longest_unconfirmed()
            verified = verified or node.unverified == VERIFIED
            self._give_up(node)
        return verified

    def adopt(self, event: EngineBlockStored, source: "BlockTranslator", now: Seconds) -> int:
        """Stores blocks that the event only names, as `source` knows them. Returns how many it does not know."""
        if source.groups.chosen is not None and event.group_idx not in (None, source.groups.chosen):
            return len(event.block_hashes)
        self._now, self.groups.chosen = now, source.groups.chosen
        known = [h for h in event.block_hashes if not self.keys.work.over and self._adopt(h, source)]
        if known:
            named = EngineBlockStored(known, None, [], event.block_size)
            self._store(named, None, len(known))
            if self.orphans:
                self._store_orphans(known)
        return len(event.block_hashes) - len(known)

    def adopt_parent(self, event: EngineBlockStored, source: "BlockTranslator") -> None:
        """A tier may hold a block without the one before it, which only `source` knows."""
        parent = event.parent_block_hash
        if parent is not None:
            self._adopt(parent, source)

    def _adopt(self, engine_hash: EngineHash, source: "BlockTranslator") -> bool:
        before = len(self.blocks.nodes)
        known = self.blocks.adopt(engine_hash, source.blocks) is not None
        self.keys.work.done += BLOCK_WORK * (len(self.blocks.nodes) - before)
        return known

    def dump(self) -> HeldBlocks | None:
        """None if changes or parked stores are pending, or blocks are unverified."""
        if self.keys.changed or self.keys.unfinished or self.orphans or not self.verification.complete:
            return None
        return HeldBlocks(self.blocks.dump(), self.groups.chosen, self.groups.several)

    def restore(self, dump: HeldBlocks) -> None:
        """Call before the first event; the log has all of the dump. Raises ValueError if it is inconsistent."""
        assert not self.blocks.nodes, "a translator begins once"
        self.groups = AttentionGroups(dump.group, dump.several_groups)
        self.blocks.restore(dump.blocks)
        self.held_blocks = sum(block.copies > 0 for block in dump.blocks)
        for node in self.blocks.nodes.values():
            self.keys.recount(node)
        self.keys.settle_all()

    def _on_stored(self, event: EngineBlockStored) -> None:
        if not self.groups.counts(event):
            self.counters.ignored += 1
            return
        if problem := layout_error(event, self.blocks.block_tokens):
            self._reject(problem)
            return
        parent: Block | None = None
        keyed = token_keyed_blocks(event)
        if event.parent_block_hash is not None:
            parent = self.blocks.nodes.get(event.parent_block_hash)
            if parent is None:
                self._park(event, keyed)
                return
        try:
            self._store(event, parent, keyed)
        except ValueError as error:
            self._reject(f"a store with {error}")
            return
        if parent is not None and not parent.copies:
            self._prune(parent)
        if self.orphans:
            self._store_orphans(event.block_hashes)

    def _reject(self, problem: str) -> None:
        self.counters.mismatches += 1
        self.counters.problem = problem

    def _store(self, event: EngineBlockStored, parent: Block | None, keyed: int) -> None:
        """`keyed`: the leading blocks that are keyed by tokens alone."""
        hashes, nodes = event.block_hashes, self.blocks.nodes
        if parent is not None and parent.key is None:
            keyed = 0
        if any(h not in nodes for h in hashes[:keyed]):
            self.blocks.insert(event, parent, keyed)
        for engine_hash in hashes[keyed:]:
            self.counters.keyless += 1
            if engine_hash not in nodes:
                self.blocks.add_keyless(engine_hash)
        recount = self.keys.recount
        for engine_hash in hashes:
            node = nodes[engine_hash]
            if not node.copies:
                self._hold(node)
            node.copies = max(node.copies, 0) + 1
            if node.copies == 1:
                recount(node)
        previous = event.parent_block_hash if self._confirms_earlier else None
        self._confirm([nodes[engine_hash] for engine_hash in hashes], previous)

    def _hold(self, node: Block) -> None:
        self.held_blocks += 1
        if self.verification.given_up:
            self.verification.given_up.pop(node.engine_hash, None)

    def _confirm(self, stored: list[Block], previous: EngineHash | None) -> None:
        """Includes all blocks before them, also given-up ones, as far as that is not too much work."""
        now, verification, work = self._now, self.verification, self.keys.work
        unverified = now if verification.unverifiable else VERIFIED
        confirmed = stored
        for held in stored:
            held.confirmed, held.unverified = now, unverified
        while previous is not None and not work.over:
            work.done += 1
            node = self.blocks.nodes.get(previous)
            if node is not None and previous in verification.given_up:
                self._hold(node)
                node.copies = UNVERIFIED_COPIES
                self.keys.recount(node)
            elif (
                node is None
                or not node.copies
                or (node.confirmed >= now - CONFIRMED_LATELY_SECONDS and node.unverified <= node.confirmed)
            ):
                break
            # In the loop, because events may form a cycle of parents.
            node.confirmed, node.unverified = now, unverified
            confirmed.append(node)
            previous = node.previous
        verification.confirm(confirmed, now)

    def _park(self, event: EngineBlockStored, keyed: int) -> None:
        for dropped in self.orphans.park(event, keyed, self._now):
            self.counters.parked_dropped += len(dropped.block_hashes)
            self.counters.problem = f"{len(dropped.block_hashes)} blocks follow one that was never stored"

    def _store_orphans(self, arrived: list[EngineHash]) -> None:
        """Applies removes last, because other stores may follow a removed block."""
        waiting = list(arrived)
        removed: list[EngineHash] = []
        while waiting:
            parent = waiting.pop()
            for orphan in self.orphans.take_children(parent):
                event = orphan.event
                try:
                    self._store(event, self.blocks.nodes[parent], orphan.keyed)
                except ValueError as error:
                    self._reject(f"a store with {error}")
                    continue
                waiting.extend(event.block_hashes)
                removed.extend(orphan.removed)
        for engine_hash in removed:
            self._remove_copy(self.blocks.nodes[engine_hash])

    def _on_removed(self, event: EngineBlockRemoved) -> None:
        if event.group_idx not in (None, self.groups.chosen):
            self.counters.ignored += 1
            return
        nodes, given_up = self.blocks.nodes, self.verification.given_up
        for engine_hash in event.block_hashes:
            node = nodes.get(engine_hash)
            if node is not None and node.copies:
                self._remove_copy(node)
            elif node is not None and engine_hash in given_up:
                del given_up[engine_hash]
                self._prune(node)
            elif self.orphans:
                self.orphans.remove(engine_hash)

    def _remove_copy(self, node: Block) -> None:
        node.copies = 0 if node.copies == UNVERIFIED_COPIES else node.copies - 1
        if node.copies == 0:
            self.held_blocks -= 1
            self.keys.recount(node)
            self._prune(node)

    def _give_up(self, node: Block) -> None:
        self.keys.work.done += REMOVAL_WORK
        node.copies = 0
        self.held_blocks -= 1
        self.keys.recount(node, expired=True)
        self._prune(self.verification.give_up(node))

    def _prune(self, node: Block | None) -> None:
        """Delete a node that is neither held nor needed, then its parents."""
        nodes, given_up = self.blocks.nodes, self.verification.given_up
        while node is not None and not (node.copies or node.children or node.engine_hash in given_up):
            del nodes[node.engine_hash]
            parent = node.parent
            if parent is not None and parent.children is not None:
                parent.children.pop(node, None)
            node = parent

    def _on_cleared(self) -> None:
        self.blocks.nodes.clear()
        self.held_blocks = 0
        self.verification.clear()
        self.orphans.clear()
        self.keys.clear()
