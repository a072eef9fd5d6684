"""What a template gets beside its view: verdicts, pictures and what is reckoned for the reader. One function a page."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup

from pointsman_cli.console import charts, health
from pointsman_cli.console.cells import NOTHING, Level, count, plural, signed, text
from pointsman_cli.console.health import Verdict
from pointsman_cli.console.story import story
from pointsman_cli.console.views import (
    DoctorView,
    FleetView,
    HistoryView,
    LadderView,
    RequestPageView,
    RequestsView,
    Session,
    ShadowsView,
    ShadowView,
    StatusView,
    TenantsView,
    WhatIfRun,
)

Query = Mapping[str, str]
Values = dict[str, Any]
MAP_COLUMNS = 64
PROBLEMS = {400: "Refused", 401: "Sign in", 403: "Not allowed", 404: "Not found", 409: "Refused", 503: "Busy"}
STAGES = ("pending", "prefill", "handed over", "decoding", "finished", "failed", "cancelled", "rejected")
COMPARED = ("effective capacity", "TTFT P90", "hit rate")
GAPS = {
    "capacity": "The fleet's caches are too small to keep it.",
    "perfect_routing": "The prefix is on several engines or on another one than the best placement needs.",
    "as_known": "The index did not know what an engine held.",
    "as_chosen": "The policy chose another engine, to spare a queue.",
    "as_delivered": "The engine no longer held what was predicted.",
}
"""Why tokens are lost at a rung, against the one above it."""


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
            return _history(view)
        case "tenants":
            return _tenants(view)
        case "hit_rate":
            return _hit_rate(view)
        case "what_if":
            return {"compared": COMPARED}
        case "what_if_run":
            return _what_if_run(view)
        case "shadow":
            return _shadow(view)
        case "problem":
            return {"problem_word": PROBLEMS.get(view.status, f"Problem {view.status}")}
        case _:
            return {}


def _fleet(view: FleetView, status: StatusView, session: Session, query: Query) -> Values:
    found = health.attention(view)
    levels = {engine.instance: level for level, engine, _ in found if engine.status != "ready"}
    drawn = charts.fleet_map(view.instances, levels, MAP_COLUMNS) if len(view.instances) > 12 else Markup("")
    return {
        "pool_verdict": health.pool_verdict(view, status),
        "attention": found,
        "fleet_map": drawn,
        "act": _act(view, session, query),
    }


def _act(view: FleetView, session: Session, query: Query) -> Values | None:
    """The action that was asked for and is to be confirmed."""
    kind, target = query.get("act", ""), query.get("engine", "")
    if not session.acts:
        return None
    if kind == "scale" and target.isdecimal():
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
    filtered = any(query.get(name) for name in ("q", "tenant", "instance", "stage", "late"))
    return {"requests_verdict": health.requests_verdict(view), "stages": STAGES, "filtered": filtered}


def _request(view: RequestPageView) -> Values:
    told = view.story
    return {
        "story": story(told) if told else None,
        "tenant_path": f"/requests?{urlencode({'tenant': told.tenant})}" if told else "",
        "api_path": f"/api/requests/{quote(view.request, safe='')}",
    }


def _doctor(view: DoctorView) -> Values:
    severities = {finding.severity for finding in view.findings}
    level: Level = "serious" if "serious" in severities else "warning" if "warning" in severities else "ok"
    if not view.at:
        level = "note"
    sentence = view.verdict or ("Nothing found." if view.at else "The log is being examined.")
    return {"doctor_verdict": Verdict(level, sentence, [])}


def _history(view: HistoryView) -> Values:
    return {"history_verdict": health.history_verdict(view), "size_chart": charts.sizes(view.sizes)}


def _tenants(view: TenantsView) -> Values:
    if not view.tenants:
        return {"tenants_verdict": Verdict("note", "No tenant has sent a request yet.", [])}
    worst = min(
        (one for one in view.tenants if one.goodput is not None), key=lambda one: one.goodput or 0.0, default=None
    )
    said = f"{plural(len(view.tenants), 'tenant')}"
    if worst is None or worst.goodput is None:
        return {"tenants_verdict": Verdict("ok", f"{said}; no request has ended yet.", [])}
    named = worst.tenant or "requests without a tenant"
    level: Level = (
        "ok"
        if worst.goodput >= health.GOODPUT_WARNING
        else "warning"
        if worst.goodput >= health.GOODPUT_SERIOUS
        else "serious"
    )
    return {"tenants_verdict": Verdict(level, f"{said}; least well served: {named}, {worst.goodput:.1%} in time.", [])}


def _hit_rate(view: LadderView) -> Values:
    rungs = view.pool.rungs if view.pool else []
    lost = [(rung.lost or 0.0, place) for place, rung in enumerate(rungs)]
    most, place = max(lost, default=(0.0, -1))
    sentence = view.verdict
    if not sentence and rungs and rungs[-1].share is not None and rungs[0].share is not None:
        sentence = f"{rungs[-1].share:.1%} of prompt tokens were cached, of {rungs[0].share:.1%} that could have been."
    level: Level = "ok" if most < health.HIT_GAP_WARNING else "warning"
    return {
        "ladder_verdict": Verdict(level if rungs else "note", sentence or "No request has ended yet.", []),
        "ladder_worst": place if most > 0 else -1,
        "gaps": GAPS,
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
            return Verdict("serious", f"{name}: the run failed: {run.problem}", [])
        case "cancelled":
            return Verdict("note", f"{name}: cancelled.", [])
        case "waiting" | "running":
            return Verdict("note", f"{name}: being simulated.", [])
        case "done":
            said = [
                f"{row.name} {row.change} ({row.again} → {row.changed})" for row in run.rows if row.name in COMPARED
            ]
            judged = [row.better for row in run.rows if row.name in COMPARED and row.better is not None]
            better = (
                "better"
                if judged and all(judged)
                else "worse"
                if judged and not any(judged)
                else "mixed"
                if judged
                else "the same"
            )
            level: Level = "ok" if better in {"better", "the same"} else "warning"
            return Verdict(level, f"{name} would be {better}: {'; '.join(said) or 'no figure changes'}.", [])


SHADOW_VALUES: Mapping[str, tuple[str, Callable[[float], object], int]] = {}
"""Label, format, and whether more is better (1), worse (-1) or neither (0), of the values of a shadow policy."""


def _values_of(shadow: ShadowView) -> list[tuple[str, object, bool | None]]:
    found: list[tuple[str, object, bool | None]] = []
    for key, value in shadow.values.items():
        label, shown, sign = SHADOW_VALUES.get(key, (key.replace("_", " "), _shown, 0))
        better = None if not sign or not value else (value > 0) == (sign > 0)
        found.append((label, NOTHING if value is None else shown(value), better))
    return found


def _shown(value: Any) -> object:
    match value:
        case None:
            return NOTHING
        case int():
            return count(value)
        case float():
            return signed(value)
        case _:
            return text(value)


def _shadow(view: ShadowsView) -> Values:
    if view.shadows:
        said = [
            f"{one.name} agrees in {one.agreement:.1%} of {one.placements:,} placements"
            for one in view.shadows
            if one.agreement is not None
        ]
        verdict = Verdict(
            "ok" if said else "note", f"{'; '.join(said)}." if said else "No placement was decided yet.", []
        )
    else:
        verdict = Verdict("note", "No other policy decides along.", [])
    return {"shadow_verdict": verdict, "values_of": _values_of, "shown_value": _shown}
