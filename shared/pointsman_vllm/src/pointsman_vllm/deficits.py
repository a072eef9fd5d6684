"""How many weighted tokens each client may still use before others must have their turn.

Source: Cao et al., "Locality-aware Fair Scheduling in LLM Serving", Algorithm 1 (DLPM). Admission charges the prompt
tokens that must be computed, every generated token is charged as it comes. When nobody who waits has anything left,
every client without gets another quantum Q, as often as it takes until one who waits may go. Bound (Theorem 5.1): of two
clients that both wait all the time, neither gets more than 2(U + Q) more service than the other, U = input weight *
most tokens of a prompt + output weight * most output tokens that one client has inside the engine at a time.

It is the arithmetic of Pointsman's own `dlpm` (`state/trackers/queue_deficits.py`) with none of what surrounds it there: no
log, no instances, output charged at once since an engine sees each token.
"""

from collections.abc import Collection

CLIENTS_REMEMBERED_MAX = 1_000
"""A client that does not wait may be forgotten beyond this; it then starts like a new one."""


class Deficits:
    """Balances never exceed `quantum`. A client that is new has 0: its turn comes with the next refill."""

    def __init__(self, *, quantum: float, input_weight: float, output_weight: float) -> None:
        self._quantum = quantum
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._balances: dict[str, float] = {}

    def balance(self, client: str) -> float:
        return self._balances.get(client, 0.0)

    def in_turn(self, waiting: Collection[str]) -> list[str]:
        """Those of the waiting clients who may go now, as if a refill that it takes had happened. Never empty for some."""
        rounds = self._rounds_needed(waiting)
        return [client for client in waiting if self.balance(client) + rounds * self._quantum > 0]

    def admit(self, client: str, tokens: int, waiting: Collection[str]) -> None:
        """The client, one of `waiting`, has `tokens` computed. Books the refill that let it go."""
        rounds = self._rounds_needed(waiting)
        balances = self._balances
        for known in waiting:
            balances.setdefault(known, 0.0)
        if rounds:
            for known, left in balances.items():
                balances[known] = left + min(rounds, self._rounds_to_positive(left)) * self._quantum
        balances[client] = balances.pop(client) - self._input_weight * tokens
        if len(balances) > CLIENTS_REMEMBERED_MAX:
            self._forget_somebody(waiting)

    def generated(self, client: str, tokens: int) -> None:
        """Output for a client; nothing for one that is forgotten."""
        if client in self._balances:
            self._balances[client] -= self._output_weight * tokens

    def _rounds_needed(self, waiting: Collection[str]) -> int:
        return min((self._rounds_to_positive(self.balance(client)) for client in waiting), default=0)

    def _rounds_to_positive(self, balance: float) -> int:
        return 0 if balance > 0 else int(-balance // self._quantum) + 1

    def _forget_somebody(self, waiting: Collection[str]) -> None:
        stranger = next((known for known in self._balances if known not in waiting), None)
        if stranger is not None:
            del self._balances[stranger]
