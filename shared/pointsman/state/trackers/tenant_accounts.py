"""Balances of tenants for each instance's queue: the base of fair orderings. Subclasses define how a balance changes
when a tenant starts to wait and when a request is granted. Output is charged at the end of a whole answer. Beyond
TENANTS_REMEMBERED_MAX, tenants that do not wait are dropped."""

from abc import abstractmethod
from dataclasses import dataclass, field

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, Tenant
from pointsman.state.best_effort import TENANTS_REMEMBERED_MAX
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage


@dataclass(slots=True)
class Account:
    """`balances`: the tenant that started to wait longest ago first."""

    balances: dict[Tenant, float] = field(default_factory=dict)
    waiting: dict[Tenant, int] = field(default_factory=dict)
    last_granted: Tenant | None = None


class TenantAccounts(Tracker):
    def __init__(self) -> None:
        self._accounts: dict[InstanceId, Account] = {}

    def balance(self, instance: InstanceId, tenant: Tenant) -> float:
        account = self._accounts.get(instance)
        return account.balances.get(tenant, 0.0) if account else 0.0

    @abstractmethod
    def opening_balance(self, account: Account, balance: float) -> float:
        """Of a tenant that starts to wait and is not in `account.waiting` yet."""

    @abstractmethod
    def charge_input(self, account: Account, request: Request) -> None:
        """The tenant is still in `account.waiting`."""

    @abstractmethod
    def charge_output(self, account: Account, tenant: Tenant, tokens: int) -> None: ...

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        account = self._accounts.setdefault(request.instance, Account())
        tenant = request.tenant
        if tenant not in account.waiting:
            account.balances[tenant] = self.opening_balance(account, account.balances.pop(tenant, 0.0))
        account.waiting[tenant] = account.waiting.get(tenant, 0) + 1
        if len(account.balances) > TENANTS_REMEMBERED_MAX:
            idle = next((known for known in account.balances if known not in account.waiting), None)
            if idle is not None:
                del account.balances[idle]

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        account = self._accounts[request.instance]
        self.charge_input(account, request)
        account.last_granted = request.tenant
        _leave_queue(account, request.tenant)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        if request.stage is Stage.PENDING:
            _leave_queue(self._accounts[request.instance], request.tenant)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        account = self._accounts.get(request.prefilled_by or request.instance)
        if account is None:
            return
        if request.stage is Stage.PENDING:
            _leave_queue(account, request.tenant)
        elif finished and request.tenant in account.balances:
            self.charge_output(account, request.tenant, max(0, finished.completion_tokens))

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        account = self._accounts.get(instance)
        if account and not account.waiting:
            del self._accounts[instance]


def _leave_queue(account: Account, tenant: Tenant) -> None:
    left = account.waiting[tenant] - 1
    if left:
        account.waiting[tenant] = left
    else:
        del account.waiting[tenant]
