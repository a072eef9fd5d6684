"""From the engine's blocks to pool keys: which keys the engine holds, and what changed since it was last asked.

Engine hashes are opaque and stay here. A key is chained from the token ids in the events, exactly as the ingress
chains it, so both meet without ever exchanging a hash. No I/O, no clock: events and their time in, net changes out.

A pool block may be `m` engine blocks long. It is held while all `m` are, and an engine block inside such a span
may belong to several pool blocks, where prompts part ways in the middle of a span. So every engine block is a
node that knows the one before it *within its span*, and a pool key is counted on the span's last node.

Engines say more than a set can hold, and less than one would like:
- vLLM keeps copies: equal prompts computed side by side give the same block twice, each stored and removed on its
  own. Copies are counted, or a popular prefix would be forgotten when its first copy goes. After `doubt` (removes may
  have been missed) the count of what is held is not trusted: one more remove takes the block away.
- A removal may be lost. Every block knows when it was last confirmed: stored, or built on by a store. After `doubt`, and all the
  time while `fading`, what nothing confirms again is dropped by `expire`. What is held never exceeds the capacity: `trim`.
- A store may build on a block we never saw. It waits, within a bound, for its parent; so does a remove for it.
- Blocks of images, prompt embeddings and the like are keyed by more than tokens. The ingress cannot know such keys,
  so these blocks and all that follow them are known to exist but never given a key.
- Only full attention says that a whole prefix is there; sliding windows and state-space groups do not count. Nor do
  tiers other than the device's own memory.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import Any, Final

import msgspec

from pointsman.adapters.kv_events.events import (
    EngineBlockRemoved,
    EngineBlockStored,
    EngineCacheCleared,
    EngineEvent,
    EngineHash,
)
from pointsman.contracts.block_keys import KeyChain, pack_keys
from pointsman.contracts.cache import Run
from pointsman.primitives import BlockKey, Seconds, Tokens

PARKED_BLOCKS_MAX = 16_384
"""Engine blocks that may wait for their parents; beyond it the oldest stores are given up."""

GIVEN_UP_BLOCKS_MAX = 65_536
"""Engine blocks that are known though no longer believed in: a store that builds on one of them brings it back."""

DEVICE_MEDIUM = "GPU"
FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

PROMPT_START = BlockKey(0)
"""What `Run.parent` says of a block that starts a prompt."""
DOUBTFUL: Final = -1
"""As a count of copies: held as far as we know, by how many is not known."""
CERTAIN: Final = -1.0
"""In place of the time since when a block is in doubt: its removal will be seen."""
CONFIRMED_LATELY_SECONDS: Final = 5.0
"""A store confirms the blocks that it builds on up to the first that was confirmed so lately: those above it were, too."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference between what is held now and what was at the last call: first all is `cleared` (if so), then
    `removed` goes, and what is `expired` because nothing confirmed it, then `stored` comes, parents before children."""

    cleared: bool
    removed: list[BlockKey]
    stored: list[Run]
    expired: list[BlockKey]

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed) or bool(self.stored) or bool(self.expired)


class HeldBlock(msgspec.Struct, array_like=True, frozen=True):
    """A `_Node`, with its neighbours by their engine hashes."""

    engine_hash: EngineHash
    place: int
    key: BlockKey | None
    above: BlockKey
    tail: list[int]
    parent: EngineHash | None
    prior: EngineHash | None
    copies: int


class HeldBlocks(msgspec.Struct, frozen=True):
    """All that a translator knows of a cache of which nothing is in doubt, parents before children."""

    blocks: list[HeldBlock]
    group: int | None
    several_groups: bool


@dataclass(slots=True)
class TranslatorCounters:
    """What was seen and not used, for metrics and the log."""

    parked_dropped: int = 0
    """Blocks whose parent did not come before others needed their place."""
    misfits: int = 0
    """Stores whose block size or token count contradicts what the engine said of itself."""
    keyless: int = 0
    """Blocks keyed by more than tokens."""
    passed_over: int = 0
    """Events of other tiers and of groups without full attention."""
    problem: str = ""
    """Why a store was dropped last."""

    @property
    def dropped(self) -> int:
        """Stores, or blocks of them, that should have counted."""
        return self.parked_dropped + self.misfits


class _Node:
    """One engine block that is held, or that a held one of the same span leans on."""

    __slots__ = (
        "above", "children", "confirmed", "copies", "counted", "doubted", "engine_hash", "key", "parent", "place", "prior", "tail",
    )  # fmt: skip

    def __init__(self, engine_hash: EngineHash, place: int, key: BlockKey | None, above: BlockKey, tail: "array[int]"):
        self.engine_hash = engine_hash
        self.place = place
        """Position within the span, from 0; the last one completes a pool block."""
        self.key = key
        """Of the last of a span: its pool key. Before that: the key the span starts from. None: keyless."""
        self.above = above
        """The pool key before this span's; PROMPT_START where there is none."""
        self.tail = tail
        """Tokens of the span so far; empty for the last of a span, which needs them no more."""
        self.parent: _Node | None = None
        self.children: list[_Node] | None = None
        self.copies = 0
        self.counted = False
        self.prior: EngineHash | None = None
        """The block before it, also where that belongs to the span before."""
        self.confirmed: Seconds = 0.0
        """When it was last known to be held."""
        self.doubted: Seconds = CERTAIN
        """Since when its removal may have been missed."""


