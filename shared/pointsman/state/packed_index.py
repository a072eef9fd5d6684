"""A prefix index as it is kept in a checkpoint: its runs, column by column, about 8 bytes a block. Also reads the form of
earlier releases: a mask of instances by block, and links between blocks. Does not know `PrefixIndex`, which uses it."""

from collections.abc import Iterator
from typing import Any

import msgspec

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys, unpack_keys
from pointsman.primitives import BlockKey, InstanceId, from_little_endian, little_endian
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


class PackedFork(msgspec.Struct, frozen=True):
    parent: BlockKey
    prune_at: int
    children: bytes


class PackedIndex(msgspec.Struct, frozen=True, omit_defaults=True):
    """Earlier releases have no `runs` but the rest. `anchored`: the keys of each mask (little-endian). `parents` and
    `children`: links, pairwise."""

    slots: int
    holdings: list[PackedHolding]
    runs: PackedRuns | None = None
    anchored: list[tuple[bytes, bytes]] = []
    parents: bytes = b""
    children: bytes = b""
    forks: list[PackedFork] = []


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
        msg = "the columns of the runs do not fit"
        raise ValueError(msg)
    made.fill(packed.content, lengths, doubled=packed.doubled > 0)
    return made


def _tips(runs: Runs) -> Iterator[Any]:
    for owner, held, tips in zip(runs.owner, runs.held, runs.shared, strict=True):
        yield ((owner, held),) if tips is None else tips.items()


def blocks_of_masks(packed: PackedIndex) -> Iterator[tuple[int, BlockKey, list[BlockKey]]]:
    """Of the form of earlier releases: slot, parent and consecutive keys; what is nearer to the beginning comes first."""
    parents = parents_of_masks(packed)
    masks = {key: int.from_bytes(mask, "little") for mask, keys in packed.anchored for key in unpack_keys(keys)}
    below: dict[BlockKey, list[BlockKey]] = {}
    for key in masks:
        below.setdefault(parents.get(key, BlockKey(0)), []).append(key)
    waiting = [(BlockKey(0), key) for key in below.get(BlockKey(0), ())]
    while waiting:
        parent, key = waiting.pop()
        keys = [key]
        while len(next_keys := below.get(keys[-1], ())) == 1:
            keys += next_keys
        waiting += [(keys[-1], child) for child in next_keys]
        left = masks[key]
        while left:
            bit = left & -left
            left ^= bit
            held = next((number for number, key in enumerate(keys) if not masks[key] & bit), len(keys))
            yield bit.bit_length() - 1, parent, keys[:held]


def parents_of_masks(packed: PackedIndex) -> dict[BlockKey, BlockKey]:
    parents = dict(zip(unpack_keys(packed.children), unpack_keys(packed.parents), strict=True))
    for fork in packed.forks:
        parents.update(dict.fromkeys(unpack_keys(fork.children), fork.parent))
    return parents
