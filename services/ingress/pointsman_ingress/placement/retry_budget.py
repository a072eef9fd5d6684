"""Envoy's retry budget: bounds how many requests of a pool, in this ingress, may be on a further attempt at once.

A request takes its place in the budget when it is first retried, keeps it over further attempts, and gives it back with
its first output or its end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pointsman.runtime.telemetry import RETRIES_REFUSED

RETRIES_MIN = 10  # requests that may always be retried at once; Envoy's `min_retry_concurrency`


class RetryBudget:
    def __init__(self, share: float) -> None:
        """`share` of live requests, Envoy's `budget_percent`."""
        self._share = share
        self.live = 0  # requests that wait for a place or are at an engine
        self.retrying = 0  # those of them that are on a further attempt and have no output yet

    @contextmanager
    def open(self) -> "Iterator[RetryTicket]":
        """For one request, from its first attempt to its end."""
        self.live += 1
        ticket = RetryTicket(self)
        try:
            yield ticket
        finally:
            ticket.settle()
            self.live -= 1

    @property
    def spent(self) -> bool:
        return self.retrying >= max(RETRIES_MIN, self._share * self.live)


class RetryTicket:
    """One request's part in the budget."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._retrying = False

    def claim(self) -> bool:
        """Whether it may be retried: it has a place in the budget, or gets one now."""
        if not self._retrying and self._budget.spent:
            RETRIES_REFUSED.inc()
            return False
        self._budget.retrying += not self._retrying
        self._retrying = True
        return True

    def settle(self) -> None:
        """It has output, or has ended."""
        self._budget.retrying -= self._retrying
        self._retrying = False
