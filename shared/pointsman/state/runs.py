"""The trie below the prefix index: runs of consecutive block keys. A run begins after the first `at` keys of another run,
its parent (run 0 is empty: prompts begin after it). Each owner that holds some of a run has a tip: how many of its keys it
holds, from the run's first. An owner that holds a key holds all before it, up to the prompt's first; so a run is as long
as its longest tip, and runs never move or split.

The columns hold numbers and bytes, no object for each run, since a million objects would be a second of garbage
collection. The tips of a retired owner are taken out little by little (`sweep`); until then they count for nobody."""

from array import array
from collections.abc import Iterable
from itertools import islice

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys, unpack_keys
from pointsman.primitives import BlockKey
from pointsman.state.key_table import NOWHERE, new_table

LOW = 2**32 - 1
HIGH = LOW << 32
SHARED = 2**32 - 1
NOBODY = 2**32 - 2

SWEPT = 3
"""Runs looked at, and keys taken out, for each key that is stored or removed: more than come in, and no more than that costs."""
PIECE = 1024
"""Keys taken out at once."""
RUN_KEYS_MAX = 8192
"""Of a run that still grows, and of what is added at once: whatever changes a run copies it."""
FEW = 32
"""Children that are looked at one by one."""


class Runs:
    """Columns, with one entry for each run:

    - `content`: its keys, as bytes.
    - `parent`, `at`: it begins after the first `at` keys of the run `parent`.
    - `owner`: who holds some of it: one owner, SHARED (several), or NOBODY (the run is free).
    - `held`: of the one owner, `bound << 32 | tip`. No run of this owner begins after more than `bound` keys of this one.
    - `shared`: of several owners, the same by owner; None if there is one.
    - `below`, `position`: runs that begin below it, in any order; None until there is one. And where it is in its parent's.

    By owner: `slots`, the instance's slot, or -1 if the owner is retired. An instance that is cleared gets a new owner.

    By key: `table`, its place `run << 32 | position`. `doubled`: keys that are at several places, as lying events have it."""

    __slots__ = (
        *("at", "content", "doubled", "held", "owner", "parent", "shared", "slots", "table"),
        *("below", "position"),
        *("_cursor", "_free", "_passing", "_retired", "_unused"),
    )

    def __init__(self) -> None:
        self.table = new_table()
        self.doubled: set[BlockKey] = set()
        self.content = [b""]
        self.parent, self.at, self.owner = array("I", [NOBODY]), array("I", [0]), array("I", [NOBODY])
        self.held = array("Q", [0])
        self.shared: list[dict[int, int] | None] = [None]
        self.below: list[array[int] | None] = [None]
        self.position = array("I", [0])
        self._free: list[int] = []
        self.slots: list[int] = []
        self._unused: list[int] = []
        self._retired: set[int] = set()
        self._passing: set[int] = set()
        """Retired before the pass of `sweep` began."""
        self._cursor = 0

    def enroll(self, slot: int) -> int:
        if self._unused:
            owner = self._unused.pop()
            self.slots[owner] = slot
            return owner
        self.slots.append(slot)
        return len(self.slots) - 1

    def retire(self, owner: int) -> None:
        self.slots[owner] = -1
        self._retired.add(owner)

    def child(self, run: int, at: int, key: BlockKey) -> int:
        """The run that begins there with this key, or 0."""
        for place in self.places(key):
            found = place >> 32
            if place >= 0 and not place & LOW and self.parent[found] == run and self.at[found] == at:
                return found
        return 0

    def places(self, key: BlockKey) -> Iterable[int]:
        """Where the key is; NOWHERE alone if it is nowhere."""
        return self.table.places(key) if key in self.doubled else (self.table.place(key),)

    def tip(self, run: int, owner: int) -> int:
        """How many of the run's keys the owner holds."""
        known = self.owner[run]
        if known == owner:
            return self.held[run] & LOW
        tips = self.shared[run]
        return tips.get(owner, 0) & LOW if tips is not None else 0

    def bound(self, run: int, owner: int) -> int:
        """None of the owner's runs begins deeper below this one. For owners with a tip."""
        tips = self.shared[run]
        return (self.held[run] if tips is None else tips[owner]) >> 32

    def tips(self, run: int) -> dict[int, int]:
        """By owner, each packed: `bound << 32 | tip`."""
        return self.shared[run] or {self.owner[run]: self.held[run]}

    def above(self, run: int) -> BlockKey:
        """The key before the run's first; 0 at the beginning of a prompt."""
        at = self.at[run] * KEY_BYTES
        return BlockKey(int.from_bytes(self.content[self.parent[run]][at - KEY_BYTES : at], "little") if at else 0)

    def children(self, run: int, beyond: int, owner: int, most: int) -> list[int]:
        """Runs of the owner that begin after more than `beyond` keys of this one; some, if more than `most` do."""
        below = self.below[run] or array("I")
        found: Iterable[int] = below
        if len(below) > FEW:
            import numpy as np  # here: it is rarely needed

            runs = np.frombuffer(below, np.uint32)
            owners = np.frombuffer(self.owner, np.uint32)[runs]
            found = runs[(owners == owner) | (owners == SHARED)].tolist()
        deeper = (child for child in found if self.at[child] > beyond and self.tip(child, owner))
        return sorted(islice(deeper, most + 1))

    def of(self, owner: int) -> list[tuple[int, int]]:
        """Its runs and tips. Looks at all runs."""
        import numpy as np

        owners = np.frombuffer(self.owner, np.uint32)
        runs = np.flatnonzero((owners == owner) | (owners == SHARED)).tolist()
        return [(run, tip) for run in runs if (tip := self.tip(run, owner))]

    def raise_tip(self, run: int, owner: int, tip: int) -> None:
        known = self.owner[run]
        if known == owner:
            self.held[run] = self.held[run] & HIGH | tip
            return
        tips = self.shared[run]
        if tips is None:
            tips = self.shared[run] = {known: self.held[run]}
            self.owner[run] = SHARED
        before = tips.get(owner)
        if before is None:
            tips[owner] = tip
            self._note_child(run, owner)
        else:
            tips[owner] = before & HIGH | tip

    def add(self, run: int, at: int, keys: list[BlockKey], packed: bytes, owner: int) -> int:
        """For an owner that holds the run up to there. Stops at a key that is somewhere already; returns how many it added."""
        place = run << 32 | at if self._grows(run, at) else self._next() << 32
        count = self.table.insert(keys, packed, place)
        if count:
            self._add(run, at, packed[: count * KEY_BYTES], owner)
        return count

    def add_again(self, run: int, at: int, key: BlockKey, owner: int) -> None:
        """As `add`, also of a key that is somewhere already."""
        if self.table.place(key) != NOWHERE:
            self.doubled.add(key)
        self.table.insert_again(key, run << 32 | at if self._grows(run, at) else self._next() << 32)
        self._add(run, at, pack_keys([key]), owner)

    def _grows(self, run: int, at: int) -> bool:
        """Whether what begins there is of the same run."""
        return run > 0 and at * KEY_BYTES == len(self.content[run]) < RUN_KEYS_MAX * KEY_BYTES

    def _next(self) -> int:
        return self._free[-1] if self._free else len(self.content)

    def _add(self, run: int, at: int, packed: bytes, owner: int) -> None:
        if self._grows(run, at):
            self.content[run] += packed
            self.raise_tip(run, owner, at + len(packed) // KEY_BYTES)
            return
        made = self._next()
        if self._free:
            self._free.pop()
            self.content[made], self.parent[made], self.at[made] = packed, run, at
            self.owner[made], self.held[made] = owner, len(packed) // KEY_BYTES
        else:
            self.content.append(packed)
            self.parent.append(run)
            self.at.append(at)
            self.owner.append(owner)
            self.held.append(len(packed) // KEY_BYTES)
            self.shared.append(None)
            self.below.append(None)
            self.position.append(0)
        if run:
            self._put_below(made)
            self._note_child(made, owner)

    def cut(self, run: int, owner: int, tip: int) -> None:
        """An owner with a longer tip holds no more than this from here on."""
        tips = self.shared[run]
        if tips is None:
            self.held[run] = min(self.held[run] >> 32, tip) << 32 | tip
            self._trim(run, tip)
            return
        length = len(self.content[run]) // KEY_BYTES
        before = tips[owner]
        if tip:
            tips[owner] = min(before >> 32, tip) << 32 | tip
        else:
            del tips[owner]
        if before & LOW == length or len(tips) < 2:
            self._keep(run, tips)

    def _keep(self, run: int, tips: dict[int, int]) -> None:
        """What a shared run has from here on: of those that are left, maybe of one or none."""
        self.shared[run] = tips
        if len(tips) < 2:
            self.shared[run] = None
            ((self.owner[run], self.held[run]),) = tips.items() or ((NOBODY, 0),)
        self._trim(run, max((held & LOW for held in tips.values()), default=0))

    def sweep(self, steps: int) -> None:
        """Takes out some of what retired owners held. A pass goes from the newest run to the oldest, so that most children go
        before their parents."""
        while steps > 0 and self._retired:
            if not self._cursor:
                self._retired -= self._passing
                self._unused += self._passing
                self._passing = set(self._retired)
                self._cursor = len(self.content) - 1 if self._retired else 0
                steps -= 1
                continue
            run = self._cursor
            owner = self.owner[run]
            tips = self.shared[run]
            if tips is not None:
                steps -= 1 + len(tips) // 4
                kept = {one: held for one, held in tips.items() if one not in self._retired}
                if len(kept) < len(tips):
                    self._keep(run, kept)
            elif owner in self._retired:
                tip = self.held[run] & LOW
                left = max(0, tip - PIECE)
                self.cut(run, owner, left)
                steps -= 1 + tip - left
                if left:
                    continue
            else:
                steps -= 1
            self._cursor -= 1

    def fill(self, content: bytes, lengths: "array[int]", *, doubled: bool) -> None:
        """With the keys of all runs, whose tips are known. `doubled`: some are at several places."""
        import numpy as np

        counts = np.frombuffer(lengths, np.uint32).astype(np.int64)
        starts = np.cumsum(counts) - counts
        places = np.arange(len(content) // KEY_BYTES)
        places += np.repeat((np.arange(len(counts)) << 32) - starts, counts)
        keys = np.frombuffer(content, "<u8")
        self.table.fill(keys, places.view(np.uint64))
        if doubled:
            once, often = np.unique(keys, return_counts=True)
            self.doubled = set(once[often > 1].tolist())
        self.content = [
            content[start * KEY_BYTES : (start + count) * KEY_BYTES]
            for start, count in zip(starts.tolist(), lengths, strict=True)
        ]
        self._free = [run for run, count in enumerate(lengths) if run and not count]
        self.below, self.position = [None] * len(lengths), array("I", bytes(4 * len(lengths)))
        for run in np.flatnonzero((counts > 0) & (np.frombuffer(self.parent, np.uint32) > 0)).tolist():
            self._put_below(run)
        self._retired = {owner for owner, slot in enumerate(self.slots) if slot < 0}

    def _put_below(self, run: int) -> None:
        parent = self.parent[run]
        found = self.below[parent]
        if found is None:
            found = self.below[parent] = array("I")
        self.position[run] = len(found)
        found.append(run)

    def _take_below(self, run: int) -> None:
        """The last of its siblings takes its position."""
        found = self.below[self.parent[run]]
        assert found is not None
        last = found.pop()
        if last != run:
            found[self.position[run]] = last
            self.position[last] = self.position[run]
        if not found:
            self.below[self.parent[run]] = None

    def _note_child(self, run: int, owner: int) -> None:
        parent, at = self.parent[run], self.at[run]
        if not parent:
            return
        tips = self.shared[parent]
        if tips is None:
            self.held[parent] = max(self.held[parent] >> 32, at) << 32 | self.held[parent] & LOW
        else:
            tips[owner] = max(tips[owner] >> 32, at) << 32 | tips[owner] & LOW

    def _trim(self, run: int, length: int) -> None:
        content = self.content[run]
        gone = content[length * KEY_BYTES :]
        if not gone:
            return
        self.table.delete(gone, run << 32 | length)
        if self.doubled:
            for key in self.doubled.intersection(unpack_keys(gone)):
                if len(list(self.table.places(key))) < 2:
                    self.doubled.remove(key)
        self.content[run] = content[: length * KEY_BYTES]
        if not length:
            if self.parent[run]:
                self._take_below(run)
            self.owner[run] = self.parent[run] = NOBODY
            self.held[run] = 0
            self._free.append(run)
