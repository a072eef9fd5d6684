"""A prefix index as it is kept in a checkpoint: its runs, column by column, about 8 bytes a block. Does not know
`PrefixIndex`, which uses it."""

from collections.abc import Iterator
from typing import Any

import msgspec

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys, unpack_keys
from pointsman.primitives import InstanceId, from_little_endian, little_endian
from pointsman.state.runs import LOW, SHARED, Runs

SLOTS_MAX = 65_536


class PackedHolding(msgspec.Struct, frozen=True, omit_defaults=True):
    """`detached` keys have `parents`. `owner` and `anchored`: see `runs`."""

    instance: InstanceId
    slot: int
    digest: int
    detached: bytes = b""
    parents: bytes = b""
    owner: int = -1
    anchored: int = 0


class PackedRuns(msgspec.Struct, frozen=True):
    """`content`: keys of all runs; `shared`: owners and what they hold, of runs with several. Others: little-endian columns of `Runs`."""

    content: bytes
    lengths: bytes
    parent: bytes
    at: bytes
    owner: bytes
    held: bytes
    shared: list[tuple[int, bytes]]
    slots: list[int]
    doubled: int


class PackedIndex(msgspec.Struct, frozen=True, omit_defaults=True):
    """`runs`: absent in the canonical form, which is not unpacked."""

    slots: int
    holdings: list[PackedHolding]
    runs: PackedRuns | None = None


def pack_runs(runs: Runs) -> PackedRuns:
    return PackedRuns(
        content=b"".join(runs.content),
        lengths=little_endian("I", [len(keys) // KEY_BYTES for keys in runs.content]),
        parent=little_endian("I", runs.parent),
        at=little_endian("I", runs.at),
        owner=little_endian("I", runs.owner),
        held=little_endian("Q", runs.held),
        shared=[
            (run, pack_keys(number for tip in tips.items() for number in tip))
            for run, tips in enumerate(runs.shared)
            if tips is not None
        ],
        slots=list(runs.slots),
        doubled=len(runs.doubled),
    )


def unpack_runs(packed: PackedRuns, slots: int) -> Runs:
    """Raises ValueError."""
    made = Runs()
    made.slots = packed.slots
    made.parent, made.at, made.owner = (
        from_little_endian("I", column) for column in (packed.parent, packed.at, packed.owner)
    )
    made.held = from_little_endian("Q", packed.held)
    lengths, owners = from_little_endian("I", packed.lengths), range(len(packed.slots))
    count = len(lengths)
    made.shared = [None] * count
    for run, tips in packed.shared:
        pairs = iter(unpack_keys(tips))
        made.shared[run] = dict(zip(pairs, pairs, strict=True))
    if (
        {len(made.parent), len(made.at), len(made.owner), len(made.held)} != {count}
        or not count
        or lengths[0]
        or sum(lengths) * KEY_BYTES != len(packed.content)
        or not all(-1 <= slot < slots for slot in packed.slots)
        or any(
            length and (parent >= count or any(owner not in owners or held & LOW > length for owner, held in tips))
            for length, parent, tips in zip(lengths, made.parent, _tips(made), strict=True)
        )
        or any((tips is None) == (owner == SHARED) for owner, tips in zip(made.owner, made.shared, strict=True))
    ):
        raise ValueError("the columns of the runs do not fit")
    made.fill(packed.content, lengths, doubled=packed.doubled > 0)
    return made


def _tips(runs: Runs) -> Iterator[Any]:
    for owner, held, tips in zip(runs.owner, runs.held, runs.shared, strict=True):
        yield ((owner, held),) if tips is None else tips.items()
