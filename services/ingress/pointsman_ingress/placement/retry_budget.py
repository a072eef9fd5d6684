"""How many requests of a pool may be on a further attempt at once, in this ingress: Envoy's retry budget.

The bound is a share of the requests that are live here, and never less than a minimum. A request takes its place in the
budget when it is to be tried again, keeps it over further attempts, and gives it back with its first output or its end.
Not persisted, not shared with other ingresses: each bounds its own part.
"""

from types import TracebackType
from typing import Self

from pointsman.runtime.telemetry import RETRIES_REFUSED

RETRIES_MIN = 10
"""Requests that may always be retried at once; Envoy's `min_retry_concurrency`."""


class RetryBudget:
    """Of one pool."""

    def __init__(self, share: float) -> None:
        """`share` of live requests, Envoy's `budget_percent`."""
        self._share = share
        self.live = 0
        """Requests that are waiting for a place or are at an engine."""
        self.retrying = 0
        """Those of them that are on a further attempt and have no output yet."""

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
        """Whether it may be tried again: it has its place in the budget, or gets one now."""
        if self._retrying:
            return True
        if self._budget.spent:
            RETRIES_REFUSED.inc()
            return False
        self._retrying = True
        self._budget.retrying += 1
        return True

    def settle(self) -> None:
        """It has been answered, or has ended."""
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
