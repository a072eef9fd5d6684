"""At which places each block key is, in about 20 bytes a key: buckets of 16-byte entries, the key and its place. A bucket is
one `bytes`, searched by `find`. Keys are hashes, so their low bits choose the bucket.

Nothing is ever rebuilt in one piece. When buckets get full their number doubles: as keys are inserted, the list grows, and
each new bucket begins as the same bytes as its *twin* in the lower half; then all are rid of entries that belong to the
twin. Nobody looks for a key in the twin, once there are both.

`shared/pointsman_native` has the same compiled, for whoever installs it (`new_table`)."""

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pointsman.contracts.block_keys import KEY_BYTES, find_packed, pack_keys, unpack_keys
from pointsman.primitives import BlockKey

ENTRY = 16
NOWHERE = -1

BUCKETS_MIN = 64
FILL = 12
"""Entries per bucket at which their number doubles."""
GROWN, GROWN_MIN = 8, 64
"""New buckets for each key inserted, and for each call."""
FILLED_AT_ONCE = 65_536
"""Buckets: all at once would be in memory several times."""
NATIVE_VERSION = 1


try:
    from pointsman_native import key_table as native

    COMPILED = native.VERSION == NATIVE_VERSION
except (ImportError, AttributeError):
    COMPILED = False


class KeyTable:
    """A key that is at several places has several entries."""

    __slots__ = ("_buckets", "_entries", "_mask", "_unswept")

    def __init__(self) -> None:
        self._buckets = [b""] * BUCKETS_MIN
        self._mask = BUCKETS_MIN - 1
        """Buckets beyond the end of the list are still one with their twins."""
        self._entries = 0
        self._unswept = NOWHERE
        """Buckets up to here may hold entries of their twins."""

    def __len__(self) -> int:
        return self._entries

    def place(self, key: BlockKey) -> int:
        """The first place, or NOWHERE."""
        buckets, slot = self._buckets, key & self._mask
        bucket = buckets[slot if slot < len(buckets) else slot & self._mask >> 1]
        at = find_packed(bucket, key.to_bytes(KEY_BYTES, "little"), ENTRY)
        return int.from_bytes(bucket[at + KEY_BYTES : at + ENTRY], "little") if at >= 0 else NOWHERE

    def places(self, key: BlockKey) -> Iterator[int]:
        bucket = self._buckets[self._slot(key)]
        packed = key.to_bytes(KEY_BYTES, "little")
        at = find_packed(bucket, packed, ENTRY)
        while at >= 0:
            yield int.from_bytes(bucket[at + KEY_BYTES : at + ENTRY], "little")
            at = find_packed(bucket, packed, ENTRY, at + ENTRY)

    def insert(self, keys: list[BlockKey], packed: bytes, place: int) -> int:
        """At consecutive places, up to the first that is somewhere already. Returns how many. `packed`: the same keys."""
        buckets, mask = self._buckets, self._mask
        size, lower = len(buckets), mask >> 1
        done = 0
        for key, first, second in zip(keys, *_halves(packed, place), strict=True):
            slot = key & mask
            if slot >= size:
                slot &= lower
            bucket = buckets[slot]
            if bucket.find(first) >= 0 and self.place(key) != NOWHERE:
                break
            buckets[slot] = bucket + first + second
            done += 1
        self._make_room(done)
        return done

    def insert_again(self, key: BlockKey, place: int) -> None:
        """One that may be somewhere already."""
        self._buckets[self._slot(key)] += pack_keys((key, place))
        self._make_room(1)

    def delete(self, packed: bytes, place: int) -> None:
        """Keys at consecutive places."""
        buckets, mask = self._buckets, self._mask
        size, lower = len(buckets), mask >> 1
        keys = unpack_keys(packed)
        for key, first, second in zip(keys, *_halves(packed, place), strict=True):
            slot = key & mask
            if slot >= size:
                slot &= lower
            before, _, after = buckets[slot].partition(first + second)
            if len(before) & (ENTRY - 1) or len(before) == len(buckets[slot]):
                before, after = self._around(slot, first + second)
            buckets[slot] = before + after
        self._entries -= len(keys)

    def _around(self, slot: int, entry: bytes) -> tuple[bytes, bytes]:
        bucket = self._buckets[slot]
        at = find_packed(bucket, entry, ENTRY)
        assert at >= 0, f"block {entry[:KEY_BYTES].hex()} is not at its place"
        return bucket[:at], bucket[at + ENTRY :]

    def fill(self, keys: Any, places: Any) -> None:
        """An empty table, with arrays of 64 bits."""
        import numpy as np  # here: at a start from a checkpoint only

        count = max(BUCKETS_MIN, 1 << (len(keys) * 4 // (FILL * 3)).bit_length())
        slots = keys & np.uint64(count - 1)
        ends = np.cumsum(np.bincount(slots.astype(np.int64), minlength=count))
        order = np.argsort(slots, kind="stable")
        del slots
        self._buckets = []
        for first in range(0, count, FILLED_AT_ONCE):
            bounds = [int(ends[first - 1]) if first else 0, *ends[first : first + FILLED_AT_ONCE].tolist()]
            part = order[bounds[0] : bounds[-1]]
            entries = np.stack((keys[part], places[part]), axis=1).astype("<u8", copy=False).tobytes()
            cuts = [ENTRY * (bound - bounds[0]) for bound in bounds]
            self._buckets += [entries[start:end] for start, end in pairwise(cuts)]
        self._mask, self._entries = count - 1, len(keys)

    def _slot(self, key: BlockKey) -> int:
        slot = key & self._mask
        return slot if slot < len(self._buckets) else slot & self._mask >> 1

    def _make_room(self, inserted: int) -> None:
        self._entries += inserted
        size = len(self._buckets)
        if size > self._mask and self._entries > FILL * size:
            self._mask = 2 * self._mask + 1
        if size <= self._mask:
            self._grow(GROWN_MIN + GROWN * inserted)
        elif self._unswept >= 0:
            self._sweep(1 + inserted // 2)

    def _grow(self, count: int) -> None:
        buckets, half = self._buckets, (self._mask + 1) // 2
        first = len(buckets) - half
        buckets += buckets[first : min(first + count, half)]
        if len(buckets) > self._mask:
            self._unswept = self._mask

    def _sweep(self, count: int) -> None:
        """Rids some buckets of entries that belong to their twins."""
        mask = self._mask
        for slot in range(self._unswept, max(-1, self._unswept - count), -1):
            bucket = self._buckets[slot]
            size = len(bucket) // ENTRY
            keys = struct.unpack(f"<{2 * size}Q", bucket)[::2]
            entries = struct.unpack("16s" * size, bucket)
            self._buckets[slot] = b"".join(
                entry for key, entry in zip(keys, entries, strict=True) if key & mask == slot
            )
        self._unswept -= count


def new_table() -> "KeyTable | native.KeyTable":
    return native.KeyTable() if COMPILED else KeyTable()


def _halves(packed: bytes, place: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Of each entry."""
    count = len(packed) // KEY_BYTES
    form = "8s" * count
    return struct.unpack(form, packed), struct.unpack(form, pack_keys(range(place, place + count)))


def common(ours: bytes, theirs: bytes) -> int:
    """Leading keys that two packed sequences share."""
    low, high = 0, min(len(ours), len(theirs)) // KEY_BYTES
    if ours[: high * KEY_BYTES] == theirs[: high * KEY_BYTES]:
        return high
    while high - low > 1:  # equal up to `low`, different within `high`
        middle = (low + high) >> 1
        if ours[low * KEY_BYTES : middle * KEY_BYTES] == theirs[low * KEY_BYTES : middle * KEY_BYTES]:
            low = middle
        else:
            high = middle
    return low
