"""An instance with too many blocks below missing ones is cleared and doubted, whatever events led there; none other is."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksStored, CacheSnapshot, Run
from pointsman.contracts.codec import LogEvent
from pointsman.primitives import BlockKey, Epoch, InstanceId
from pointsman.state import holdings
from pointsman.state.holdings import DETACHED_MAX
from pointsman.state.prefix_index import Holding
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from tests.support.events import joined, removed, stored
from tests.support.examples import examples

MOST = 4
ENGINES = [InstanceId("a"), InstanceId("b")]
KEYS = range(1, 9)

Step = tuple[str, InstanceId, int, list[int]]


class Told:
    """Of one instance, the predecessor of each block that it holds, as first told."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.doubted = False

    def take(self, action: str, parent: int, keys: list[int], *, bounded: bool) -> None:
        if action == "snapshot":
            self.parents, self.doubted = {}, False
        for key in keys:
            if action == "remove":
                self.parents.pop(key, None)
            else:
                self.parents.setdefault(key, parent)
                parent = parent if action == "siblings" else key
        if bounded and sum(not self.anchored(key) for key in self.parents) > MOST:
            self.parents, self.doubted = {}, True

    def anchored(self, key: int) -> bool:
        seen = set()
        while key in self.parents and key not in seen:
            seen.add(key)
            key = self.parents[key]
        return key == 0


def event(action: str, instance: InstanceId, sequence: int, parent: int, keys: list[int]) -> LogEvent:
    if action == "remove":
        return removed(instance, sequence, keys)
    if action == "store":
        return stored(instance, sequence, keys, parent=parent)
    if action == "siblings":
        runs = [Run(pack_keys([key]), BlockKey(parent)) for key in keys]
        return BlocksStored(at=0.0, instance=instance, epoch=Epoch(1), sequence=sequence, runs=runs)
    run = Run(pack_keys(keys), BlockKey(parent))
    return CacheSnapshot(at=0.0, instance=instance, epoch=Epoch(1), sequence=sequence, runs=[run])


steps = st.tuples(
    st.sampled_from(["store"] * 6 + ["siblings"] * 4 + ["remove"] * 3 + ["snapshot"]),
    st.sampled_from(ENGINES),
    st.integers(0, 3),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True),
)


@examples(240)
@given(st.lists(steps, min_size=20, max_size=60), st.sampled_from([FOLD_VERSION, 18]))
def test_any_history_gives_what_was_told_or_nothing(history: list[Step], fold_version: int) -> None:
    state = State(PoolSettings(fold_version=fold_version))
    told = {name: Told() for name in ENGINES}
    for name in ENGINES:
        state.apply(joined(name))

    with patch.object(holdings, "DETACHED_MAX", MOST):
        for sequence, (action, name, parent, some) in enumerate(history, 1):
            told[name].take(action, parent, some, bounded=fold_version > 18)
            known = state.fleet[name]
            known.sequence = sequence - 1
            state.apply(event(action, name, sequence, parent, some))

            for instance, expected in told.items():
                assert state.index.keys(instance) == expected.parents.keys()
                assert bool(state.fleet[instance].doubt) == expected.doubted
            anchored = sum(one.anchored(key) for one in told.values() for key in one.parents)
            assert len(state.index) == anchored


@pytest.mark.parametrize("wide", [True, False])
def test_no_event_goes_through_all_that_hangs_below_a_removed_block(wide: bool) -> None:
    """Two million took longer than a lease."""
    state, (name, _) = State(PoolSettings()), ENGINES
    state.apply(joined(name))
    state.apply(stored(name, 1, [1]))
    sequence, last = 1, 1
    for first in range(2, 8 * DETACHED_MAX, 4096):
        sequence += 1
        keys = list(range(first, first + 4096))
        state.apply(stored(name, sequence, keys, parent=1 if wide else last))
        last = keys[-1]
    table = state.index._runs.table
    before = len(table)

    with patch.object(Holding, "detach", autospec=True, side_effect=Holding.detach) as detached:
        state.apply(removed(name, sequence + 1, [1]))

    assert (state.index.blocks(name), bool(state.fleet[name].doubt)) == (0, True)
    assert detached.call_count < 2 * DETACHED_MAX
    assert before - len(table) < 2 * DETACHED_MAX
