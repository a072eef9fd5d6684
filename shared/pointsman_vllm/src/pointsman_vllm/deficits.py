"""Deficit accounts: weighted tokens a client may use before others get their turn. Source: Cao et al., "Locality-aware
Fair Scheduling in LLM Serving", Algorithm 1 (DLPM). Admission charges uncached prompt tokens, generation each token.
When no waiting client has a balance, all without one get a quantum Q, repeatedly until one may go. Bound (Theorem 4.1):
of two backlogged clients neither gets more than 2(U + Q) more service, with U = input weight * longest prompt + output
weight * most output tokens of one client in the engine. Same arithmetic as `pointsman.state.trackers.queue_deficits`.
"""

from collections.abc import Collection

CLIENTS_REMEMBERED_MAX = 1_000
"""Beyond this, clients without waiting requests are forgotten and start as new."""


class Deficits:
    """Balances never exceed `quantum`. A new client has 0 until the next refill."""

    def __init__(self, *, quantum: float, input_weight: float, output_weight: float) -> None:
        self._quantum = quantum
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._balances: dict[str, float] = {}

    def balance(self, client: str) -> float:
        return self._balances.get(client, 0.0)

    def in_turn(self, waiting: Collection[str]) -> list[str]:
        """Waiting clients that may go now, after a refill if needed. Empty only if `waiting` is."""
        rounds = self._rounds_needed(waiting)
        return [client for client in waiting if self.balance(client) + rounds * self._quantum > 0]

    def admit(self, client: str, tokens: int, waiting: Collection[str]) -> None:
        """Charge `tokens` of computation to a client of `waiting`, with the refills that admitted it."""
        rounds = self._rounds_needed(waiting)
        balances = self._balances
        for known in waiting:
            balances.setdefault(known, 0.0)
        if rounds:
            for known, left in balances.items():
                balances[known] = left + min(rounds, self._rounds_to_positive(left)) * self._quantum
        balances[client] = balances.pop(client) - self._input_weight * tokens
        if len(balances) > CLIENTS_REMEMBERED_MAX:
            self._forget_one(waiting)

    def generated(self, client: str, tokens: int) -> None:
        if client in self._balances:
            self._balances[client] -= self._output_weight * tokens

    def _rounds_needed(self, waiting: Collection[str]) -> int:
        return min((self._rounds_to_positive(self.balance(client)) for client in waiting), default=0)

    def _rounds_to_positive(self, balance: float) -> int:
        return 0 if balance > 0 else int(-balance // self._quantum) + 1

    def _forget_one(self, waiting: Collection[str]) -> None:
        stranger = next((known for known in self._balances if known not in waiting), None)
        if stranger is not None:
            del self._balances[stranger]
