"""Weighted tokens that each tenant may still use of each instance: DLPM (Cao et al., "Locality-aware Fair Scheduling in
LLM Serving", Algorithm 1). A grant charges uncached tokens, an end generated ones. When no waiting tenant has a
balance, all get quanta until one has; `in_turn` previews that refill, the grant books it."""

from collections.abc import Collection

from typing_extensions import override

from pointsman.primitives import InstanceId, Tenant
from pointsman.state.trackers.tenant_accounts import Account, TenantAccounts
from pointsman.state.workload import Request


class QueueDeficits(TenantAccounts):
    """Balances never exceed `quantum`. `forgives`: who starts to wait has a balance of 0, whatever it was (line 12)."""

    def __init__(self, *, quantum: float, input_weight: float, output_weight: float, forgives: bool = False) -> None:
        super().__init__()
        self._forgives = forgives
        self._quantum = quantum
        self._input_weight = input_weight
        self._output_weight = output_weight

    def in_turn(self, instance: InstanceId, waiting: Collection[Tenant]) -> frozenset[Tenant]:
        """The waiting tenants with a balance, after a refill if needed."""
        balances = {tenant: self.balance(instance, tenant) for tenant in waiting}
        rounds = self._rounds_needed(balances)
        return frozenset(tenant for tenant, left in balances.items() if left + rounds * self._quantum > 0)

    @override
    def opening_balance(self, account: Account, balance: float) -> float:
        return 0.0 if self._forgives else balance

    @override
    def charge_input(self, account: Account, request: Request) -> None:
        rounds = self._rounds_needed({tenant: account.balances[tenant] for tenant in account.waiting})
        if rounds:
            for tenant, left in account.balances.items():
                account.balances[tenant] = left + min(rounds, self._rounds_to_positive(left)) * self._quantum
        account.balances[request.tenant] -= self._input_weight * request.uncached_tokens

    @override
    def charge_output(self, account: Account, tenant: Tenant, tokens: int) -> None:
        account.balances[tenant] -= self._output_weight * tokens

    def _rounds_needed(self, balances: dict[Tenant, float]) -> int:
        return min((self._rounds_to_positive(left) for left in balances.values()), default=0)

    def _rounds_to_positive(self, balance: float) -> int:
        return 0 if balance > 0 else int(-balance // self._quantum) + 1
