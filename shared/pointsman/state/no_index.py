"""In place of the prefix index, for who needs only loads and queues: how many blocks each instance holds, as its events
tell, and the hits that leaders recorded with the placements of present requests. No keys, so no prompt has a hit by
itself. A block that is stored twice counts twice until the next snapshot or report."""

from collections.abc import Iterable

from typing_extensions import override

from pointsman.contracts.decisions import Candidate
from pointsman.primitives import BlockKey, InstanceId, RequestId
from pointsman.state.prefix_index import PrefixIndex

RECORDED_MAX = 8
"""Candidates remembered for each request, those with the soonest first token."""


class NoIndex(PrefixIndex):
    def __init__(self, blocks: dict[InstanceId, int] | None = None) -> None:
        self._blocks = blocks if blocks is not None else {}
        self._recorded: dict[RequestId, dict[InstanceId, int]] = {}

    def recorded_hits(self, request: RequestId) -> dict[InstanceId, int]:
        return dict(self._recorded.get(request, ()))

    def record(self, request: RequestId, candidates: list[Candidate]) -> None:
        nearest = sorted(candidates, key=lambda candidate: candidate.predicted_ttft)[:RECORDED_MAX]
        self._recorded[request] = {found.instance: found.hit_blocks for found in nearest if found.hit_blocks}

    def forget(self, request: RequestId) -> None:
        self._recorded.pop(request, None)

    def set_blocks(self, instance: InstanceId, count: int) -> None:
        self._blocks[instance] = count

    def add_blocks(self, instance: InstanceId, count: int) -> None:
        self._blocks[instance] = max(0, self._blocks[instance] + count)

    @override
    def __len__(self) -> int:
        return 0

    @property
    @override
    def instances(self) -> list[InstanceId]:
        return list(self._blocks)

    @override
    def add(self, instance: InstanceId) -> None:
        self._blocks.setdefault(instance, 0)

    @override
    def drop(self, instance: InstanceId) -> None:
        self._blocks.pop(instance, None)

    @override
    def blocks(self, instance: InstanceId) -> int:
        return self._blocks.get(instance, 0)

    @override
    def digest(self, instance: InstanceId) -> int:
        return 0

    @override
    def keys(self, instance: InstanceId) -> frozenset[BlockKey]:
        return frozenset()

    @override
    def holds(self, instance: InstanceId, key: BlockKey) -> bool:
        return False

    @override
    def holders(self, key: BlockKey) -> int:
        return 0

    @override
    def bits(self, instances: Iterable[InstanceId]) -> int:
        return 0

    @override
    def depth(self, instance: InstanceId, keys: list[BlockKey]) -> int:
        return 0

    @override
    def hits(self, keys: list[BlockKey]) -> dict[InstanceId, int]:
        return {}

    @override
    def clear(self, instance: InstanceId) -> None:
        self._blocks[instance] = 0
