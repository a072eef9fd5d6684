"""What every page shows. In: the path and query of a page. Out: its name and view. Nothing here waits: what takes long
(timelines of requests, examinations, simulations) is worked out beside, and the view says how far it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from typing_extensions import TypeIs

from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.policies.setting_text import SettingTextError, parts_of
from pointsman_cli.console.jobs.jobs import Jobs
from pointsman_cli.console.jobs.views import RequestPageView, WhatIfChange, WhatIfRun, WhatIfView
from pointsman_cli.console.log.log_views import (
    RequestFilter,
    history_view,
    ladder_view,
    request_view,
    requests_view,
    tenants_view,
)
from pointsman_cli.console.log.recent_requests import STAGES
from pointsman_cli.console.log.source import LogSource
from pointsman_cli.console.views import (
    ShadowsView,
    StatusView,
    View,
)
from pointsman_cli.console.web.actions import Actions

ID_LENGTH_MAX = 256
ROWS = 50
"""Of requests, if nobody asks for more: under load each is another every second, and a browser draws 50 of them in time."""
NUMBER_MAX = 2**53
DIGITS_MAX = 16
SWITCHES = ("", "0", "1")
INSTANCES_MAX = 1000
SETTINGS_MAX = 32
TEXT_LENGTH_MAX = 256


class NotThereError(Exception):
    """No such page, or nothing known yet. The message says which."""


class BadQueryError(Exception):
    """The message names the parameter."""

    def __init__(self, name: str, expected: str) -> None:
        super().__init__(f"The query parameter {name!r} takes {expected}.")


@dataclass
class PageViews:
    source: LogSource
    actions: Actions
    jobs: Jobs
    pools: list[str] = field(default_factory=list)

    def status(self) -> StatusView:
        return self.source.status(can_act=self.actions.possible, pools=self.pools)

    def view(self, path: str, query: Mapping[str, str]) -> tuple[str, View]:
        """`path`: as in an address, so names in it are quoted. Raises NotThereError, BadQueryError."""
        observer = self.source.observer
        match [unquote(part) for part in path.split("/") if part]:
            case []:
                return "fleet", self.source.fleet_at(_number(query, "at", 0))
            case ["requests"]:
                return "requests", requests_view(observer, filter_of(query))
            case ["requests", request]:
                return "request", self.request(request)
            case ["doctor"]:
                return "doctor", self.jobs.examination()
            case ["history"]:
                return "history", history_view(observer)
            case ["tenants"]:
                return "tenants", tenants_view(observer)
            case ["hit-rate"]:
                return "hit_rate", ladder_view(self.source.ladder)
            case ["shadow"]:
                shadow = self.source.shadow
                return "shadow", ShadowsView(policy=self.status().policy, summary=shadow.summary() if shadow else None)
            case ["what-if"]:
                return "what_if", WhatIfView(
                    runs=self.jobs.runs,
                    policies=sorted(ROUTING_POLICIES),
                    orders=sorted(ORDERING_POLICIES),
                    admissions=sorted(ADMISSION_POLICIES),
                    busy=self.jobs.busy,
                )
            case ["what-if", number]:
                return "what_if_run", self.what_if_run(number)
            case _:
                raise NotThereError("There is no such page.")

    def request(self, request: str) -> RequestPageView:
        text = request[:ID_LENGTH_MAX]
        observer = self.source.observer
        found = observer.requests.named(text)
        known = found[0] if len(found) == 1 else None
        job = self.jobs.timeline(
            known.id if known else text,
            first=known.sequence if known else 0,
            ended=known.ended_sequence if known else 0,
        )
        return RequestPageView(
            request=known.id if known else text,
            row=request_view(observer, known) if known else None,
            state=job.state,
            timeline=job.timeline,
            problem=job.problem,
            absent=job.absent and known is None,
        )

    def what_if_run(self, number: str) -> WhatIfRun:
        found = self.jobs.run(_whole(number))
        if found is None:
            raise NotThereError("There is no such run, or it is no longer kept.")
        return found

    def start_what_if(self, form: Mapping[str, str]) -> int | str:
        """As `start_change`, of a form's fields."""
        instances = form.get("instances", "").strip()
        if instances and not _whole(instances):
            return "The number of instances is no number."
        settings = [text for line in form.get("settings", "").splitlines() if (text := line.strip())]
        change = WhatIfChange(
            policy=form.get("policy", ""),
            settings=settings,
            order=form.get("order", ""),
            admission=form.get("admission", ""),
            instances=_whole(instances) or None,
            since=form.get("since", "").strip(),
            until=form.get("until", "").strip(),
        )
        return self.start_change(change)

    def start_change(self, change: WhatIfChange) -> int | str:
        """The number of the run, or why it was not started."""
        for what, name, known in (
            ("policy", change.policy, ROUTING_POLICIES),
            ("order", change.order, ORDERING_POLICIES),
            ("admission", change.admission, ADMISSION_POLICIES),
        ):
            if name and name not in known:
                return f"There is no {what} of that name."
        if change.instances is not None and not 1 <= change.instances <= INSTANCES_MAX:
            return f"The number of instances is from 1 to {INSTANCES_MAX}."
        if len(change.settings) > SETTINGS_MAX or any(len(text) > TEXT_LENGTH_MAX for text in change.settings):
            return f"At most {SETTINGS_MAX} settings of {TEXT_LENGTH_MAX} characters."
        if len(change.since) > TEXT_LENGTH_MAX or len(change.until) > TEXT_LENGTH_MAX:
            return "That is no moment."
        try:
            text = check(change)
        except SettingTextError as error:
            return str(error)
        if not text:
            return "Choose what is to be different: policy, settings, order, admission or instances."
        started = self.jobs.start(change, text)
        return started if started is not None else "Another run is under way; wait for it or cancel it."

    def cancel_what_if(self, number: str) -> None:
        self.jobs.cancel(_whole(number))


