"""The prefix index against a slow, obvious twin: the same answers after any history."""

from functools import reduce
from operator import xor

from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from pointsman.primitives import BlockKey, InstanceId
from pointsman.state.prefix_index import ROOT, PrefixIndex

INSTANCES = [InstanceId(name) for name in ("a", "b", "c")]

# A small forest of prompts: block (chain, depth) has the key 100 * chain + depth + 1; chains 1 and 2 branch off
# chain 0 after three blocks, chain 3 stands alone.
LENGTH = 9
BRANCH = {0: (0, 0), 1: (0, 3), 2: (0, 3), 3: (3, 0)}


def key(chain: int, depth: int) -> BlockKey:
    trunk, shared = BRANCH[chain]
    return BlockKey(100 * (trunk if depth < shared else chain) + depth + 1)


def prompt(chain: int) -> list[BlockKey]:
    return [key(chain, depth) for depth in range(LENGTH)]


class Twin:
    """What each instance holds, as sets; hits by walking the prompt."""

    def __init__(self) -> None:
        self.held: dict[InstanceId, set[BlockKey]] = {}

    def hits(self, keys: list[BlockKey]) -> dict[InstanceId, int]:
        found = {}
        for instance, held in self.held.items():
            depth = next((i for i, k in enumerate(keys) if k not in held), len(keys))
            if depth:
                found[instance] = depth
        return found


spans = st.tuples(st.integers(0, 3), st.integers(0, LENGTH - 1), st.integers(1, LENGTH))
steps = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(INSTANCES), spans),
    st.tuples(st.just("store whole"), st.sampled_from(INSTANCES), spans),
    st.tuples(st.just("remove"), st.sampled_from(INSTANCES), spans),
    st.tuples(st.just("remove tail"), st.sampled_from(INSTANCES), spans),
    st.tuples(st.just("clear"), st.sampled_from(INSTANCES), st.none()),
    st.tuples(st.just("drop"), st.sampled_from(INSTANCES), st.none()),
)


@settings(max_examples=400)
@given(st.lists(steps, max_size=40))
def test_any_history_gives_the_answers_of_the_twin(history: list[tuple[str, InstanceId, tuple[int, int, int]]]) -> None:
    index, twin = PrefixIndex(), Twin()

    for action, instance, span in history:
        take(index, twin, action, instance, span)

        for chain in BRANCH:
            assert index.hits(prompt(chain)) == twin.hits(prompt(chain))
        for name, held in twin.held.items():
            assert index.keys(name) == held
            assert index.digest(name) == reduce(xor, held, 0)


def take(index: PrefixIndex, twin: Twin, action: str, instance: InstanceId, span: tuple[int, int, int] | None) -> None:
    if action == "drop":
        index.drop(instance)
        twin.held.pop(instance, None)
        return
    index.add(instance)
    held = twin.held.setdefault(instance, set())
    if action == "clear" or span is None:
        index.clear(instance)
        held.clear()
        return
    chain, start, length = span
    if action == "store whole":
        start = 0
    if action == "remove tail":
        length = LENGTH
    keys = prompt(chain)[start : start + length]
    if action.startswith("store"):
        index.store(instance, key(chain, start - 1) if start else ROOT, keys)
        held.update(keys)
    else:
        index.remove(instance, keys[::-1])
        held.difference_update(keys)


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
    assert not index._children
    assert [index.blocks(instance) for instance in INSTANCES] == [0, 0, 0]


def test_matching_a_long_prompt_looks_up_few_of_its_blocks() -> None:
    index = PrefixIndex()
    keys = [BlockKey(n + 1) for n in range(625)]
    for number, depth in enumerate((100, 333, 625)):
        index.add(InstanceId(f"i{number}"))
        index.store(InstanceId(f"i{number}"), ROOT, keys[:depth])
    counted = CountedList(keys)

    assert index.hits(counted) == {"i0": 100, "i1": 333, "i2": 625}
    assert counted.reads < 40


class CountedList(list[BlockKey]):
    reads = 0

    @override
    def __getitem__(self, position):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(position)
