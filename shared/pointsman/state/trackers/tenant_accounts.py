"""Accounts of tenants, one account for each instance's line: what fair orderings have in common.

A account knows which tenants wait in its line and one number for each tenant; what the number means, and what happens
to it when a tenant comes to wait and when one of its requests is granted, is up to the subclass. Output is booked
when the answer is whole: nobody knows its length before. What an engine did for an answer that failed or was called
off is charged for its input alone.

A tenant that does not wait may be forgotten once a account has `TENANTS_REMEMBERED_MAX`; it then starts like a new one.
"""

from abc import abstractmethod
from dataclasses import dataclass, field

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId, Seconds, Tenant
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

TENANTS_REMEMBERED_MAX = 1_000


@dataclass(slots=True)
class Account:
    """The tenants of one line. `balances`: the tenant that came to wait longest ago first."""

    balances: dict[Tenant, float] = field(default_factory=dict)
    waiting: dict[Tenant, int] = field(default_factory=dict)
    """How many pending requests each tenant has; those without any are absent."""
    last_granted: Tenant | None = None


class TenantAccounts(Tracker):
    """One account an instance."""

    def __init__(self) -> None:
        self._accounts: dict[InstanceId, Account] = {}

    def balance(self, instance: InstanceId, tenant: Tenant) -> float:
        """The tenant's number in this line, 0 if it has none yet."""
        account = self._accounts.get(instance)
        return account.balances.get(tenant, 0.0) if account else 0.0

    @abstractmethod
    def welcome(self, account: Account, balance: float) -> float:
        """The balance with which a tenant comes to wait that did not; it is not among `account.waiting` yet."""

    @abstractmethod
    def charge_input(self, account: Account, request: Request) -> None:
        """Account a grant; the tenant is among `account.waiting` still."""

    @abstractmethod
    def charge_output(self, account: Account, tenant: Tenant, tokens: int) -> None:
        """Account what was generated for a tenant that has a balance."""

    @override
    def placed(self, request: Request, at: Seconds) -> None:
        account = self._accounts.setdefault(request.instance, Account())
        tenant = request.tenant
        if tenant not in account.waiting:
            account.balances[tenant] = self.welcome(account, account.balances.pop(tenant, 0.0))
        account.waiting[tenant] = account.waiting.get(tenant, 0) + 1
        if len(account.balances) > TENANTS_REMEMBERED_MAX:
            stranger = next((known for known in account.balances if known not in account.waiting), None)
            if stranger is not None:
                del account.balances[stranger]

    @override
    def granted(self, request: Request, at: Seconds) -> None:
        account = self._accounts[request.instance]
        self.charge_input(account, request)
        account.last_granted = request.tenant
        _leave_line(account, request.tenant)

    @override
    def unplaced(self, request: Request, at: Seconds) -> None:
        if request.stage is Stage.PENDING:
            _leave_line(self._accounts[request.instance], request.tenant)

    @override
    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        account = self._accounts.get(request.prefilled_by or request.instance)
        if account is None:
            return
        if request.stage is Stage.PENDING:
            _leave_line(account, request.tenant)
        elif finished and request.tenant in account.balances:
            self.charge_output(account, request.tenant, max(0, finished.completion_tokens))

    @override
    def left(self, instance: InstanceId, at: Seconds) -> None:
        account = self._accounts.get(instance)
        if account and not account.waiting:
            del self._accounts[instance]


def _leave_line(account: Account, tenant: Tenant) -> None:
    left = account.waiting[tenant] - 1
    if left:
        account.waiting[tenant] = left
    else:
        del account.waiting[tenant]
