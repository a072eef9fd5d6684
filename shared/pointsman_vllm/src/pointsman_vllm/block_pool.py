"""vLLM's block pool with randomised leaf token instead of LRU. Only the queue of free blocks is replaced; it receives
what it cannot see itself: blocks that become cached and their parents, blocks that lose their hash, and resets."""

import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from typing_extensions import override
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from pointsman_vllm.free_blocks import RandomisedFreeBlocks
from pointsman_vllm.internals import require, require_nothing_more, warn_of_untested_version
from pointsman_vllm.settings import eviction_settings

logger = logging.getLogger("vllm.pointsman")


class UnsuitableModelError(RuntimeError):
    """The model's cache is not a tree of blocks."""


class RandomisedBlockPool(BlockPool):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        theirs: FreeKVCacheBlockQueue = self.free_block_queue
        free = theirs.get_all_free_blocks()
        for block in free:
            block.prev_free_block = block.next_free_block = None
        seed = eviction_settings(os.environ).seed
        self.free_block_queue: RandomisedFreeBlocks[KVCacheBlock] = RandomisedFreeBlocks(self.blocks, free, seed=seed)

    @override
    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        parent = blocks[num_cached_blocks - 1] if num_cached_blocks else None
        self.free_block_queue.cached(parent, blocks[num_cached_blocks:num_full_blocks])

    @override
    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[Any]:
        removed: list[Any] = super()._remove_cached_block_hashes(block)
        self.free_block_queue.uncached(block)
        return removed

    @override
    def reset_prefix_cache(self) -> bool:
        was_reset: bool = super().reset_prefix_cache()
        if was_reset:
            self.free_block_queue.all_uncached()
        return was_reset


def install() -> None:
    """Idempotent. Raises UnknownInternalsError; engines without full attention then fail to start."""
    if kv_cache_coordinator.BlockPool is RandomisedBlockPool:
        return
    _require_internals()
    kv_cache_coordinator.BlockPool = RandomisedBlockPool
    coordinator = kv_cache_coordinator.KVCacheCoordinator
    coordinator.__init__ = _refusing_other_attention(coordinator.__init__)
    logger.info("prefix cache eviction: randomised leaf token, seed %d", eviction_settings(os.environ).seed)


def _require_internals() -> None:
    part = "randomised eviction"
    require(part, kv_cache_coordinator, {"BlockPool": ["num_gpu_blocks", "enable_caching"], "KVCacheCoordinator": []})
    require(
        part,
        BlockPool,
        {
            "cache_full_blocks": ["request", "blocks", "num_cached_blocks", "num_full_blocks"],
            "_remove_cached_block_hashes": ["block"],
            "reset_prefix_cache": [],
        },
    )
    require_nothing_more(part, FreeKVCacheBlockQueue, RandomisedFreeBlocks)
    warn_of_untested_version()


def _refusing_other_attention(initialise: Callable[..., None]) -> Callable[..., None]:
    @wraps(initialise)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        others = {type(m).__name__ for m in self.single_type_managers if type(m) is not FullAttentionManager}
        if others or len(self.single_type_managers) > 1:
            raise UnsuitableModelError(
                "POINTSMAN_VLLM_EVICTION=rlt is for models with full attention in every layer, whose cache is one tree of "
                f"prefixes; this model has {len(self.single_type_managers)} cache groups, {', '.join(sorted(others)) or 'all full'}. "
                "Start the engine with POINTSMAN_VLLM_EVICTION=lru."
            )

    return checked
