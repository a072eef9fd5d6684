"""KV events as vLLM publishes them (Engine... structs), and the reader's output (EngineItem)."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from pointsman.primitives import Seconds, Sequence

BLOCKS_PER_EVENT_MAX = 1_048_576
TOKENS_PER_EVENT_MAX = 16_777_216
HASH_BYTES_MAX = 64
NAME_CHARACTERS_MAX = 1_024

EngineHash = int | bytes
"""The engine's name of a block; meaningful only within this engine."""

_Hash = int | Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES_MAX)]
_Hashes = Annotated[list[_Hash], msgspec.Meta(max_length=BLOCKS_PER_EVENT_MAX)]
_Tokens = Annotated[list[int], msgspec.Meta(max_length=TOKENS_PER_EVENT_MAX)]
_ExtraKeys = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=BLOCKS_PER_EVENT_MAX)]
"""One entry for each block, not decoded: an entry can hold anything. Each keeps the whole payload in memory."""
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class EngineBlockStored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """Consecutive blocks after `parent_block_hash` (None: start of a prompt). Field order is the engine's: older ones
    send arrays. `extra_keys`: per block, what else its hash covers (LoRA name, multimodal identifiers, cache salt).
    `medium`: where the blocks are (GPU, CPU, STORAGE); without tokens, blocks that another store has described."""

    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: _Tokens
    block_size: int
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: _ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: _Name | None = None


class EngineBlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: _Name | None = None
    group_idx: int | None = None
    locality: _Name | None = None


class EngineCacheCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


EngineEvent = EngineBlockStored | EngineBlockRemoved | EngineCacheCleared


class Cursor(msgspec.Struct, frozen=True):
    """The last batch read: its sequence, and a digest of its payload, which identifies the engine."""

    sequence: Sequence
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class EngineAttached:
    """Reading starts. `exact`: everything since the engine's start follows."""

    exact: bool


@dataclass(frozen=True, slots=True)
class EngineResumed:
    """Reading continues after a Cursor's batch: same engine, nothing missed."""


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """A new engine with an empty cache. `exact` as in EngineAttached."""

    exact: bool


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """`undecodable` counts lost events, `unknown` those of other types; `problem` describes the last."""

    sequence: Sequence
    timestamp: Seconds
    events: tuple[EngineEvent, ...]
    undecodable: int = 0
    unknown: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EngineGap:
    """`missed` batches are lost; 0: an unknown number, perhaps none."""

    missed: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineReplayed:
    """`recovered` missed batches were replayed just before this."""

    recovered: int


@dataclass(frozen=True, slots=True)
class EngineNoise:
    reason: str


EngineItem = EngineAttached | EngineResumed | EngineRestarted | EngineBatch | EngineGap | EngineReplayed | EngineNoise