@dataclass(slots=True)
class _Parked:
    """A store that waits for its parent, and the removes that already came for it."""

    event: EngineBlockStored
    since: Seconds = 0.0
    removed: set[int] = field(default_factory=set)
    """Indices into the event's blocks."""


_NO_TOKENS: "array[int]" = array("I")


class BlockTranslator:
    """Follows one engine's cache. `apply` its events in order, `take_changes` whenever there is someone to tell."""

    def __init__(
        self,
        key_chain: KeyChain,
        engine_block_tokens: Tokens,
        *,
        parked_blocks_max: int = PARKED_BLOCKS_MAX,
        capacity_blocks: int = 0,
    ) -> None:
        """`capacity_blocks`: engine blocks that the cache has room for, 0 where nobody knows. Raises ValueError when a pool
        block is no whole number of engine blocks."""
        span, rest = divmod(key_chain.block_tokens, engine_block_tokens) if engine_block_tokens > 0 else (0, 1)
        if rest or not span:
            msg = f"block keys stand for {key_chain.block_tokens} tokens, which is no multiple of the engine's {engine_block_tokens}"
            raise ValueError(msg)
        self.tally = TranslatorCounters()
        self._chain = key_chain
        self._engine_block_tokens = engine_block_tokens
        self._last_place = span - 1
        self._parked_blocks_max = parked_blocks_max
        self._group: int | None = None
        """The attention group that stands for all of them: the first with full attention that was seen."""
        self._nodes: dict[EngineHash, _Node] = {}
        self._parked: OrderedDict[int, _Parked] = OrderedDict()
        self._parked_by_parent: dict[EngineHash, list[int]] = {}
        self._parked_by_hash: dict[EngineHash, list[int]] = {}
        self._parked_blocks = 0
        self._parked_number = 0
        self._held: dict[BlockKey, BlockKey] = {}
        """Every pool key held, with the one above it."""
        self._further_holders: dict[BlockKey, int] = {}
        """Keys that several engine blocks stand for, with how many beyond the first."""
        self._to_store: dict[BlockKey, None] = {}
        self._to_remove: dict[BlockKey, bool] = {}
        """Keys that are gone; true: because they were given up."""
        self._capacity_blocks = capacity_blocks
        self._several_groups = False
        """Whether other groups share the capacity, so that nobody can tell how much of it is for this one."""
        self._held_blocks = 0
        """Engine blocks held, each once however many copies it has."""
        self._now: Seconds = 0.0
        self._fading = False
        self._expiring: deque[tuple[Seconds, list[_Node]]] = deque()
        """Blocks by the time since when they are in doubt; those confirmed or gone since then are passed over."""
        self._oldest: list[tuple[Seconds, _Node]] = []
        """Blocks with the time of their confirmation, the last to be given up first."""
        self._giving_up = False
        self._given_up: OrderedDict[EngineHash, _Node] = OrderedDict()
        self._cleared = False
        self._count = 0
        self._digest = 0

    @property
    def count(self) -> int:
        """Keys held as of the last `take_changes` or `take_snapshot`."""
        return self._count

    @property
    def digest(self) -> int:
        """Xor of the keys held as of the last `take_changes` or `take_snapshot`."""
        return self._digest

    @property
    def pending(self) -> int:
        """Keys that `take_changes` would speak of. Never more than those held before and now together."""
        return len(self._to_store) + len(self._to_remove)

    @property
    def changed(self) -> bool:
        return self._cleared or bool(self._to_store) or bool(self._to_remove)

    @property
    def parked_blocks(self) -> int:
        return self._parked_blocks

    @property
    def parked_since(self) -> Seconds | None:
        """Since when the oldest store waits for its parent; None while none waits."""
        return next(iter(self._parked.values())).since if self._parked else None

    @property
    def fading(self) -> bool:
        return self._fading

    @property
    def blocks_over(self) -> int:
        """Engine blocks that are held beyond the capacity; 0 where that is not known."""
        known = self._capacity_blocks and not self._several_groups
        return max(0, self._held_blocks - self._capacity_blocks) if known else 0

    def apply(self, event: EngineEvent, now: Seconds = 0.0) -> None:
        """Take in one event of the engine; never raises for what the engine says. `now` never goes back."""
        self._now = now
        match event:
            case EngineBlockStored():
                self._on_stored(event)
            case EngineBlockRemoved():
                self._on_removed(event)
            case EngineCacheCleared():
                self._on_cleared()

    def doubt(self, now: Seconds = 0.0) -> None:
        """Events were missed. What is held stays until it expires, but how many copies there are is no longer believed."""
        for node in self._nodes.values():
            if node.copies:
                node.copies = DOUBTFUL
        self._begin_doubt(now)

    def fade(self, now: Seconds, *, fading: bool) -> None:
        """From now on removals may be lost unnoticed, so that every block must be confirmed again and again; or no longer,
        and none was lost meanwhile."""
        if fading == self._fading:
            return
        self._fading = fading
        if fading:
            self._begin_doubt(now)
        else:
            for node in self._nodes.values():
                if node.copies != DOUBTFUL:
                    node.doubted = CERTAIN

    def expire(self, until: Seconds) -> int:
        """Give up what is in doubt since `until` or longer, and was not confirmed again. Returns how many blocks went."""
        given_up = 0
        while self._expiring and self._expiring[0][0] <= until:
            since, nodes = self._expiring.popleft()
            for node in nodes:
                if node.copies and node.doubted == since:
                    self._give_up(node)
                    given_up += 1
        return given_up

    def trim(self) -> bool:
        """Give up the blocks beyond the capacity, the longest unconfirmed first, of equals the end of a prompt before its
        beginning. Returns whether blocks had to go that were not in doubt: removals were lost unnoticed."""
        certain = False
        for _ in range(self.blocks_over):
            node = self._longest_unconfirmed()
            certain = certain or node.doubted == CERTAIN
            self._give_up(node)
        return certain

    def _longest_unconfirmed(self) -> _Node:
        while True:
            while self._oldest:
                confirmed, node = self._oldest.pop()
                if node.copies and node.confirmed == confirmed:
                    return node
            held = [node for node in self._nodes.values() if node.copies]
            held.sort(key=lambda node: node.confirmed, reverse=True)
            self._oldest = [(node.confirmed, node) for node in held]

    def _begin_doubt(self, now: Seconds) -> None:
        doubted = [node for node in self._nodes.values() if node.copies and node.doubted == CERTAIN]
        for node in doubted:
            node.doubted = now
        if doubted:
            self._expiring.append((now, doubted))

    def _give_up(self, node: _Node) -> None:
        node.copies = 0
        self._held_blocks -= 1
        self._giving_up = True
        self._recount(node)
        self._giving_up = False
        self._given_up[node.engine_hash] = node
        if len(self._given_up) > GIVEN_UP_BLOCKS_MAX:
            self._prune(self._given_up.popitem(last=False)[1])

    def take_changes(self) -> Changes:
        """What is different since the last call."""
        cleared, gone, stored = self._cleared, self._to_remove, self._to_store
        if cleared:
            self._digest = 0
        for key in gone:
            self._digest ^= key
        for key in stored:
            self._digest ^= key
        self._settle()
        removed = [key for key, given_up in gone.items() if not given_up]
        expired = [key for key, given_up in gone.items() if given_up]
        return Changes(cleared, removed, self._runs(stored) if stored else [], expired)

    def take_snapshot(self) -> list[Run]:
        """Everything that is held, parents before children. Pending changes are in it and thereby settled."""
        self._digest = reduce(xor, self._held, 0)
        self._settle()
        return self._runs(self._held)

    def to_keep(self) -> HeldBlocks | None:
        """All that is held, to go on from in another translator (`go_on_from`). None while changes are pending, stores wait
        for their parents, or anything is in doubt."""
        nodes = self._nodes.values()
        doubted = any(node.copies == DOUBTFUL or (node.copies and node.doubted != CERTAIN) for node in nodes)
        if self.changed or self._parked or self._given_up or self._fading or doubted:
            return None
        blocks = [
            HeldBlock(
                node.engine_hash,
                node.place,
                node.key,
                node.above,
                list(node.tail),
                node.parent.engine_hash if node.parent is not None else None,
                node.prior,
                node.copies,
            )
            for node in nodes
        ]
        return HeldBlocks(blocks, self._group, self._several_groups)

    def go_on_from(self, kept: HeldBlocks) -> None:
        """Take over what another translator with the same key chain held; only before the first event. All of it counts as
        told. Raises ValueError where it contradicts itself."""
        assert not self._nodes, "a translator begins once"
        self._group, self._several_groups = kept.group, kept.several_groups
        for block in kept.blocks:
            before = self._nodes.get(block.parent) if block.parent is not None else None
            misplaced = not 0 <= block.place <= self._last_place or block.copies < 0 or block.engine_hash in self._nodes
            if misplaced or (block.parent is not None and before is None):
                msg = "kept blocks contradict each other"
                raise ValueError(msg)
            tail = array("I", block.tail)
            node = self._add(block.engine_hash, block.place, block.key, block.above, tail, before, block.prior)
            node.copies = block.copies
            self._held_blocks += block.copies > 0
        for node in list(self._nodes.values()):
            if node.place == self._last_place:
                self._recount(node)
        self._digest = reduce(xor, self._held, 0)
        self._settle()

    def held_keys(self) -> set[BlockKey]:
        """The pool keys held now, pending changes included."""
        return set(self._held)

    def _settle(self) -> None:
        self._to_store, self._to_remove, self._cleared = {}, {}, False
        self._count = len(self._held)

    def _runs(self, keys: Mapping[BlockKey, object]) -> list[Run]:
        """Those keys as runs: each follows a chain as far as it goes, branches come after what they branch from."""
        above = self._held
        children: dict[BlockKey, list[BlockKey]] = {}
        for key in keys:
            children.setdefault(above[key], []).append(key)
        waiting = [key for key in keys if above[key] not in keys]
        waiting.reverse()
        runs = []
        while waiting:
            run = [waiting.pop()]
            parent = above[run[0]]
            while following := children.get(run[-1]):
                waiting.extend(following[1:])
                run.append(following[0])
            runs.append(Run(keys=pack_keys(run), parent=parent))
        return runs

    # Stores

    def _on_stored(self, event: EngineBlockStored) -> None:
        if not self._counts(event):
            self.tally.passed_over += 1
            return
        if event.block_size != self._engine_block_tokens or (
            len(event.token_ids) != event.block_size * len(event.block_hashes)
        ):
            self._misfit(self._misfit_of(event))
            return
        parent: _Node | None = None
        if event.parent_block_hash is not None:
            parent = self._nodes.get(event.parent_block_hash)
            if parent is None:
                self._park(event)
                return
        try:
            self._store(event, parent)
        except ValueError as error:  # a token id that is none
            self._misfit(f"a store with impossible token ids: {error}")
            return
        if self._parked:
            self._release(event.block_hashes)

    def _misfit(self, problem: str) -> None:
        self.tally.misfits += 1
        self.tally.problem = problem

    def _misfit_of(self, event: EngineBlockStored) -> str:
        if event.block_size != self._engine_block_tokens:
            return (
                f"the engine's events have blocks of {event.block_size} tokens, its /metrics say {self._engine_block_tokens}: "
                f"set --engine-block-tokens {event.block_size}"
            )
        return f"a store of {len(event.block_hashes)} blocks of {event.block_size} tokens has {len(event.token_ids)} tokens"

    def _counts(self, event: EngineBlockStored) -> bool:
        """Whether a store says that a prefix is in the device's memory."""
        if not _on_device(event.medium):
            return False
        if event.kv_cache_spec_kind is not None and event.kv_cache_spec_kind not in FULL_ATTENTION_KINDS:
            self._several_groups = True
            return False
        if event.group_idx is not None and self._group is None:
            self._group = event.group_idx
        of_ours = event.group_idx in (None, self._group)
        self._several_groups = self._several_groups or not of_ours
        return of_ours

    def _store(self, event: EngineBlockStored, parent: _Node | None) -> None:
        hashes = event.block_hashes
        plain = len(hashes)
        if event.extra_keys is not None:
            plain = _plain_blocks(event)
        if parent is not None and parent.key is None:
            plain = 0
        known = self._nodes
        if any(h not in known for h in hashes[:plain]):
            self._insert(event, parent, plain)
        for engine_hash in hashes[:plain]:
            node = known[engine_hash]
            if not node.copies:
                self._take_in(node)
            node.copies = max(node.copies, 0) + 1
            if node.copies == 1:
                self._recount(node)
        for engine_hash in hashes[plain:]:
            self.tally.keyless += 1
            node = known.get(engine_hash) or self._add_keyless(engine_hash)
            if not node.copies:
                self._take_in(node)
            node.copies = max(node.copies, 0) + 1
        self._confirm([known[engine_hash] for engine_hash in hashes], event.parent_block_hash)

    def _take_in(self, node: _Node) -> None:
        """It was not held and is now."""
        self._held_blocks += 1
        self._given_up.pop(node.engine_hash, None)

    def _confirm(self, stored: list[_Node], prior: EngineHash | None) -> None:
        """These are held now, and so is every block before them, by which they were computed, also if it was given up."""
        now = self._now
        doubted = now if self._fading else CERTAIN
        confirmed = stored
        for held in stored:
            held.confirmed, held.doubted = now, doubted
        while prior is not None:
            node = self._nodes.get(prior)
            if node is not None and prior in self._given_up:
                self._take_in(node)
                node.copies = DOUBTFUL
                self._recount(node)
            elif (
                node is None
                or not node.copies
                or (node.confirmed >= now - CONFIRMED_LATELY_SECONDS and node.doubted <= node.confirmed)
            ):
                break
            node.confirmed, node.doubted = now, doubted  # at once: an engine may say that blocks build on each other
            confirmed.append(node)
            prior = node.prior
        if self._fading:
            self._expiring.append((now, confirmed))

    def _insert(self, event: EngineBlockStored, parent: _Node | None, plain: int) -> None:
        """Make the nodes of the event's first `plain` blocks that are not there yet. Raises ValueError, having
        changed nothing, when a token id fits no key."""
        width, last_place = self._engine_block_tokens, self._last_place
        if parent is None:
            start = self._chain.root(lora=_lora_of(event), cache_salt=_salt_of(event))
            above, place, before = PROMPT_START, 0, None
            tokens = array("I")
        elif parent.place == last_place:
            assert parent.key is not None
            start = above = parent.key
            place, before = 0, None
            tokens = array("I")
        else:
            assert parent.key is not None
            start, above, place, before = parent.key, parent.above, parent.place + 1, parent
            tokens = parent.tail[:]
        span_starts, prior = 0, event.parent_block_hash
        try:
            tokens.extend(event.token_ids[: plain * width])
        except (OverflowError, TypeError) as error:
            raise ValueError(str(error)) from error
        keys = iter(self._chain.extend(start, tokens))
        end = len(tokens) - plain * width
        for engine_hash in event.block_hashes[:plain]:
            end += width
            node = self._nodes.get(engine_hash)
            if place == last_place:
                key = next(keys)
                if node is None:
                    node = self._add(engine_hash, place, key, above, _NO_TOKENS, before, prior)
                start = above = key
                place, before, span_starts = 0, None, end
            else:
                if node is None:
                    node = self._add(engine_hash, place, start, above, tokens[span_starts:end], before, prior)
                place, before = place + 1, node
            prior = engine_hash

    def _add(
        self,
        engine_hash: EngineHash,
        place: int,
        key: BlockKey | None,
        above: BlockKey,
        tail: "array[int]",
        before: _Node | None,
        prior: EngineHash | None,
    ) -> _Node:
        node = self._nodes[engine_hash] = _Node(engine_hash, place, key, above, tail)
        node.prior = prior
        if before is not None:
            node.parent = before
            if before.children is None:
                before.children = []
            before.children.append(node)
        return node

    def _add_keyless(self, engine_hash: EngineHash) -> _Node:
        return self._add(engine_hash, self._last_place, None, PROMPT_START, _NO_TOKENS, None, None)

    # Removes

    def _on_removed(self, event: EngineBlockRemoved) -> None:
        if not _on_device(event.medium) or event.group_idx not in (None, self._group):
            self.tally.passed_over += 1
            return
        for engine_hash in event.block_hashes:
            node = self._nodes.get(engine_hash)
            if node is not None and node.copies:
                self._remove_copy(node)
            elif node is not None and engine_hash in self._given_up:
                del self._given_up[engine_hash]
                self._prune(node)
            elif self._parked:
                self._remove_parked(engine_hash)

    def _remove_copy(self, node: _Node) -> None:
        node.copies = 0 if node.copies == DOUBTFUL else node.copies - 1
        if node.copies == 0:
            self._held_blocks -= 1
            self._recount(node)
            self._prune(node)

    def _prune(self, node: _Node | None) -> None:
        """Forget a node that is neither held nor leant on, then the one it leant on."""
        while node is not None and not (node.copies or node.children or node.engine_hash in self._given_up):
            del self._nodes[node.engine_hash]
            parent = node.parent
            if parent is not None and parent.children is not None:
                parent.children.remove(node)
            node = parent

    def _on_cleared(self) -> None:
        self._nodes.clear()
        self._held_blocks = 0
        self._expiring.clear()
        self._oldest.clear()
        self._given_up.clear()
        self._parked.clear()
        self._parked_by_parent.clear()
        self._parked_by_hash.clear()
        self._parked_blocks = 0
        self._held.clear()
        self._further_holders.clear()
        self._to_store.clear()
        self._to_remove.clear()
        self._cleared = True

    # Pool keys

    def _recount(self, node: _Node) -> None:
        """A node came or went: count or discount the pool blocks it is part of."""
        if node.place < self._last_place:
            for child in node.children or ():
                self._recount(child)
            return
        if node.key is None:
            return
        whole = node.copies != 0
        part = node.parent
        while whole and part is not None:
            whole = part.copies != 0
            part = part.parent
        if whole and not node.counted:
            node.counted = True
            self._gain(node.key, node.above)
        elif node.counted and not whole:
            node.counted = False
            self._lose(node.key)

    def _gain(self, key: BlockKey, above: BlockKey) -> None:
        if key in self._held:
            self._further_holders[key] = self._further_holders.get(key, 0) + 1
            return
        self._held[key] = above
        if key in self._to_remove:
            del self._to_remove[key]
        else:
            self._to_store[key] = None

    def _lose(self, key: BlockKey) -> None:
        further = self._further_holders.get(key)
        if further:
            if further == 1:
                del self._further_holders[key]
            else:
                self._further_holders[key] = further - 1
            return
        del self._held[key]
        if key in self._to_store:
            del self._to_store[key]
        else:
            self._to_remove[key] = self._giving_up

    # Orphans

    def _park(self, event: EngineBlockStored) -> None:
        assert event.parent_block_hash is not None
        self._parked_number += 1
        self._parked[self._parked_number] = _Parked(event, self._now)
        self._parked_by_parent.setdefault(event.parent_block_hash, []).append(self._parked_number)
        for engine_hash in event.block_hashes:
            self._parked_by_hash.setdefault(engine_hash, []).append(self._parked_number)
        self._parked_blocks += len(event.block_hashes)
        while self._parked_blocks > self._parked_blocks_max:
            event, _ = self._unpark(next(iter(self._parked)))
            self.tally.parked_dropped += len(event.block_hashes)
            self.tally.problem = f"{len(event.block_hashes)} blocks follow one that was never stored"

    def _unpark(self, number: int) -> tuple[EngineBlockStored, set[int]]:
        parked = self._parked.pop(number)
        parent = parked.event.parent_block_hash
        assert parent is not None
        _drop_from(self._parked_by_parent, parent, number)
        for engine_hash in parked.event.block_hashes:
            _drop_from(self._parked_by_hash, engine_hash, number)
        self._parked_blocks -= len(parked.event.block_hashes)
        return parked.event, parked.removed

    def _release(self, arrived: list[EngineHash]) -> None:
        """Apply the stores that waited for one of these blocks, then what waited for those, and so on; then the
        removes that came meanwhile, last, because a block may be gone that others still follow."""
        waiting = list(arrived)
        removed: list[EngineHash] = []
        while waiting:
            parent = waiting.pop()
            for number in list(self._parked_by_parent.get(parent, ())):
                event, gone = self._unpark(number)
                try:
                    self._store(event, self._nodes[parent])
                except ValueError as error:
                    self._misfit(f"a store with impossible token ids: {error}")
                    continue
                waiting.extend(event.block_hashes)
                removed.extend(event.block_hashes[index] for index in gone)
        for engine_hash in removed:
            self._remove_copy(self._nodes[engine_hash])

    def _remove_parked(self, engine_hash: EngineHash) -> None:
        for number in self._parked_by_hash.get(engine_hash, ()):
            parked = self._parked[number]
            index = parked.event.block_hashes.index(engine_hash)
            if index not in parked.removed:
                parked.removed.add(index)
                return


