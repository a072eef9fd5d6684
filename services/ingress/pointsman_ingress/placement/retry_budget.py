"""Envoy's retry budget, per pool and ingress. A request holds its place from its first retry to its output or end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pointsman.runtime.telemetry import REQUEST_RETRIES_REFUSED

RETRIES_MIN = 10  # Envoy's `min_retry_concurrency`


class RetryBudget:
    def __init__(self, share: float, pool: str) -> None:
        """`share` of live requests; Envoy's `budget_percent`."""
        self.share = share
        self.pool = pool
        self.live = 0
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


@dataclass(eq=False)
class RetryTicket:
    budget: RetryBudget
    _retrying: bool = field(default=False, init=False)

    def claim(self) -> bool:
        retries_max = max(RETRIES_MIN, self.budget.share * self.budget.live)
        if not self._retrying and self.budget.retrying >= retries_max:
            REQUEST_RETRIES_REFUSED.labels(self.budget.pool).inc()
            return False
        self.budget.retrying += not self._retrying
        self._retrying = True
        return True

    def settle(self) -> None:
        """Call at the first output or the end."""
        self.budget.retrying -= self._retrying
        self._retrying = False
