"""Common parts of generators: signature, lengths, and a timeline of tasks. A *task* is started by one user: a
conversation, a tree, a judgement. Tasks begin at random (Poisson) so that `rate` requests a second result in the long
run; the warm-up covers the start."""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation.workload.requests import WorkloadRequest, in_order


class Generator(Protocol):
    """`count` requests in arrival order, about `rate` a second, from nothing but `chance`."""

    def __call__(self, count: int, *, rate: float, chance: random.Random) -> list[WorkloadRequest]: ...


def interleaved(
    count: int,
    *,
    tasks_rate: float,
    task: Callable[[int, EngineSeconds], Iterable[WorkloadRequest]],
    chance: random.Random,
) -> list[WorkloadRequest]:
    """The first `count` requests of tasks that begin `tasks_rate` a second; `task` makes the n-th. A task has at least
    one request, and none before its beginning."""
    waiting: list[tuple[EngineSeconds, int, WorkloadRequest]] = []
    chosen: list[WorkloadRequest] = []
    number = made = 0
    start = 0.0
    while len(chosen) < count:
        while waiting and waiting[0][0] <= start:
            chosen.append(heapq.heappop(waiting)[2])
        number += 1
        for request in task(number, start):
            made += 1
            heapq.heappush(waiting, (request.arrival_s, made, request))
        start += chance.expovariate(tasks_rate)
    return in_order(chosen[:count])


def zipf(ranks: int, exponent: float) -> Sequence[float]:
    """Cumulative weights for `Random.choices`: `n ** -exponent` for the n-th."""
    return list(accumulate(rank**-exponent for rank in range(1, ranks + 1)))


def exponential_length(mean: float, chance: random.Random) -> Tokens:
    return 1 + int(chance.expovariate(1 / mean))
