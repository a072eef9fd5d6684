"""vLLM's CPU offloading on an engine without an accelerator. Everything is vLLM's own (the connector, what it stores and
evicts, its KV events) but the copies: CPUOffloadingSpec refuses a CPU engine, whose copies need no device. Loaded by
vLLM through `spec_module_path` of the connector's extra config, in the engine's processes."""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostMemorySpec(CPUOffloadingSpec):  # type: ignore[misc]
    _worker: "CopyingWorker | None"

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = CopyingWorker(kv_caches, self.num_chunks)
        return self._worker


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """One attention group, and chunks of one block."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        assert len(kv_caches.group_data_refs) == 1
        self._device = [cache.tensor for cache in kv_caches.tensors]
        self._host = [torch.empty((chunks, tensor.shape[1]), dtype=torch.int8) for tensor in self._device]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _copy(self, job_id: int, sources: list[Any], src_spec: Any, targets: list[Any], dst_spec: Any) -> bool:
        began = time.perf_counter()
        src = torch.as_tensor(src_spec.block_ids, dtype=torch.long)
        dst = torch.as_tensor(dst_spec.block_ids, dtype=torch.long)
        for source, target in zip(sources, targets, strict=True):
            target[dst] = source[src]
        size = sum(source.shape[1] for source in sources) * len(src)
        self._finished.append(TransferResult(job_id, True, size, time.perf_counter() - began))
        return True
