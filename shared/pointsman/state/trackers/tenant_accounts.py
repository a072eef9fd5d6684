"""Accounts of tenants, one book for each instance's line: what fair orderings have in common.

A book knows which tenants wait in its line and one number for each tenant; what the number means, and what happens
to it when a tenant comes to wait and when one of its requests is granted, is up to the subclass. Output is booked
when the answer is whole: nobody knows its length before. What an engine did for an answer that failed or was called
off is charged for its input alone.

A tenant that does not wait may be forgotten once a book has `TENANTS_REMEMBERED_MAX`; it then starts like a new one.
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
class Book:
    """The tenants of one line. `balances`: the tenant that came to wait longest ago first."""

    balances: dict[Tenant, float] = field(default_factory=dict)
    waiting: dict[Tenant, int] = field(default_factory=dict)
    """How many pending requests each tenant has; those without any are absent."""
    last_granted: Tenant | None = None


class TenantAccounts(Tracker):
    """One book an instance."""

    def __init__(self) -> None:
        self._books: dict[InstanceId, Book] = {}

    def balance(self, instance: InstanceId, tenant: Tenant) -> float:
        """The tenant's number in this line, 0 if it has none yet."""
        book = self._books.get(instance)
        return book.balances.get(tenant, 0.0) if book else 0.0

    @abstractmethod
    def welcome(self, book: Book, balance: float) -> float:
        """The balance with which a tenant comes to wait that did not; it is not among `book.waiting` yet."""

    @abstractmethod
    def charge_input(self, book: Book, request: Request) -> None:
        """Book a grant; the tenant is among `book.waiting` still."""

    @abstractmethod
    def charge_output(self, book: Book, tenant: Tenant, tokens: int) -> None:
        """Book what was generated for a tenant that has a balance."""

    @override
    def placed(self, request: Request, at: Seconds) -> None:
        book = self._books.setdefault(request.instance, Book())
        tenant = request.tenant
        if tenant not in book.waiting:
            book.balances[tenant] = self.welcome(book, book.balances.pop(tenant, 0.0))
        book.waiting[tenant] = book.waiting.get(tenant, 0) + 1
        if len(book.balances) > TENANTS_REMEMBERED_MAX:
            stranger = next((known for known in book.balances if known not in book.waiting), None)
            if stranger is not None:
                del book.balances[stranger]

    @override
    def granted(self, request: Request, at: Seconds) -> None:
        book = self._books[request.instance]
        self.charge_input(book, request)
        book.last_granted = request.tenant
        _leave_line(book, request.tenant)

    @override
    def unplaced(self, request: Request, at: Seconds) -> None:
        if request.stage is Stage.PENDING:
            _leave_line(self._books[request.instance], request.tenant)

    @override
    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        book = self._books.get(request.prefilled_by or request.instance)
        if book is None:
            return
        if request.stage is Stage.PENDING:
            _leave_line(book, request.tenant)
        elif finished and request.tenant in book.balances:
            self.charge_output(book, request.tenant, max(0, finished.completion_tokens))

    @override
    def left(self, instance: InstanceId, at: Seconds) -> None:
        book = self._books.get(instance)
        if book and not book.waiting:
            del self._books[instance]


def _leave_line(book: Book, tenant: Tenant) -> None:
    left = book.waiting[tenant] - 1
    if left:
        book.waiting[tenant] = left
    else:
        del book.waiting[tenant]
