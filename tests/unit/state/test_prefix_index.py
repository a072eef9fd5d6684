"""The prefix index against a slow twin: the same answers after any history."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import xor
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys
from pointsman.primitives import BlockKey, InstanceId
from pointsman.state import prefix_index, runs
from pointsman.state.packed_index import PackedIndex
from pointsman.state.prefix_index import ROOT, PrefixIndex
from pointsman.state.runs import RUN_KEYS_MAX, Runs
from tests.support.examples import examples

INSTANCES = [InstanceId(name) for name in ("a", "b", "c", "d")]

# A small forest of prompts: block (chain, depth) has the key 100 * chain + depth + 1; chains 1 and 2 branch off
# chain 0 after three blocks, chain 4 off chain 1 after six, chain 3 stands alone.
LENGTH = 9
BRANCH = {0: (0, 0), 1: (0, 3), 2: (0, 3), 3: (3, 0), 4: (1, 6)}

Step = tuple[str, InstanceId, BlockKey, list[BlockKey]]


def key(chain: int, depth: int) -> BlockKey:
    while depth < BRANCH[chain][1]:
        chain = BRANCH[chain][0]
    return BlockKey(100 * chain + depth + 1)


def prompt(chain: int) -> list[BlockKey]:
    return [key(chain, depth) for depth in range(LENGTH)]


PROMPTS = [prompt(chain) for chain in BRANCH]


class Told:
    """Of each instance, the predecessor of each block that it holds, as first told. A block counts if all before it do."""

    def __init__(self) -> None:
        self.parents: dict[InstanceId, dict[BlockKey, BlockKey]] = {}

    def hits(self, keys: list[BlockKey]) -> dict[InstanceId, int]:
        found = {}
        for instance, parents in self.parents.items():
            depth = 0
            while depth < len(keys) and parents.get(keys[depth]) == (keys[depth - 1] if depth else ROOT):
                depth += 1
            if depth:
                found[instance] = depth
        return found

    def holders(self, wanted: BlockKey) -> set[InstanceId]:
        return {instance for instance in self.parents if self.anchored(instance, wanted)}

    def anchored(self, instance: InstanceId, wanted: BlockKey) -> bool:
        parents, seen = self.parents[instance], set[BlockKey]()
        while wanted in parents and wanted not in seen:
            seen.add(wanted)
            if parents[wanted] == ROOT:
                return True
            wanted = parents[wanted]
        return False

    def take(self, step: Step) -> None:
        action, instance, parent, keys = step
        if action == "drop":
            self.parents.pop(instance, None)
            return
        held = self.parents.setdefault(instance, {})
        if action == "clear":
            held.clear()
        elif action == "store":
            for told in keys:
                held.setdefault(told, parent)
                parent = told
        else:
            for told in keys:
                held.pop(told, None)


def take(index: PrefixIndex, step: Step) -> None:
    action, instance, parent, keys = step
    if action == "drop":
        index.drop(instance)
        return
    index.add(instance)
    if action == "clear":
        index.clear(instance)
    elif action == "store":
        index.store(instance, parent, list(keys))
    else:
        index.remove(instance, list(keys))


@st.composite
def honest_steps(draw: st.DrawFn) -> Step:
    """Of blocks that always have the same predecessor: also repeated, without it, or removed before their successors."""
    action = draw(st.sampled_from(["store", "store", "whole", "whole", "remove", "tail", "reverse", "clear", "drop"]))
    instance, chain = draw(st.sampled_from(INSTANCES)), draw(st.sampled_from(list(BRANCH)))
    if action in {"clear", "drop"}:
        return action, instance, ROOT, []
    start = 0 if action == "whole" else draw(st.integers(0, LENGTH - 1))
    length = LENGTH if action in {"tail", "reverse"} else draw(st.integers(1, LENGTH))
    keys = prompt(chain)[start : start + length]
    if action in {"store", "whole"}:
        return "store", instance, key(chain, start - 1) if start else ROOT, keys
    return "remove", instance, ROOT, keys[::-1] if action == "reverse" else keys


@st.composite
def any_steps(draw: st.DrawFn) -> Step:
    """Also of blocks below any other, below themselves, and of the root's key."""
    keys = st.integers(0, 12).map(BlockKey)
    action = draw(st.sampled_from(["store", "store", "store", "remove", "clear", "drop"]))
    some = draw(st.lists(keys, max_size=6)) if action in {"store", "remove"} else []
    return action, draw(st.sampled_from(INSTANCES)), draw(keys), some


