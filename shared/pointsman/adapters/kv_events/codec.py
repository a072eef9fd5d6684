"""Decodes one payload of vLLM's KV events (msgpack, maps or arrays) into an EngineBatch. Never raises for bad input."""

from typing import Annotated

import msgspec

from pointsman.adapters.kv_events.events import (
    NAME_CHARACTERS_MAX,
    EngineBatch,
    EngineBlockRemoved,
    EngineBlockStored,
    EngineCacheCleared,
    EngineEvent,
)
from pointsman.primitives import Sequence

PAYLOAD_BYTES_MAX = 16 * 1024 * 1024
"""Of one step: 3 million tokens. Other engines of the process wait while they are decoded; the worker bounds what follows
(`WORK_PER_BATCH_MAX`)."""
EVENTS_PER_BATCH_MAX = 65_536


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_PER_BATCH_MAX)]
    data_parallel_rank: int | None = None


class _BatchAsMap(_Batch, array_like=False):
    pass


class _StoredByPosition(EngineBlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedByPosition(EngineBlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedByPosition(EngineCacheCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _AnyMap(msgspec.Struct):
    """Of an event of any type, the type alone: other fields are skipped, not decoded."""

    type: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class _AnyArray(_AnyMap, array_like=True):
    pass


_batch = msgspec.msgpack.Decoder(_Batch)
_batch_map = msgspec.msgpack.Decoder(_BatchAsMap)
_event_map: msgspec.msgpack.Decoder[EngineEvent] = msgspec.msgpack.Decoder(
    EngineBlockStored | EngineBlockRemoved | EngineCacheCleared
)
_event_array: msgspec.msgpack.Decoder[EngineEvent] = msgspec.msgpack.Decoder(
    _StoredByPosition | _RemovedByPosition | _ClearedByPosition
)
_any_map = msgspec.msgpack.Decoder(_AnyMap)
_any_array = msgspec.msgpack.Decoder(_AnyArray)
_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode_batch(sequence: Sequence, payload: bytes) -> EngineBatch:
    """Events that do not decode are counted in the batch."""
    try:
        if len(payload) > PAYLOAD_BYTES_MAX:
            return EngineBatch(sequence, 0.0, (), undecodable=1, problem=f"{len(payload)} bytes are too many")
        batch = (_batch_map if _is_map(payload) else _batch).decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return EngineBatch(sequence, 0.0, (), undecodable=1, problem=str(error))
    events: list[EngineEvent] = []
    undecodable = unknown = 0
    problem = ""
    for raw in batch.events:
        try:
            events.append((_event_map if _is_map(raw) else _event_array).decode(raw))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            kind = _type_of(raw)
            if kind is None or kind in _KNOWN_TYPES:
                undecodable += 1
                problem = f"{kind}: {error}"
            else:
                unknown += 1
                problem = problem or f"unknown type {kind}"
    return EngineBatch(sequence, batch.ts, tuple(events), undecodable, unknown, problem)


def _is_map(encoded: bytes | msgspec.Raw) -> bool:
    with memoryview(encoded) as view:
        return len(view) > 0 and (0x80 <= view[0] <= 0x8F or view[0] in (0xDE, 0xDF))


def _type_of(raw: msgspec.Raw) -> str | None:
    try:
        return (_any_map if _is_map(raw) else _any_array).decode(raw).type
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
