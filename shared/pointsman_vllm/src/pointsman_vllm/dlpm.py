"""vLLM's scheduler with deficit longest prefix match: `vllm serve MODEL --scheduler-cls
pointsman_vllm.dlpm.DlpmScheduler`. Only the order of admission differs, so outputs do not. Settings:
`FairnessSettings`, from the environment."""

import logging
import os
from bisect import bisect_left
from typing import Any

from typing_extensions import override
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from pointsman_vllm.deficits import Deficits
from pointsman_vllm.internals import require, require_nothing_more, warn_of_untested_version
from pointsman_vllm.settings import FairnessSettings, fairness_settings
from pointsman_vllm.waiting_queue import WaitingQueue, client_of

logger = logging.getLogger("vllm.pointsman")


class SyncDlpmScheduler(Scheduler):
    """For `--no-async-scheduling`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnknownInternalsError, WrongSettingError, and ValueError for priority scheduling."""
        _require_internals()
        super().__init__(*args, **kwargs)
        if self.policy is not SchedulingPolicy.FCFS:
            raise ValueError(
                "DlpmScheduler has an order of its own: start the engine without --scheduling-policy priority"
            )
        settings = fairness_settings(os.environ)
        self.deficits = Deficits(
            quantum=settings.quantum_tokens,
            input_weight=settings.input_weight,
            output_weight=settings.output_weight,
        )
        self.waiting = self._waiting_queue(settings)
        logger.info("waiting requests: deficit longest prefix match, %s", settings)

    @override
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.waiting.begin_step()
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            self.waiting.admitted(self.requests[new.req_id], new.num_computed_tokens)
        self.waiting.end_step()
        return output

    @override
    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, *args, **kwargs)
        self.deficits.generated(client_of(request), len(tokens))
        return tokens, stopped

    def _waiting_queue(self, settings: FairnessSettings) -> WaitingQueue[Request]:
        one_group = len(self.kv_cache_config.kv_cache_groups) == 1 and self.hash_block_size == self.block_size
        return WaitingQueue(
            self.deficits,
            cached_tokens=self._halved_match if one_group else self._exact_match,
            runs=lambda request: request.status == RequestStatus.RUNNING,
            ageing_tokens=settings.ageing_tokens,
        )

    def _halved_match(self, request: Request) -> int:
        """Cached leading tokens, in O(log blocks): the blocks before a cached one are nearly always cached."""
        if request.skip_reading_prefix_cache:
            return 0
        hashes = request.block_hashes
        cached = self.kv_cache_manager.block_pool.get_cached_block
        blocks = bisect_left(range(len(hashes)), 1, key=lambda i: cached(hashes[i], [0]) is None)
        return blocks * int(self.block_size)

    def _exact_match(self, request: Request) -> int:
        tokens: int = self.kv_cache_manager.get_computed_blocks(request)[1]
        return tokens


class DlpmScheduler(SyncDlpmScheduler, AsyncScheduler):
    pass


def _require_internals() -> None:
    part = "the DLPM scheduler"
    require(part, Scheduler, {"schedule": [], "_update_request_with_output": ["request", "new_token_ids"]})
    require(part, KVCacheManager, {"get_computed_blocks": ["request"]})
    require(part, BlockPool, {"get_cached_block": ["block_hash", "kv_cache_group_ids"]})
    require_nothing_more(part, RequestQueue, WaitingQueue)
    warn_of_untested_version()