def is_absent(view: View) -> TypeIs[RequestPageView]:
    """Whether it is of a request that the log does not have."""
    return isinstance(view, RequestPageView) and view.absent


def filter_of(query: Mapping[str, str]) -> RequestFilter:
    """Raises BadQueryError."""
    return RequestFilter(
        tenant=query.get("tenant", "")[:ID_LENGTH_MAX],
        instance=query.get("instance", "")[:ID_LENGTH_MAX],
        stage=_stage(query),
        q=query.get("q", "").strip()[:ID_LENGTH_MAX],
        late=_switch(query, "late"),
        slowest=_switch(query, "slowest"),
        before=_number(query, "before", 0),
        limit=_number(query, "limit", ROWS),
    )


def check(change: WhatIfChange) -> str:
    """The change in words; empty if there is none. Raises SettingTextError."""
    for text in change.settings:
        parts_of(text)
    parts = [change.policy, *change.settings]
    parts.append(f"order {change.order}" if change.order else "")
    parts.append(f"admission {change.admission}" if change.admission else "")
    parts.append(f"{change.instances} instances" if change.instances else "")
    return ", ".join(part for part in parts if part)


def _number(query: Mapping[str, str], name: str, usual: int) -> int:
    """Raises BadQueryError."""
    text = query.get(name, "")
    if text and not _is_whole(text):
        raise BadQueryError(name, f"a whole number of at most {DIGITS_MAX} digits")
    return _whole(text) if text else usual


def _switch(query: Mapping[str, str], name: str) -> bool:
    """Raises BadQueryError."""
    text = query.get(name, "")
    if text not in SWITCHES:
        raise BadQueryError(name, "0 or 1")
    return text == "1"


def _whole(text: str) -> int:
    """0 for what is no number."""
    return min(int(text), NUMBER_MAX) if _is_whole(text) else 0


def _stage(query: Mapping[str, str]) -> str:
    """Raises BadQueryError."""
    name = "stage"
    stage = query.get(name, "")
    if stage and stage not in STAGES:
        raise BadQueryError(name, f"one of {', '.join(STAGES)}")
    return stage


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