def check(index: PrefixIndex, told: Told, prompts: list[list[BlockKey]], keys: list[BlockKey]) -> None:
    for wanted in prompts:
        hits = told.hits(wanted)
        assert list(index.hits(wanted).items()) == sorted(hits.items(), key=lambda hit: (-hit[1], index.bits([hit[0]])))
        for name in told.parents:
            assert index.depth(name, wanted) == hits.get(name, 0)
    for name, parents in told.parents.items():
        assert index.keys(name) == parents.keys()
        assert index.blocks(name) == len(parents)
        assert index.digest(name) == reduce(xor, parents, 0)
        assert [k for k in keys if index.holds(name, k)] == [k for k in keys if k in parents]
    for block in keys:
        assert index.holders(block) == index.bits(told.holders(block))
    assert len(index) == sum(told.anchored(name, k) for name, parents in told.parents.items() for k in parents)


@contextmanager
def runs_of_at_most(keys_max: int) -> Iterator[None]:
    with (
        patch.object(runs, "RUN_KEYS_MAX", keys_max),
        patch.object(prefix_index, "RUN_KEYS_MAX", keys_max),
        patch.object(runs, "FEW", keys_max % 2),
    ):
        yield


RUN_LENGTHS = st.sampled_from([1, 2, RUN_KEYS_MAX])


@examples(160)
@given(st.lists(honest_steps(), min_size=20, max_size=40), RUN_LENGTHS)
def test_any_honest_history_gives_the_answers_of_what_was_told(history: list[Step], run_keys_max: int) -> None:
    index, told = PrefixIndex(), Told()
    keys = sorted({key for wanted in PROMPTS for key in wanted})

    with runs_of_at_most(run_keys_max):
        for step in history:
            take(index, step)
            told.take(step)

            check(index, told, PROMPTS, keys)
            check_links(index._runs)


@examples(240)
@given(
    st.lists(any_steps(), min_size=20, max_size=40),
    st.lists(st.lists(st.integers(1, 12).map(BlockKey), max_size=6), max_size=8),
    RUN_LENGTHS,
)
def test_any_history_gives_the_answers_of_what_was_told(
    history: list[Step], prompts: list[list[BlockKey]], run_keys_max: int
) -> None:
    index, told = PrefixIndex(), Told()
    told_of = ([parent, *keys] if parent else keys for _, _, parent, keys in history)
    prompts += [keys for keys in told_of if ROOT not in keys]  # of which no prompt has a block

    with runs_of_at_most(run_keys_max):
        for step in history:
            take(index, step)
            told.take(step)

            check(index, told, prompts, [BlockKey(k) for k in range(13)])
            check_links(index._runs)


def check_links(runs: Runs) -> None:
    """Each run is in the list of its parent, once, where it says that it is."""
    below = {(parent, child) for parent, found in enumerate(runs.below) for child in found or ()}
    assert below == {
        (runs.parent[run], run) for run, content in enumerate(runs.content) if content and runs.parent[run]
    }
    assert all(runs.below[parent][runs.position[child]] == child for parent, child in below)  # type: ignore[index]


def test_nothing_is_left_behind_when_all_is_removed() -> None:
    index = PrefixIndex()
    for instance in INSTANCES:
        index.add(instance)
        for chain in BRANCH:
            index.store(instance, ROOT, prompt(chain))

    for instance in INSTANCES:
        for chain in BRANCH:
            index.remove(instance, prompt(chain))

    assert len(index) == 0
    assert [index.blocks(instance) for instance in INSTANCES] == [0, 0, 0, 0]
    assert runs_left(index) == 0
    assert len(index._runs.table) == 0


