"""A checkpoint is the State it was taken of, whatever the log was, and whatever comes after."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.runtime.checkpoint_fingerprint import fold_modules
from pointsman.state.checkpoint import UnreadableStateError, decode_state, encode_state, state_digest
from pointsman.state.prefix_index import PrefixIndex
from pointsman.state.state import PoolSettings, State
from tests.support.random_logs import fresh_state, random_log


def fold(state: State, events: list[LogEvent], start: int = 0) -> State:
    for number, event in enumerate(events[start:], start + 1):
        state.apply(event, number)
    return state


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 500), cut=st.floats(0, 1))
def test_a_start_from_a_checkpoint_gives_the_state_of_a_cold_start(seed: int, steps: int, cut: float) -> None:
    events = [decode_event(encode(event)) for event in random_log(seed, steps)]
    middle = round(cut * len(events))
    before = fold(fresh_state(), events[:middle])
    content = encode_state(before)
    restored = decode_state(content)

    assert state_digest(restored) == state_digest(before)
    assert state_digest(fold(restored, events, middle)) == state_digest(fold(fresh_state(), events))


def test_the_random_logs_reach_every_part_of_a_state() -> None:
    state = fold(fresh_state(), random_log(seed=1, steps=3000))

    assert state.index._detached_total or state.index._children
    assert state.promises._promised
    assert state.workload._ended
    assert state.latency.corrections
    assert state.hotness._window
    assert state.promises.unconfirmed
    assert state.term > 1
    empty = fresh_state()
    for memory, untouched in zip(state.trackers, empty.trackers, strict=True):
        assert vars(memory).keys() == vars(untouched).keys()
        assert repr(vars(memory)) != repr(vars(untouched)), type(memory).__name__


def test_the_digest_sees_one_key_one_number_and_one_order() -> None:
    states = (fold(fresh_state(), random_log(seed, steps=300)) for seed in range(100))
    state = next(state for state in states if len(state.workload.requests) > 1 and state.index.instances)
    known = state_digest(state)
    content = encode_state(state)
    one_key, one_number, one_order = decode_state(content), decode_state(content), decode_state(content)
    instance = one_key.index.instances[0]
    one_key.index.store(instance, 0, [424242])  # type: ignore[arg-type,list-item]
    one_number.last_at += 1e-9
    requests = one_order.workload.requests
    first = next(iter(requests))
    requests[first] = requests.pop(first)

    assert len({known, state_digest(one_key), state_digest(one_number), state_digest(one_order)}) == 4


def test_what_is_shared_stays_shared() -> None:
    state = decode_state(encode_state(fold(fresh_state(), random_log(seed=3, steps=300))))

    for request in state.workload.requests.values():
        line = state.workload.queues[request.instance] if request.instance else None
        if line:
            assert any(known.get(request.id) is request for known in (line.pending, line.prefill, line.decoding))


def test_masks_of_many_instances_are_kept() -> None:
    index = PrefixIndex()
    for number in range(100):
        index.add(f"e{number}")  # type: ignore[arg-type]
        index.store(f"e{number}", 0, [1, 2, 3 + number])  # type: ignore[arg-type,list-item]
    index.drop("e7")  # type: ignore[arg-type]
    restored = PrefixIndex.unpack(index.pack())

    assert restored.pack(canonical=True) == index.pack(canonical=True)
    assert restored.hits([1, 2, 53]) == index.hits([1, 2, 53])  # type: ignore[list-item]
    restored.add("e100")  # type: ignore[arg-type]
    index.add("e100")  # type: ignore[arg-type]
    assert restored.pack(canonical=True) == index.pack(canonical=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode({"nodes": [], "indexes": []}),
        msgspec.msgpack.encode({"nodes": [["object", "os:system"]], "indexes": []}),
        msgspec.msgpack.encode({"nodes": [["object", "pointsman.state.fleet:Fleet"]], "indexes": []}),
        msgspec.msgpack.encode({"nodes": [["object", "pointsman.state.workload:Line", [], []]], "indexes": []}),
        encode_state(State(PoolSettings()))[:-3],
    ],
)
def test_what_is_no_state_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableStateError, match=r".+"):
        decode_state(content)


def test_a_checkpoint_is_of_all_the_code_that_the_fold_consists_of() -> None:
    loaded = "import sys, pointsman.state.state; print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('pointsman.')])"
    imported = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.split()

    assert set(imported) <= {str(module) for module in fold_modules()}