def _drop_from(numbers_of: dict[EngineHash, list[int]], engine_hash: EngineHash, number: int) -> None:
    numbers = numbers_of[engine_hash]
    numbers.remove(number)
    if not numbers:
        del numbers_of[engine_hash]


def _on_device(medium: str | None) -> bool:
    return medium is None or medium.upper() == DEVICE_MEDIUM


def _lora_of(event: EngineBlockStored) -> str:
    """The adapter's name; engines too old to say it give only a number."""
    if event.lora_name:
        return event.lora_name
    return "" if event.lora_id is None else str(event.lora_id)


def _salt_of(event: EngineBlockStored) -> str:
    """The cache salt: what remains of the first block's extra keys beside the adapter."""
    extra = event.extra_keys[0] if event.extra_keys else None
    rest = _beyond_lora(event, extra or [])
    return str(rest[0]) if rest else ""


def _plain_blocks(event: EngineBlockStored) -> int:
    """How many leading blocks are keyed by their tokens, the adapter and, where a prompt starts, a salt alone."""
    starts_prompt = event.parent_block_hash is None
    for index, extra in enumerate(event.extra_keys or ()):
        if not extra:
            continue
        rest = _beyond_lora(event, extra)
        salt_only = starts_prompt and index == 0 and len(rest) == 1 and isinstance(rest[0], str)
        if rest and not salt_only:
            return min(index, len(event.block_hashes))
    return len(event.block_hashes)


def _beyond_lora(event: EngineBlockStored, extra: list[Any]) -> list[Any]:
    return extra[1:] if event.lora_name and extra[:1] == [event.lora_name] else extra
