"""Weighted tokens of service by tenant and instance: the counters of VTC (Sheng et al., OSDI'24, Algorithm 2). A tenant
that starts to wait is lifted to the least counter of the waiting tenants, or to that of the tenant granted last.
Counters never fall."""

from collections.abc import Iterable

from typing_extensions import override

from pointsman.primitives import InstanceId, Tenant
from pointsman.state.trackers.tenant_accounts import Account, TenantAccounts
from pointsman.state.workload import Request


class ClientService(TenantAccounts):
    """`cached_weight`: cost of a cached prompt token relative to an uncached one."""

    def __init__(self, *, input_weight: float, cached_weight: float, output_weight: float) -> None:
        super().__init__()
        self._input_weight = input_weight
        self._cached_weight = cached_weight
        self._output_weight = output_weight

    def services(self, instance: InstanceId, tenants: Iterable[Tenant]) -> dict[Tenant, float]:
        return {tenant: self.balance(instance, tenant) for tenant in tenants}

    @override
    def opening_balance(self, account: Account, balance: float) -> float:
        if account.waiting:
            return max(balance, min(account.balances[tenant] for tenant in account.waiting))
        if account.last_granted is not None:
            return max(balance, account.balances.get(account.last_granted, 0.0))
        return balance

    @override
    def charge_input(self, account: Account, request: Request) -> None:
        cached = request.prompt_tokens - request.uncached_tokens
        tokens = request.uncached_tokens + self._cached_weight * cached
        account.balances[request.tenant] += self._input_weight * tokens

    @override
    def charge_output(self, account: Account, tenant: Tenant, tokens: int) -> None:
        account.balances[tenant] += self._output_weight * tokens
