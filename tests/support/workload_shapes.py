"""What a workload's requests share, and when they arrive."""

from collections.abc import Sequence

from pointsman.primitives import SessionId
from pointsman.simulation.workload import WorkloadRequest


def arrivals(requests: Sequence[WorkloadRequest]) -> list[float]:
    return [request.arrival_s for request in requests]


def by_session(requests: Sequence[WorkloadRequest]) -> dict[SessionId, list[WorkloadRequest]]:
    sessions: dict[SessionId, list[WorkloadRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return sessions


def common_blocks(first: WorkloadRequest, second: WorkloadRequest) -> int:
    count = 0
    for one, other in zip(first.block_ids, second.block_ids, strict=False):
        if one != other:
            break
        count += 1
    return count
