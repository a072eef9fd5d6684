"""Ordering: which of an instance's waiting requests is granted next.

An ordering picks from the pending line; it never skips a request for ever unless its docstring says so.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from typing_extensions import override

from pointsman.primitives import Seconds
from pointsman.state.workload import Line, Request


class OrderingPolicy(ABC):
    name: ClassVar[str]

    @abstractmethod
    def first(self, line: Line, now: Seconds) -> Request:
        """The pending request to grant next; the line has at least one."""


class FirstComeFirstServed(OrderingPolicy):
    """In the order of placement. Bias: one long prompt delays all behind it."""

    name: ClassVar[str] = "fcfs"

    @override
    def first(self, line: Line, now: Seconds) -> Request:
        return next(iter(line.pending.values()))


class EarliestDeadlineFirst(OrderingPolicy):
    """By arrival plus TTFT objective (Liu and Layland 1973). Optimal while all can be met; past that it spends
    itself on requests that are late already. Equal deadlines keep their order."""

    name: ClassVar[str] = "edf"

    @override
    def first(self, line: Line, now: Seconds) -> Request:
        return min(line.pending.values(), key=lambda request: request.deadline)


ORDERING_POLICIES: dict[str, type[OrderingPolicy]] = {
    policy.name: policy for policy in (FirstComeFirstServed, EarliestDeadlineFirst)
}
DEFAULT_ORDERING = FirstComeFirstServed.name
