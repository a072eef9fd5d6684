"""An engine's pool keys, and their change since the last write. A removal is told even if the key is back or was never
told: an answer of the engine from between counted without it (`pointsman.state.reported_hits`)."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import xor

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import Run
from pointsman.primitives import BlockKey
from pointsman_worker.engine_blocks import Block

PENDING_KEYS_MAX = 100_000
"""Beyond it a snapshot is smaller."""


@dataclass(slots=True)
class Work:
    """Done so far, and how much may be done; 1 is a look at a block, about half a microsecond. Counted, not timed, so that
    the same events always have the same effect."""

    done: int = 0
    most: int = sys.maxsize

    @property
    def over(self) -> bool:
        return self.done > self.most


@dataclass(frozen=True, slots=True)
class Changes:
    """Applied in field order; `expired` keys were not confirmed; `stored` has parents before children. A key removed and
    stored again is in both."""

    cleared: bool
    removed: list[BlockKey]
    stored: list[Run]
    expired: list[BlockKey]

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed) or bool(self.stored) or bool(self.expired)


class HeldKeys:
    """`count` and `digest` (xor of keys): as of the last `take_changes` or `take_snapshot`. `cleared`: since then."""

    def __init__(self, last_index: int) -> None:
        self._last_index = last_index
        self.work = Work()
        self._unfinished: list[tuple[list[Block], bool]] = []  # of `recount`
        self.count = 0
        self.digest = 0
        self.parents: dict[BlockKey, BlockKey] = {}
        self._further_holders: dict[BlockKey, int] = {}  # holders beyond the first
        self._to_store: dict[BlockKey, None] = {}
        self._to_remove: dict[BlockKey, bool] = {}
        self._passed: dict[BlockKey, None] = {}  # stored and removed since the last write, or told again
        self.cleared = False
        self._written = False

    @property
    def changed(self) -> bool:
        return self.cleared or bool(self._to_store or self._to_remove or self._passed)

    @property
    def unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def snapshot_is_smaller(self) -> bool:
        return len(self._to_store) + len(self._to_remove) + len(self._passed) > PENDING_KEYS_MAX

    def recount(self, node: Block, *, expired: bool = False) -> None:
        """Update the pool blocks that contain `node`. Goes no further than to blocks for which nothing changes. What is too
        much work is left to `finish`."""
        self._recount([node], expired=expired)

    def finish(self) -> None:
        """In any order: what counts is how blocks are now."""
        while self._unfinished and not self.work.over:
            waiting, expired = self._unfinished.pop()
            self._recount(waiting, expired=expired)

    def _recount(self, waiting: list[Block], *, expired: bool) -> None:
        work = self.work
        while waiting:
            if work.over:
                self._unfinished.append((waiting, expired))
                return
            node = waiting.pop()
            work.done += 1
            whole = node.copies != 0 and (node.parent is None or node.parent.counted)
            if whole == node.counted:
                continue
            node.counted = whole
            if node.span_index != self._last_index:
                waiting.extend(reversed(node.children or ()))
            elif node.key is None:
                continue
            elif whole:
                self.gain(node.key, node.parent_key)
            else:
                self.lose(node.key, expired=expired)

    def gain(self, key: BlockKey, parent_key: BlockKey) -> None:
        if key in self.parents:
            self._further_holders[key] = self._further_holders.get(key, 0) + 1
            return
        self.parents[key] = parent_key
        if self._to_remove.get(key):
            del self._to_remove[key]
        else:
            self._to_store[key] = None

    def lose(self, key: BlockKey, *, expired: bool) -> None:
        further = self._further_holders.get(key)
        if further:
            if further == 1:
                del self._further_holders[key]
            else:
                self._further_holders[key] = further - 1
            return
        del self.parents[key]
        if key not in self._to_store:
            self._to_remove[key] = expired
            return
        del self._to_store[key]
        if self._written and not expired and key not in self._to_remove and len(self._passed) <= PENDING_KEYS_MAX:
            self._passed[key] = None

    def clear(self) -> None:
        self._unfinished.clear()
        self.parents.clear()
        self._further_holders.clear()
        self._to_store.clear()
        self._to_remove.clear()
        self._passed.clear()
        self.cleared = True

    def forget_clear(self) -> None:
        """A snapshot of a new epoch takes its place."""
        self.cleared = False

    def tell_removed_again(self, keys: Iterable[BlockKey]) -> None:
        """Taken, but not written. Those held again need a snapshot after it."""
        self._passed.update(dict.fromkeys(keys))

    def take_changes(self) -> Changes:
        cleared, gone, stored, passed = self.cleared, self._to_remove, self._to_store, self._passed
        if cleared:
            self.digest = 0
        for key in gone:
            self.digest ^= key
        for key in stored:
            self.digest ^= key
        self._settle()
        removed = [*(key for key, expired in gone.items() if not expired), *passed]
        expired = [key for key, expired in gone.items() if expired]
        return Changes(cleared, removed, self._runs(stored) if stored else [], expired)

    def take_snapshot(self) -> list[Run]:
        """Includes pending changes."""
        self.settle_all()
        return self._runs(self.parents)

    def settle_all(self) -> None:
        self.digest = reduce(xor, self.parents, 0)
        self._settle()

    def _settle(self) -> None:
        self._to_store, self._to_remove, self._passed, self.cleared = {}, {}, {}, False
        self._written = True
        self.count = len(self.parents)

    def _runs(self, keys: Mapping[BlockKey, object]) -> list[Run]:
        """Each run follows a chain to its end; parents come first."""
        parents = self.parents
        children: dict[BlockKey, list[BlockKey]] = {}
        for key in keys:
            children.setdefault(parents[key], []).append(key)
        waiting = [key for key in keys if parents[key] not in keys]
        waiting.reverse()
        runs = []
        while waiting:
            run = [waiting.pop()]
            parent = parents[run[0]]
            while following := children.get(run[-1]):
                waiting.extend(following[1:])
                run.append(following[0])
            runs.append(Run(keys=pack_keys(run), parent=parent))
        return runs
