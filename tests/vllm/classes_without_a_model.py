"""A program for the engine's own Python: random steps of vLLM's cache and scheduler with the plug-in in them, no model.

    python classes_without_a_model.py block_pool|scheduler|other_attention MODEL_DIRECTORY

It asserts after every step and says nothing where all is well. The model's directory is only read for its configuration.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from random import Random
from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pointsman_vllm.block_pool import UnsuitableModelError
from pointsman_vllm.dlpm import DlpmScheduler, SyncDlpmScheduler

BLOCK = 16
SEEDS = range(6)


def main(part: str, model: str) -> None:
    load_general_plugins()
    init_none_hash(sha256)
    if part == "other_attention":
        refuses_sliding_windows()
        return
    for seed in SEEDS:
        if part == "block_pool":
            for removes_at_will in (False, True):
                RandomCache(seed, removes_at_will=removes_at_will).run()
        else:
            RandomEngine(DlpmScheduler, model, seed, asynchronous=True).run()
            RandomEngine(SyncDlpmScheduler, model, seed, asynchronous=False).run()


class Requests:
    """Makes requests that share prefixes, as a walk in a small tree does."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._count = 0

    def make(self, *, output_tokens: int, client: str = "") -> Request:
        self._count += 1
        steps = [self._chance.randrange(3) for _ in range(self._chance.randrange(8))]
        nodes = accumulate(steps, lambda node, step: node * 4 + step + 1, initial=1)
        prompt = [node for node in list(nodes)[1:] for _ in range(BLOCK)]
        prompt += [3] * self._chance.randrange(1, BLOCK)
        parameters = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args={"pointsman_client": client})
        return Request(f"r{self._count}", prompt, parameters, None, block_hasher=self._hasher, arrival_time=time.time())


class RandomCache:
    """vLLM's cache manager; its events are folded and compared with its blocks after every step."""

    def __init__(self, seed: int, *, removes_at_will: bool) -> None:
        """`removes_at_will`: blocks lose their hash whoever holds them, as a KV connector may have it."""
        self._chance = Random(seed)
        self._requests = Requests(self._chance)
        self._removes_at_will = removes_at_will
        self._open: list[Request] = []
        self._copies: Counter[Any] = Counter()
        self._parents: dict[Any, Any] = {}
        self.manager = manager_of(cache_of(40))
        self.pool = self.manager.block_pool
        assert type(self.pool).__name__ == "RandomisedBlockPool"

    def run(self) -> None:
        for _ in range(600):
            self._step()
            self._fold(self.manager.take_events())
            self._compare()

    def _step(self) -> None:
        what = self._chance.random()
        if what < 0.5:
            self._begin()
        elif what < 0.85 and self._open:
            self.manager.free(self._open.pop(self._chance.randrange(len(self._open))))
        elif what < 0.95 and self._open:
            self._generate(self._chance.choice(self._open))
        elif what < 0.97 and self._removes_at_will:
            self.manager.evict_blocks({self._chance.randrange(1, 40) for _ in range(3)})
        elif not self._open:
            assert self.manager.reset_prefix_cache()

    def _begin(self) -> None:
        request = self._requests.make(output_tokens=1)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is not None:
            request.num_computed_tokens = request.num_tokens
            self._open.append(request)

    def _generate(self, request: Request) -> None:
        tokens = [self._chance.randrange(5000) for _ in range(self._chance.randrange(1, 20))]
        if self.manager.allocate_slots(request, len(tokens)) is not None:
            request.append_output_token_ids(tokens)
            request.num_computed_tokens = request.num_tokens
            self.manager.cache_blocks(request, request.num_computed_tokens)

    def _fold(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    self._copies[block] += 1
                    self._parents[block] = parent
                    parent = block
            elif isinstance(event, BlockRemoved):
                self._copies.subtract(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self._copies.clear()

    def _compare(self) -> None:
        hashes = (block.block_hash for block in self.pool.blocks if block.block_hash is not None)
        assert Counter(maybe_convert_block_hash(get_block_hash(key)) for key in hashes) == +self._copies
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == self.pool.get_num_free_blocks()
        assert {b.block_id for b in free} == {b.block_id for b in self.pool.blocks if not b.ref_cnt and not b.is_null}
        if not self._removes_at_will:
            held = +self._copies
            assert all(self._parents[block] is None or self._parents[block] in held for block in held)


class RandomEngine:
    """vLLM's scheduler with too few blocks, so that it preempts; clients come, go and hang up; nobody may be lost."""

    def __init__(self, kind: type, model: str, seed: int, *, asynchronous: bool) -> None:
        self._chance = Random(seed)
        self._requests = Requests(self._chance)
        self.scheduler = self._scheduler(kind, model, asynchronous=asynchronous)
        self.preempted = 0

    def run(self) -> None:
        for step in range(3000):
            if step < 400:
                self._arrive_and_hang_up()
            if step == 300:
                assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
            self._step()
            self._compare()
            if step > 400 and not self.scheduler.has_unfinished_requests():
                break
        assert not self.scheduler.requests
        assert self.preempted

    def _arrive_and_hang_up(self) -> None:
        if self._chance.random() < 0.4:
            output = self._chance.randrange(1, 60)
            self.scheduler.add_request(self._requests.make(output_tokens=output, client=self._chance.choice("abc")))
        if self._chance.random() < 0.05 and self.scheduler.requests:
            gone = self._chance.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)

    def _step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        self.preempted += len(plan.preempted_req_ids or ())
        names = list(plan.num_scheduled_tokens)
        done = [scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens for name in names]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if whole else [] for whole in done],
        )
        scheduler.update_from_output(plan, output)

    def _compare(self) -> None:
        waiting = [request.request_id for request in self.scheduler.waiting]
        running = [request.request_id for request in self.scheduler.running]
        assert len(waiting) == len(self.scheduler.waiting)
        assert Counter(waiting + running) == Counter(list(self.scheduler.requests))
        assert all(self.scheduler.deficits.balance(client) <= 1024 for client in "abc")

    @staticmethod
    def _scheduler(kind: type, model: str, *, asynchronous: bool) -> Any:
        blocks = 30
        arguments = EngineArgs(
            model=model,
            max_model_len=256,
            block_size=BLOCK,
            max_num_seqs=6,
            max_num_batched_tokens=256,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=True,
            async_scheduling=asynchronous,
            enforce_eager=True,
        )
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        return kind(
            vllm_config=config,
            kv_cache_config=cache_of(blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )


def refuses_sliding_windows() -> None:
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=64)
    said = ""
    try:
        manager_of(cache_of(40, window))
    except UnsuitableModelError as error:
        said = str(error)
    assert "Start the engine with POINTSMAN_VLLM_EVICTION=lru" in said


def manager_of(cache: KVCacheConfig) -> KVCacheManager:
    return KVCacheManager(
        kv_cache_config=cache,
        max_model_len=1024,
        max_in_flight_tokens=1024,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_caching=True,
        enable_kv_cache_events=True,
    )


def cache_of(blocks: int, *others: Any) -> KVCacheConfig:
    """A cache of full attention, and of whatever else its layers have."""
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate((full, *others))]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


if __name__ == "__main__":
    main(*sys.argv[1:])
