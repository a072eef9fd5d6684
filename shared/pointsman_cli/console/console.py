"""What every page shows. In: the path and query of a page. Out: its name and view. Nothing here waits: what takes long
(stories, examinations, simulations) is worked out beside, and the view says how far it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman_cli.console.actions import Actions
from pointsman_cli.console.log_views import RequestFilter, history_view, request_view, requests_view, tenants_view
from pointsman_cli.console.observer import Observer
from pointsman_cli.console.source import LogSource
from pointsman_cli.console.views import (
    DoctorView,
    FleetView,
    HistoryView,
    LadderView,
    RequestPageView,
    RequestsView,
    ShadowsView,
    StatusView,
    TenantsView,
    View,
    WhatIfChange,
    WhatIfRun,
    WhatIfView,
)

ID_LENGTH_MAX = 256
NUMBER_MAX = 2**53


class NotThereError(Exception):
    """No such page, or nothing known yet. The message says which."""


@dataclass
class Console:
    source: LogSource
    actions: Actions
    pools: list[str] = field(default_factory=list)

    def status(self) -> StatusView:
        return self.source.status(can_act=self.actions.possible, pools=self.pools)

    def view(self, path: str, query: Mapping[str, str]) -> tuple[str, View]:
        """Raises NotThereError."""
        parts = [part for part in path.split("/") if part]
        match parts:
            case []:
                return "fleet", self.fleet(query)
            case ["requests"]:
                return "requests", self.requests(query)
            case ["requests", request]:
                return "request", self.request(request)
            case ["doctor"]:
                return "doctor", self.doctor()
            case ["history"]:
                return "history", self.history()
            case ["tenants"]:
                return "tenants", self.tenants()
            case ["hit-rate"]:
                return "hit_rate", self.hit_rate()
            case ["shadow"]:
                return "shadow", self.shadow()
            case ["what-if"]:
                return "what_if", self.what_if()
            case ["what-if", number]:
                return "what_if_run", self.what_if_run(number)
            case _:
                msg = "There is no such page."
                raise NotThereError(msg)

    def fleet(self, query: Mapping[str, str]) -> FleetView:
        found = self.source.fleet_at(_number(query, "at", 0))
        if found is None:
            raise _not_read()
        return found

    def requests(self, query: Mapping[str, str]) -> RequestsView:
        return requests_view(self._observer, filter_of(query))

    def request(self, request: str) -> RequestPageView:
        found = self._observer.requests.named(request[:ID_LENGTH_MAX])
        row = request_view(self._observer, found[0]) if len(found) == 1 else None
        return RequestPageView(
            request=row.request if row else request[:ID_LENGTH_MAX], row=row, state="waiting", story=None
        )

    def doctor(self) -> DoctorView:
        return DoctorView(
            state="waiting",
            at=0.0,
            took_seconds=0.0,
            entries=0,
            first_at=0.0,
            last_at=0.0,
            verdict="",
            summary=[],
            findings=[],
        )

    def history(self) -> HistoryView:
        return history_view(self._observer)

    def tenants(self) -> TenantsView:
        return tenants_view(self._observer)

    def hit_rate(self) -> LadderView:
        return LadderView(pool=None, tenants=[], hours=[])

    def shadow(self) -> ShadowsView:
        return ShadowsView(policy=self.status().policy, shadows=[])

    def what_if(self) -> WhatIfView:
        return WhatIfView(
            runs=[],
            policies=sorted(ROUTING_POLICIES),
            orders=sorted(ORDERING_POLICIES),
            admissions=sorted(ADMISSION_POLICIES),
            busy=False,
        )

    def what_if_run(self, number: str) -> WhatIfRun:
        msg = f"There is no run {number[:20]}."
        raise NotThereError(msg)

    def examine(self) -> None: ...

    def start_what_if(self, form: Mapping[str, str]) -> int | str:
        """The number of the run, or why it was not started."""
        _ = form
        return "There are no runs yet."

    def start_change(self, change: WhatIfChange) -> int | str:
        _ = change
        return "There are no runs yet."

    def cancel_what_if(self, number: str) -> None: ...

    @property
    def _observer(self) -> Observer:
        if self.source.observer is None:
            raise _not_read()
        return self.source.observer


def filter_of(query: Mapping[str, str]) -> RequestFilter:
    return RequestFilter(
        tenant=query.get("tenant", "")[:ID_LENGTH_MAX],
        instance=query.get("instance", "")[:ID_LENGTH_MAX],
        stage=query.get("stage", "")[:ID_LENGTH_MAX],
        q=query.get("q", "").strip()[:ID_LENGTH_MAX],
        late=query.get("late", "") not in ("", "0"),
        before=_number(query, "before", 0),
        limit=_number(query, "limit", 100),
    )


def _number(query: Mapping[str, str], name: str, usual: int) -> int:
    text = query.get(name, "")
    return min(int(text), NUMBER_MAX) if text.isascii() and text.isdigit() and len(text) <= 16 else usual


def _not_read() -> NotThereError:
    return NotThereError("Nothing of the log was read yet.")
