"""What generators share: their signature, lengths, and a timeline of tasks.

A *task* is what one user starts: a conversation, a tree, the judging of one answer. Tasks begin at random (Poisson) so
that `rate` requests a second come out in the long run; the load builds up first, which is left to the warm-up.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from pointsman.primitives import Seconds, Tokens
from pointsman.simulation.workload.requests import WorkloadRequest, in_order


class Generator(Protocol):
    """Makes `count` requests in arrival order, about `rate` a second, from nothing but `chance`."""

    def __call__(self, count: int, *, rate: float, chance: random.Random) -> list[WorkloadRequest]: ...


def interleaved(
    count: int,
    *,
    tasks_rate: float,
    task: Callable[[int, Seconds], Iterable[WorkloadRequest]],
    chance: random.Random,
) -> list[WorkloadRequest]:
    """The first `count` requests of tasks that begin `tasks_rate` a second; `task` makes the n-th, begun at that moment.

    A task gives at least one request, and none before its beginning. The last tasks may be cut short.
    """
    waiting: list[tuple[Seconds, int, WorkloadRequest]] = []
    chosen: list[WorkloadRequest] = []
    number = made = 0
    start = 0.0
    while len(chosen) < count:
        # No later task can come before `start`.
        while waiting and waiting[0][0] <= start:
            chosen.append(heapq.heappop(waiting)[2])
        number += 1
        for request in task(number, start):
            made += 1
            heapq.heappush(waiting, (request.arrival_s, made, request))
        start += chance.expovariate(tasks_rate)
    return in_order(chosen[:count])


def zipf(ranks: int, exponent: float) -> Sequence[float]:
    """Cumulative weights for `Random.choices`: the n-th is chosen with weight `n ** -exponent`."""
    return list(accumulate(rank**-exponent for rank in range(1, ranks + 1)))


def exponential_length(mean: float, chance: random.Random) -> Tokens:
    """An exponential length with this mean, at least 1."""
    return 1 + int(chance.expovariate(1 / mean))
