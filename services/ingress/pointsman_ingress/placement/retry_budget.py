"""Envoy's retry budget: bounds how many requests of a pool, in this ingress, may be on a further attempt at once.

A request takes its place in the budget when it is first retried, keeps it over further attempts, and gives it back with
its first output or its end.
"""

from types import TracebackType
from typing import Self

from pointsman.runtime.telemetry import RETRIES_REFUSED

RETRIES_MIN = 10  # requests that may always be retried at once; Envoy's `min_retry_concurrency`


class RetryBudget:
    def __init__(self, share: float) -> None:
        """`share` of live requests, Envoy's `budget_percent`."""
        self._share = share
        self.live = 0  # requests that wait for a place or are at an engine
        self.retrying = 0  # those of them that are on a further attempt and have no output yet

    def open(self) -> "RetryTicket":
        """For one request, from its first attempt to its end."""
        return RetryTicket(self)

    @property
    def spent(self) -> bool:
        return self.retrying >= max(RETRIES_MIN, self._share * self.live)


class RetryTicket:
    """One request's part in the budget; live while its context is open."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._retrying = False

    def claim(self) -> bool:
        """Whether it may be retried: it has a place in the budget, or gets one now."""
        if self._retrying:
            return True
        if self._budget.spent:
            RETRIES_REFUSED.inc()
            return False
        self._retrying = True
        self._budget.retrying += 1
        return True

    def settle(self) -> None:
        """It has output, or has ended."""
        if self._retrying:
            self._retrying = False
            self._budget.retrying -= 1

    def __enter__(self) -> Self:
        self._budget.live += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.settle()
        self._budget.live -= 1
