"""A State without an index: what it knows of loads and queues is what a State with one knows, wherever it began."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import CacheCleared, CacheSnapshot, Run
from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.primitives import BlockKey, Epoch, InstanceId
from pointsman.state.checkpoint import decode_head, encode_parts, state_digest
from pointsman.state.no_index import NoIndex
from pointsman.state.state import PoolSettings, State
from tests.support.events import joined, removed, reported, stored
from tests.support.examples import examples
from tests.support.recorded_log import every_tracker, fresh_state, random_log


def fold(state: State, events: list[LogEvent], start: int = 0) -> State:
    for number, event in enumerate(events[start:], start + 1):
        state.apply(event, number)
    return state


def without_index() -> State:
    return State(PoolSettings(), every_tracker(), index=False)


def digest_of_loads(state: State) -> str:
    """Everything but block counts and what only hits and deliveries need."""
    state.drop_index()
    state.index = NoIndex()
    for request in state.workload.requests.values():
        request.placed_as_of = request.held_blocks = 0
    for instance in state.fleet.instances:
        instance.known_as, instance.known_since = None, 0.0
    return state_digest(state)


@examples(60)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 400), cut=st.floats(0, 1))
def test_loads_and_queues_are_those_of_a_state_with_an_index(seed: int, steps: int, cut: float) -> None:
    events = [decode_event(encode(event)) for event in random_log(seed, steps)]
    middle = round(cut * len(events))
    head, _ = encode_parts(fold(fresh_state(), events[:middle]))

    whole = digest_of_loads(fold(fresh_state(), events))
    assert digest_of_loads(fold(without_index(), events)) == whole
    assert digest_of_loads(fold(decode_head(head), events, middle)) == whole


def test_it_counts_the_blocks_that_an_instance_holds() -> None:
    events: list[LogEvent] = [
        joined("a"),
        stored("a", 1, [1, 2, 3]),
        stored("a", 2, [4], parent=3),
        removed("a", 3, [4]),
        removed("a", 3, [3]),
    ]
    state, twin = fold(State(PoolSettings(), index=False), events), fold(State(PoolSettings()), events)
    head, _ = encode_parts(twin)

    assert state.index.blocks(InstanceId("a")) == twin.index.blocks(InstanceId("a")) == 3
    assert decode_head(head).index.blocks(InstanceId("a")) == 3
    about: dict[str, Any] = {"at": 0.0, "instance": InstanceId("a"), "epoch": Epoch(1)}
    replaced = CacheSnapshot(**about, sequence=4, runs=[Run(pack_keys([BlockKey(7), BlockKey(8)]))])
    assert fold(state, [replaced]).index.blocks(InstanceId("a")) == 2
    assert fold(state, [CacheCleared(**about, sequence=5)]).index.blocks(InstanceId("a")) == 0


def test_a_report_corrects_the_count_of_blocks_that_were_stored_twice() -> None:
    twice: list[LogEvent] = [joined("a"), stored("a", 1, [1, 2]), stored("a", 2, [1, 2, 3])]
    assert fold(without_index(), twice).index.blocks(InstanceId("a")) == 5
    assert fold(without_index(), [*twice, reported("a", 2, [1, 2, 3])]).index.blocks(InstanceId("a")) == 3
    assert fold(without_index(), [*twice, reported("a", 1, [1, 2])]).index.blocks(InstanceId("a")) == 5, "an old one"


def test_the_head_of_a_checkpoint_is_as_long_whatever_engines_hold() -> None:
    def parts(blocks: int) -> tuple[bytes, bytes]:
        return encode_parts(fold(fresh_state(), [joined("a"), stored("a", 1, list(range(1, blocks + 1)))]))

    (few, _), (many, indexes) = parts(10), parts(10_000)

    assert abs(len(many) - len(few)) < 10
    assert len(indexes) > 80_000