@pytest.mark.parametrize("length", [1, 100])
def test_what_cleared_instances_held_does_not_pile_up(length: int) -> None:
    index, keys = PrefixIndex(), itertools.count(1)
    index.add(INSTANCES[0])
    for _ in range(20):
        for _ in range(1_000 // length):
            index.store(INSTANCES[0], ROOT, [BlockKey(next(keys)) for _ in range(length)])
        index.clear(INSTANCES[0])

        assert len(index._runs.table) <= 3_000


def random_chain(length: int) -> list[BlockKey]:
    chance = Random(length)
    return [BlockKey(chance.getrandbits(64)) for _ in range(length)]


def of_one_store(index: PrefixIndex, chain: list[BlockKey]) -> None:
    index.store(INSTANCES[0], ROOT, chain)


def block_by_block(index: PrefixIndex, chain: list[BlockKey]) -> None:
    for parent, block in itertools.pairwise([ROOT, *chain]):
        index.store(INSTANCES[0], parent, [block])


def its_first_last(index: PrefixIndex, chain: list[BlockKey]) -> None:
    index.store(INSTANCES[0], chain[0], chain[1:])
    index.store(INSTANCES[0], ROOT, chain[:1])


def what_another_has_in_reverse(index: PrefixIndex, chain: list[BlockKey]) -> None:
    index.store(INSTANCES[1], ROOT, chain[::-1])
    index.store(INSTANCES[0], ROOT, chain)


@pytest.mark.parametrize("store", [of_one_store, block_by_block, its_first_last, what_another_has_in_reverse])
def test_a_long_chain_is_several_runs_since_growing_copies_one(store: Any) -> None:
    """The first of 700,000 blocks, told last, took minutes."""
    index, chain = PrefixIndex(), random_chain(3 * RUN_KEYS_MAX + 5)
    for instance in INSTANCES:
        index.add(instance)

    store(index, chain)

    assert index.hits(chain) == {INSTANCES[0]: len(chain)}
    assert max(map(len, index._runs.content)) <= 2 * RUN_KEYS_MAX * KEY_BYTES
    index.remove(INSTANCES[0], chain[1:])
    assert index.hits(chain) == {INSTANCES[0]: 1}


def test_what_is_below_a_removed_block_is_found_without_a_look_at_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an event that removed thousands of blocks with successors each one looked at all runs."""
    index, blocks = PrefixIndex(), random_chain(4_000)
    index.add(INSTANCES[0])
    for above, below, beside in zip(blocks[::4], blocks[1::4], blocks[2::4], strict=True):
        index.store(INSTANCES[0], ROOT, [above, below])
        index.store(INSTANCES[0], above, [beside])
    monkeypatch.setitem(sys.modules, "numpy", None)  # which looks at all

    index.remove(INSTANCES[0], blocks[::4])

    assert (len(index), index.blocks(INSTANCES[0])) == (0, 2_000)


class CountedTips(dict[int, int]):
    looks = 0

    @override
    def values(self) -> Any:
        CountedTips.looks += len(self)
        return super().values()


def test_what_a_thousand_share_is_looked_at_once_when_all_leave() -> None:
    """Each that left looked at the tips of all others."""
    runs, count = Runs(), 1_000
    owners = [runs.enroll(slot) for slot in range(count)]
    runs.add(0, 0, [BlockKey(7)], pack_keys([BlockKey(7)]), owners[0])
    for owner in owners[1:]:
        runs.raise_tip(1, owner, 1)
    runs.shared[1] = CountedTips(runs.shared[1] or {})
    for owner in owners:
        runs.retire(owner)

    runs.sweep(10 * count)

    assert runs.content[1] == b""
    assert CountedTips.looks <= count


def runs_left(index: PrefixIndex) -> int:
    return sum(map(bool, index._runs.content))


@examples(100)
@given(st.lists(any_steps(), min_size=10, max_size=30), st.lists(any_steps(), max_size=10))
def test_an_unpacked_index_goes_on_as_the_packed_one(before: list[Step], after: list[Step]) -> None:
    index, told = PrefixIndex(), Told()
    for step in before:
        take(index, step)
        told.take(step)

    restored = PrefixIndex.unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(index.pack()), type=PackedIndex))

    assert restored.pack(canonical=True) == index.pack(canonical=True)
    assert restored.pack() == index.pack()
    check_links(restored._runs)
    for step in after:
        take(restored, step)
        told.take(step)
        check(restored, told, [], [BlockKey(k) for k in range(13)])


def test_the_canonical_form_is_not_unpacked() -> None:
    with pytest.raises(ValueError, match="the runs are missing"):
        PrefixIndex.unpack(PrefixIndex().pack(canonical=True))
