"""What the engine's payloads say, in all the shapes in which engines say it."""

import time
from typing import Any

import msgspec
import pytest

from pointsman.adapters.kv_events.codec import PAYLOAD_BYTES_MAX, decode_batch
from pointsman.adapters.kv_events.events import (
    BLOCKS_PER_EVENT_MAX,
    NAME_CHARACTERS_MAX,
    EngineBatch,
    EngineBlockRemoved,
    EngineBlockStored,
    EngineCacheCleared,
)
from pointsman.adapters.kv_events.sockets import dialled

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "poet",
    "extra_keys": [["poet"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
    "locality": "LOCAL",
}
REMOVED: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [12], "medium": "gpu", "group_idx": 0}
CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def decoded(*events: Any, batch: Any = None) -> EngineBatch:
    return decode_batch(7, msgspec.msgpack.encode(batch if batch is not None else [1.5, list(events), 0]))


@pytest.mark.parametrize("form", [dict, lambda event: list(event.values())], ids=["map", "array"])
def test_both_forms_say_the_same(form: Any) -> None:
    batch = decoded(form(STORED), form(REMOVED), form(CLEARED))

    stored, removed, cleared = batch.events
    assert isinstance(stored, EngineBlockStored)
    assert isinstance(removed, EngineBlockRemoved)
    assert isinstance(cleared, EngineCacheCleared)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([11, 12], 10, [1, 2, 3, 4])
    assert (stored.lora_name, stored.kv_cache_spec_kind) == ("poet", "full_attention")
    assert stored.extra_keys is not None
    assert [msgspec.msgpack.decode(entry) for entry in stored.extra_keys] == [["poet"], None]
    assert (removed.block_hashes, removed.medium) == ([12], "gpu")
    assert (batch.sequence, batch.timestamp, batch.undecodable) == (7, 1.5, 0)


def test_hashes_may_be_bytes() -> None:
    batch = decoded(STORED | {"block_hashes": [b"a" * 32, b"b" * 32], "parent_block_hash": b"r" * 32})

    assert isinstance(batch.events[0], EngineBlockStored)
    assert batch.events[0].block_hashes == [b"a" * 32, b"b" * 32]


def test_trailing_fields_may_be_missing_and_new_ones_may_follow() -> None:
    oldest = ["BlockStored", [1], None, [5, 6], 2, None]
    newest = [*STORED.values(), "owner", "session", {"more": 1}]
    batch = decoded(oldest, newest, STORED | {"session_id": "s", "shape": [1]}, ["BlockRemoved", [1]], batch=None)

    assert [type(event).__struct_config__.tag for event in batch.events] == [
        "BlockStored",
        "BlockStored",
        "BlockStored",
        "BlockRemoved",
    ]


def test_the_batch_itself_may_be_a_map_or_have_no_rank() -> None:
    as_map = decoded(batch={"ts": 1.0, "events": [CLEARED], "data_parallel_rank": 3, "new": 1})
    short = decoded(batch=[1, [CLEARED]])

    assert len(as_map.events) == len(short.events) == 1


def test_an_unknown_type_is_counted_and_spares_the_others() -> None:
    batch = decoded({"type": "BlockPromoted", "to": "heaven"}, ["BlockPinned", 1], CLEARED)

    assert len(batch.events) == 1
    assert (batch.unknown, batch.undecodable) == (2, 0)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored"},
        STORED | {"token_ids": ["a"]},
        STORED | {"block_hashes": 5},
        {"no": "type"},
        ["BlockRemoved"],
        [],
        17,
        None,
        STORED | {"lora_name": "a" * (NAME_CHARACTERS_MAX + 1)},
        REMOVED | {"medium": "a" * (NAME_CHARACTERS_MAX + 1)},
        {"type": "a" * (NAME_CHARACTERS_MAX + 1)},
    ],
)
def test_a_broken_event_is_counted_and_spares_the_others(event: Any) -> None:
    batch = decoded(event, CLEARED)

    assert len(batch.events) == 1
    assert batch.undecodable == 1
    assert batch.problem


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", b"not msgpack", b"\x91" * 5_000, b"\x80", b"\x90"])
def test_a_broken_payload_is_counted_not_raised(payload: bytes) -> None:
    batch = decode_batch(3, payload)

    assert (batch.sequence, batch.events, batch.undecodable) == (3, (), 1)


EMPTY_LISTS = b"\x90" * (PAYLOAD_BYTES_MAX - 1024)
FILL = b"\xdd" + len(EMPTY_LISTS).to_bytes(4, "big") + EMPTY_LISTS
"""A list of as many empty lists as a payload can hold."""


def with_fill(event: Any) -> bytes:
    """A payload with this event, in which FILL stands for the text FILL."""
    return msgspec.msgpack.encode([1.0, [event], 0]).replace(msgspec.msgpack.encode("FILL"), FILL)


@pytest.mark.parametrize(
    "event",
    [
        STORED | {"extra_keys": "FILL"},
        STORED | {"extra_keys": ["FILL", None]},
        STORED | {"extra_keys": [["FILL"], None]},
        [*[*STORED.values()][:8], "FILL"],
        STORED | {"session_id": "FILL"},
        ["BlockPinned", "FILL"],
        {"type": "BlockPinned", "to": "FILL"},
        {"to": "FILL", "type": "BlockPinned"},
    ],
    ids=["blocks", "block", "value", "by position", "new field", "unknown array", "unknown map", "unknown, type last"],
)
def test_a_payload_of_empty_lists_is_not_built(event: Any) -> None:
    """Some 0.1 s; 16 million lists take 5 to 10 s and a gigabyte."""
    payload = with_fill(event)
    assert len(payload) <= PAYLOAD_BYTES_MAX
    began = time.process_time()
    decode_batch(1, payload)

    assert time.process_time() - began < 1.5


def test_extra_keys_of_more_blocks_than_an_event_may_have_spoil_it() -> None:
    fits = decoded(STORED | {"extra_keys": [None] * BLOCKS_PER_EVENT_MAX})
    large = decoded(STORED | {"extra_keys": [None] * (BLOCKS_PER_EVENT_MAX + 1)})

    assert (fits.undecodable, large.undecodable) == (0, 1)


def test_an_endpoint_copied_from_the_engine_can_be_dialled() -> None:
    assert dialled("tcp://*:5557") == "tcp://127.0.0.1:5557"
    assert dialled("ipc:///run/kv") == "ipc:///run/kv"
