"""Envoy's retry budget, per pool and ingress. A request holds its place from its first retry to its output or end."""

from collections.abc import Iterator
from contextlib import contextmanager

from pointsman.runtime.telemetry import RETRIES_REFUSED

RETRIES_MIN = 10  # Envoy's `min_retry_concurrency`


class RetryBudget:
    def __init__(self, share: float) -> None:
        """`share` of live requests; Envoy's `budget_percent`."""
        self._share = share
        self.live = 0  # queued or at an engine
        self.retrying = 0  # of them, on a retry without output yet

    @contextmanager
    def open(self) -> "Iterator[RetryTicket]":
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
    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._retrying = False

    def claim(self) -> bool:
        if not self._retrying and self._budget.spent:
            RETRIES_REFUSED.inc()
            return False
        self._budget.retrying += not self._retrying
        self._retrying = True
        return True

    def settle(self) -> None:
        """Call at the first output or the end."""
        self._budget.retrying -= self._retrying
        self._retrying = False
