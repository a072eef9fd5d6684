"""A checkpoint is the State it was taken of, whatever the log was, and whatever comes after."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.policy_set import policy_set
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.primitives import InstanceId, SessionId, Tenant
from pointsman.runtime.checkpoint_fingerprint import checkpoint_form, fold_version
from pointsman.state import checkpoint_additions
from pointsman.state.checkpoint import UnreadableStateError, decode_state, encode_state, state_digest
from pointsman.state.prefix_index import PrefixIndex
from pointsman.state.session_affinity import REMEMBERED_MAX
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from tests.support.examples import examples
from tests.support.recorded_log import fresh_state, random_log


def fold(state: State, events: list[LogEvent], start: int = 0) -> State:
    for number, event in enumerate(events[start:], start + 1):
        state.apply(event, number)
    return state


@examples(80)
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
    state = fold(fresh_state(), random_log(seed=2, steps=3000))

    assert any(holding.detached for holding in state.index._holdings.values())
    assert len(state.index)
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
    state = decode_state(encode_state(fold(fresh_state(), random_log(seed=3, steps=120))))
    placed = [request for request in state.workload.requests.values() if request.instance]

    assert placed
    for request in placed:
        line = state.workload.queues[request.instance]
        assert any(known.get(request.id) is request for known in (line.pending, line.prefill, line.decoding))


def test_an_index_of_many_instances_is_kept() -> None:
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


def without(content: bytes, kind: str, attribute: str) -> bytes:
    """The checkpoint as a release wrote it whose `kind` had no such attribute yet."""
    graph = msgspec.msgpack.decode(content)
    for node in graph["nodes"]:
        name, slots, names = (*node[1:], *([], [], [])[len(node) - 1 :])[:3]
        if str(name).endswith(f":{kind}"):
            at = names.index(attribute)
            del names[at], slots[at]
    return msgspec.msgpack.encode(graph)


def test_as_many_conversations_as_are_remembered_are_restored_however_short_their_names_are() -> None:
    state = State(PoolSettings())
    for number in range(REMEMBERED_MAX):
        state.session_affinity.placed(Tenant(""), SessionId(str(number)), [], InstanceId("a"))

    restored = decode_state(encode_state(state))

    assert restored.session_affinity.last_instance(Tenant(""), SessionId("7"), []) == "a"


def test_a_few_bytes_do_not_become_many_objects() -> None:
    for nodes in (b"\xdc\x03\xe8" + b"\x91\xa3set" * 1000, b"\xdd\x00\x10\x00\x01" + b"\x91\xa3set" * (2**20 + 1)):
        with pytest.raises(UnreadableStateError, match=r"nodes are too many|length <= 1048576"):
            decode_state(b"\x81\xa5nodes" + nodes)


@pytest.mark.parametrize(
    "node",
    [
        ["object", "pointsman.state.checkpoint:OrderedDict"],
        ["enum", "pointsman.state.fleet:StrEnum", ["Made", "UP"]],
        ["enum", "pointsman.state.fleet:Fleet"],
    ],
)
def test_only_classes_of_its_own_are_made_and_none_is_called(node: list[Any]) -> None:
    content = msgspec.msgpack.decode(encode_state(fresh_state()))
    content["nodes"].append(node)

    with pytest.raises(UnreadableStateError, match="there is no class"):
        decode_state(msgspec.msgpack.encode(content))


def test_an_index_is_unpacked_once() -> None:
    state = fresh_state()
    content = msgspec.msgpack.decode(encode_state(state))
    content["nodes"] += [["index", "", [0]]] * 2

    with pytest.raises(UnreadableStateError, match="the same index"):
        decode_state(msgspec.msgpack.encode(content))


def test_an_attribute_that_is_new_is_a_fields_default_or_follows_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fold(fresh_state(), random_log(seed=1, steps=300))
    content = encode_state(state)
    defaulted = decode_state(without(content, "Instance", "draining"))
    with pytest.raises(UnreadableStateError, match="State has an attribute placements now"):
        decode_state(without(content, "State", "placements"))
    monkeypatch.setitem(checkpoint_additions.ADDITIONS, "State.placements", lambda state, _: len(state.fleet.instances))
    derived = decode_state(without(content, "State", "placements"))

    assert not any(instance.draining for instance in defaulted.fleet.instances)
    assert derived.placements == len(state.fleet.instances) > 0


def test_an_attribute_that_is_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fold(fresh_state(), random_log(seed=1, steps=300))
    state.abolished = [1, 2]  # type: ignore[attr-defined]

    restored = decode_state(encode_state(state))

    assert not hasattr(restored, "abolished")
    del state.abolished  # type: ignore[attr-defined]
    assert state_digest(restored) == state_digest(state)


def test_a_checkpoints_form_names_the_fold_version_and_every_setting_that_the_fold_depends_on() -> None:
    chosen = [
        *(policy_set(routing=name) for name in ROUTING_POLICIES),
        *(policy_set(ordering=name) for name in ORDERING_POLICIES),
        *(policy_set(admission=name) for name in ADMISSION_POLICIES),
        policy_set(routing="d2lpm", settings={"quantum_tokens": 99.0}),
        policy_set(settings={"order.late_share": 0.2}),
    ]
    empty = [
        State(PoolSettings(block_tokens=tokens), policies.trackers()) for policies in chosen for tokens in (16, 64)
    ]
    forms = {encode_state(state): checkpoint_form(state) for state in empty}

    assert len(set(forms.values())) == len(forms)
    assert {fold_version(form) for form in forms.values()} == {FOLD_VERSION}
    assert fold_version("0123456789abcdef0123456789abcdef") is None
