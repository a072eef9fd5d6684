"""Cache events: blocks that one engine's KV cache gained and lost. Subject `pm.<pool>.kv.<instance>`, written by its
worker. `sequence` is dense within an epoch and starts at 1. A repeat is a no-op; after a gap the cache is unverified.
Each tier of a cache gains and loses blocks by itself: most engines keep a copy in host memory of what the device holds.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.contracts.block_keys import check_key, check_packed
from pointsman.contracts.envelope import Event
from pointsman.primitives import BlockKey, Count, Epoch, InstanceId, PackedKeys, Sequence, Text


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive blocks of one prefix: `keys` (packed u64) follow `parent`; parent 0 starts a prompt."""

    keys: PackedKeys
    parent: BlockKey = BlockKey(0)

    def __post_init__(self) -> None:
        check_packed(self.keys)
        check_key(self.parent)


SlowerTier = Literal["host", "storage", "external"]
Tier = Literal["device", SlowerTier]
"""Where an engine holds blocks: its accelerator's memory, its host's memory, its own disk, or a store that all engines
of the pool share (Mooncake's, LMCache's remote backend). Blocks of the slower ones are loaded back before use."""

Runs = Annotated[list[Run], Meta(max_length=2**20)]


class CacheEvent(Event, frozen=True, kw_only=True):
    instance: InstanceId
    epoch: Epoch
    sequence: Sequence


class BlocksStored(CacheEvent, frozen=True, kw_only=True):
    runs: Runs
    tier: Tier = "device"


class BlocksRemoved(CacheEvent, frozen=True, kw_only=True):
    """`expired`: the worker dropped them because no event confirmed them in time."""

    keys: PackedKeys
    expired: bool = False
    tier: Tier = "device"

    def __post_init__(self) -> None:
        check_packed(self.keys)


class CacheCleared(CacheEvent, frozen=True, kw_only=True):
    """All tiers of the instance; a shared store keeps its blocks."""


class CacheGap(CacheEvent, frozen=True, kw_only=True):
    """Engine events were lost. `missed` counts batches or events; 0: unknown."""

    missed: Count
    reason: Text


class CacheSnapshot(CacheEvent, frozen=True, kw_only=True):
    """All blocks that the device holds as of `sequence`. Replaces all earlier knowledge of the instance; stores of its
    slower tiers follow."""

    runs: Runs


AnyCacheEvent = BlocksStored | BlocksRemoved | CacheCleared | CacheGap | CacheSnapshot
