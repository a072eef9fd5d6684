"""What a template gets beside its view: verdicts, pictures and what is reckoned for the reader. One function a page."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup

from pointsman.analysis.ladder_figures import RUNG_HEADINGS, RUNGS
from pointsman.analysis.ladder_verdict import LITTLE, Loss
from pointsman_cli.console.jobs.views import DoctorView, RequestPageView, WhatIfRun
from pointsman_cli.console.log.recent_requests import STAGES
from pointsman_cli.console.pages import charts, health, shadow_page
from pointsman_cli.console.pages.cells import Level
from pointsman_cli.console.pages.health import Verdict
from pointsman_cli.console.pages.request_page import timeline_page
from pointsman_cli.console.views import (
    FleetView,
    LadderView,
    RequestsView,
    Session,
    StatusView,
    TenantsView,
)
from pointsman_cli.formatting import plural

Query = Mapping[str, str]
Values = dict[str, Any]
MAP_COLUMNS, MAP_MIN = 64, 40
PROBLEMS = {400: "Refused", 401: "Sign in", 403: "Not allowed", 404: "Not found", 409: "Refused", 503: "Busy"}
WANTED_DIGITS_MAX = 6
COMPARED = ("effective capacity", "TTFT P90", "hit rate")


def values_of_page(page: str, view: Any, status: StatusView, session: Session, query: Query) -> Values:
    match page:
        case "fleet":
            return _fleet(view, status, session, query)
        case "requests":
            return _requests(view, query)
        case "request":
            return _request(view)
        case "doctor":
            return _doctor(view)
        case "history":
            return {"history_verdict": health.history_verdict(view), "size_chart": charts.sizes(view.sizes)}
        case "tenants":
            return _tenants(view)
        case "hit_rate":
            return _hit_rate(view)
        case "what_if":
            return {"compared": COMPARED}
        case "what_if_run":
            return _what_if_run(view)
        case "shadow":
            return {
                "shadow_verdict": shadow_page.verdict(view),
                "shadowed": shadow_page.shadowed(view.summary, status.speed),
            }
        case "problem":
            return {"problem_word": PROBLEMS.get(view.status, f"Problem {view.status}")}
        case _:
            return {}


def _fleet(view: FleetView, status: StatusView, session: Session, query: Query) -> Values:
    found = health.attention(view)
    levels = {engine.instance: level for level, engine, _, _ in found if engine.status != "ready"}
    drawn = charts.fleet_map(view.instances, levels, MAP_COLUMNS) if len(view.instances) > MAP_MIN else Markup("")
    return {
        "pool_verdict": health.pool_verdict(view, status),
        "attention": found,
        "fleet_map": drawn,
        "mapped": len(view.instances) > MAP_MIN,
        "act": _act(view, session, query),
        "moment": _moment(view) if query.get("at") else None,
    }


def _moment(view: FleetView) -> dict[str, int]:
    """Entries of the kept moments before and after the one shown; 0: none."""
    before = [moment.sequence for moment in view.moments if moment.sequence < view.sequence]
    after = [moment.sequence for moment in view.moments if moment.sequence > view.sequence]
    return {"before": max(before, default=0), "after": min(after, default=0)}


def _act(view: FleetView, session: Session, query: Query) -> Values | None:
    """The action that was asked for and is to be confirmed."""
    kind, target = query.get("act", ""), query.get("engine", "")
    if not session.acts:
        return None
    if kind == "scale" and target.isdecimal() and len(target) <= WANTED_DIGITS_MAX:
        wanted = int(target)
        text_ = f"{plural(view.totals.ready, 'engine')} ready now. The scaler starts or drains engines until {wanted:,} serve."
        return {"title": f"Scale to {plural(wanted, 'engine')}?", "text": text_, "path": "/actions/scale", "field": "wanted",
                "value": wanted, "button": f"Scale to {wanted:,}"}  # fmt: skip
    engine = next((one for one in view.instances if one.instance == target), None)
    if engine is None or kind not in {"drain", "undrain"}:
        return None
    running = engine.pending + engine.in_prefill + engine.decoding
    said = {
        "drain": f"It gets no new request; its {plural(running, 'request')} end first.",
        "undrain": "It gets requests again.",
    }
    return {"title": f"{kind.capitalize()} {target}?", "text": said[kind], "path": f"/actions/{kind}", "field": "instance",
            "value": target, "button": f"{kind.capitalize()} {target}"}  # fmt: skip


def _requests(view: RequestsView, query: Query) -> Values:
    filtered = any(query.get(name) for name in ("q", "tenant", "instance", "stage", "late", "slowest"))
    slowest = query.get("slowest", "") not in ("", "0")
    return {"requests_verdict": health.requests_verdict(view, slowest), "stages": STAGES, "filtered": filtered}


def _request(view: RequestPageView) -> Values:
    timeline = view.timeline
    return {
        "timeline": timeline_page(timeline) if timeline else None,
        "tenant_path": f"/requests?{urlencode({'tenant': timeline.tenant})}" if timeline else "",
        "api_path": f"/api/requests/{quote(view.request, safe='')}",
    }


def _doctor(view: DoctorView) -> Values:
    severities = {finding.severity for finding in view.findings}
    level: Level = "serious" if "serious" in severities else "warning" if "warning" in severities else "ok"
    if not view.at:
        level = "note"
    sentence = view.verdict or ("Nothing found." if view.at else "The log is being examined.")
    return {"doctor_verdict": Verdict(level, sentence, [], {"ok": "Sound", "note": "Reading"}.get(level, ""))}


def _tenants(view: TenantsView) -> Values:
    if not view.tenants:
        return {"tenants_verdict": Verdict("note", "No tenant has sent a request yet.", [])}
    worst = min(
        (one for one in view.tenants if one.goodput is not None), key=lambda one: one.goodput or 0.0, default=None
    )
    said = plural(len(view.tenants), "tenant")
    if worst is None or worst.goodput is None:
        return {"tenants_verdict": Verdict("ok", f"{said}; no request has ended yet.", [])}
    if worst.goodput >= 1:
        return {"tenants_verdict": Verdict("ok", f"{said}, all requests in time.", [])}
    named = worst.tenant or "requests without a tenant"
    level = health.goodput_level(worst.goodput)
    return {"tenants_verdict": Verdict(level, f"{said}; least well served: {named}, {worst.goodput:.1%} in time.", [])}


def _hit_rate(view: LadderView) -> Values:
    rungs = view.pool.rungs if view.pool else []
    lost = [(rung.lost or 0.0, place) for place, rung in enumerate(rungs)]
    most, place = max(lost, default=(0.0, -1))
    sentence = view.verdict
    if not sentence and rungs and rungs[-1].share is not None and rungs[0].share is not None:
        sentence = f"{rungs[-1].share:.1%} of prompt tokens were cached, of {rungs[0].share:.1%} that could have been."
    little = view.cause == Loss.NOTHING
    level: Level = "warning" if most >= health.HIT_GAP_WARNING else "ok" if little else "note"
    return {
        "ladder_verdict": Verdict(
            level if rungs else "note", sentence or "No request has ended yet.", [], "Good" if little else ""
        ),
        "ladder_worst": place if most >= LITTLE else -1,
        "headings": dict(zip(map(str, RUNGS), RUNG_HEADINGS, strict=True)),
        "hours_chart": charts.hours(view.hours),
    }


def _what_if_run(view: WhatIfRun) -> Values:
    change = view.change
    again = {"policy": change.policy, "order": change.order, "admission": change.admission, "since": change.since,
             "until": change.until, "instances": change.instances or "", "settings": " ".join(change.settings)}  # fmt: skip
    return {
        "run_verdict": run_verdict(view),
        "again_path": f"/what-if?{urlencode({k: v for k, v in again.items() if v})}",
    }


def run_verdict(run: WhatIfRun) -> Verdict:
    name = run.text or "As recorded"
    match run.state:
        case "failed":
            return Verdict("serious", f"{name}: {run.problem}", [], "Failed")
        case "cancelled":
            return Verdict("note", f"{name}: cancelled.", [], "Cancelled")
        case "waiting" | "running":
            return Verdict("note", f"{name}: being simulated.", [], "Running")
        case "done":
            said = [
                f"{row.name} {row.again} → {row.changed} ({row.change})" for row in run.rows if row.name in COMPARED
            ]
            judged = [row.better for row in run.rows if row.name in COMPARED and row.better is not None]
            word = "Same" if not judged else "Better" if all(judged) else "Mixed" if any(judged) else "Worse"
            level: Level = "ok" if word in {"Better", "Same"} else "warning"
            return Verdict(level, f"{name}: {'; '.join(said) or 'no figure changes'}.", [], word)
