"""The columns of each table, and when a row asks for attention."""

from markupsafe import Markup

from pointsman.state.correction import CORRECTION_MAX
from pointsman_cli.console.pages.cells import (
    LEVELS,
    NOTHING,
    bar,
    clock,
    count,
    decimal,
    duration,
    factor,
    key,
    name_link,
    request_link,
    seconds,
    share,
    shortened,
    state,
    text,
)
from pointsman_cli.console.pages.health import GOODPUT_WARNING, PACE_WARNING
from pointsman_cli.console.pages.tables import Column, Table
from pointsman_cli.console.views import FleetEventView, InstanceView, MoveView, RequestView, ScaleView, TenantView

QUEUE_FULL_SECONDS = 5.0
"""Prefill work ahead of a new request that fills its bar."""


def _attention(level: str | None) -> str:
    return level if level in {"warning", "serious"} else ""


def _engine_level(engine: InstanceView) -> str:
    return _attention(LEVELS.get(engine.status)) or _attention(LEVELS.get(engine.knowledge))


def _role(engine: InstanceView) -> Markup:
    shown = name_link("/requests?instance={}", engine.instance)
    return shown if engine.role in {"", "both"} else Markup(f'{shown} <span class="chip">{text(engine.role)}</span>')


def _queue(engine: InstanceView) -> Markup:
    full = engine.queue_seconds / QUEUE_FULL_SECONDS
    return bar(full, seconds(engine.queue_seconds), "warning" if full >= 1 else "")


def _blocks(engine: InstanceView) -> Markup:
    return (
        bar(engine.blocks / engine.blocks_max, count(engine.blocks)) if engine.blocks_max > 0 else count(engine.blocks)
    )


def _pace(engine: InstanceView) -> Markup:
    shown = factor(engine.pace)
    return bar(1.0, shown, "warning") if engine.pace >= PACE_WARNING else shown


def _low(in_time: float | None) -> str:
    return "warning" if in_time is not None and in_time < GOODPUT_WARNING else ""


FLEET: Table[InstanceView] = Table(
    key="engines",
    caption="Engines of the pool",
    identity=lambda e: key("e", e.instance),
    level=_engine_level,
    columns=(
        Column("engine", "Engine", _role, lambda e: (len(e.instance), e.instance), "name"),
        Column("status", "Status", lambda e: state(e.status), lambda e: e.status, "mid"),
        Column("index", "Index", lambda e: state(e.knowledge), lambda e: e.knowledge, "mid",
               "exact: its events flow and digests agree; degraded: some are missing; blind: not known"),
        Column("pending", "Waiting", lambda e: count(e.pending), lambda e: e.pending, "n", "Requests in its queue, not sent yet"),
        Column("prefill", "Prefill", lambda e: count(e.in_prefill), lambda e: e.in_prefill, "n", "Requests without a first token"),
        Column("decoding", "Decode", lambda e: count(e.decoding), lambda e: e.decoding, "n"),
        Column("queue", "Work, s", _queue, lambda e: e.queue_seconds, "n mid", "Prefill work ahead of a new request"),
        Column("kv", "KV used", lambda e: bar(e.kv_usage, share(e.kv_usage), "warning" if e.kv_usage > 0.95 else ""),
               lambda e: e.kv_usage, "n", "Share of its KV cache in use by running requests"),
        Column("blocks", "Blocks", _blocks, lambda e: e.blocks, "n", "Blocks that its prefix cache holds"),
        Column("pace", "Pace", _pace, lambda e: e.pace, "n", f"Real prefill time over that of the cost model, as learned; at most {CORRECTION_MAX:g}"),
        Column("off", "Off by", lambda e: share(e.prediction_error), lambda e: e.prediction_error, "n",
               "Recent median error of predicted prefill times"),
        Column("hit", "Hit rate", lambda e: bar(e.hit_rate, share(e.hit_rate)), lambda e: e.hit_rate, "n", "Last minute, as delivered"),
        Column("goodput", "In time", lambda e: bar(e.goodput, share(e.goodput), _low(e.goodput)), lambda e: e.goodput, "n",
               "Share of the last minute's requests that were served in time"),
        Column("ttft", "TTFT, s", lambda e: seconds(e.ttft_p50), lambda e: e.ttft_p50, "n"),
        Column("ended", "Ended", lambda e: count(e.ended), lambda e: e.ended, "n"),
    ),
)  # fmt: skip


def _ttft(request: RequestView) -> Markup:
    used = request.ttft / request.slo_ttft if request.ttft is not None and request.slo_ttft > 0 else None
    return bar(used, seconds(request.ttft), "serious" if used is not None and used > 1 else "")


def _cached(request: RequestView) -> Markup:
    if request.cached_tokens < 0:
        return NOTHING
    return bar(request.cached_tokens / max(1, request.prompt_tokens), count(request.cached_tokens))


def _end(request: RequestView) -> Markup:
    served = request.stage in {"finished", "decoding"}
    return state("late") if served and request.lateness == "late" else state(request.stage)


REQUESTS: Table[RequestView] = Table(
    key="requests",
    caption="Requests, newest first",
    identity=lambda r: key("r", r.request),
    level=lambda r: {"late": "warning", "unserved": "serious"}.get(r.lateness, ""),
    columns=(
        Column("request", "Request", lambda r: request_link(r.request), css="name id"),
        Column("arrived", "Arrived", lambda r: clock(r.arrived_at, 3), lambda r: r.arrived_at, "time"),
        Column("stage", "Stage", _end, lambda r: r.stage, "wide"),
        Column("engine", "Engine", lambda r: shortened(r.instance) if r.instance else NOTHING, lambda r: r.instance, "wide"),
        Column("tenant", "Tenant", lambda r: text(r.tenant) if r.tenant else NOTHING, lambda r: r.tenant, "mid"),
        Column("ttft", "TTFT, s", _ttft, lambda r: r.ttft, "n", "The bar is its share of the SLO"),
        Column("slo", "SLO, s", lambda r: seconds(r.slo_ttft), lambda r: r.slo_ttft, "n"),
        Column("queued", "Queued", lambda r: seconds(r.queue_seconds), lambda r: r.queue_seconds, "n", "Until it was sent to its engine"),
        Column("prompt", "Prompt", lambda r: count(r.prompt_tokens), lambda r: r.prompt_tokens, "n", "Tokens"),
        Column("cached", "Cached", _cached, lambda r: r.cached_tokens, "n", "Tokens, as its engine delivered"),
        Column("foreseen", "Predicted", lambda r: count(r.predicted_cached_tokens), lambda r: r.predicted_cached_tokens, "n plus",
               "Tokens predicted to be cached"),
        Column("output", "Output", lambda r: count(r.output_tokens), lambda r: r.output_tokens, "n", "Tokens"),
        Column("moves", "Moves", lambda r: count(r.moves) if r.moves else NOTHING, lambda r: r.moves, "n"),
        Column("reason", "Reason", lambda r: text(r.reason), lambda r: r.reason, "mid"),
    ),
)  # fmt: skip

TENANTS: Table[TenantView] = Table(
    key="tenants",
    caption="Tenants, most prompt tokens first",
    identity=lambda t: key("t", t.tenant),
    level=lambda t: _low(t.goodput),
    columns=(
        Column("tenant", "Tenant", lambda t: name_link("/requests?tenant={}", t.tenant) if t.tenant else Markup('<span class="muted">no name</span>'),
               lambda t: t.tenant, "wide"),
        Column("priority", "Priority", lambda t: text(t.priority or "standard"), lambda t: t.priority, "mid"),
        Column("weight", "Weight", lambda t: decimal(t.weight), lambda t: t.weight, "n"),
        Column("flight", "In flight", lambda t: count(t.in_flight), lambda t: t.in_flight, "n"),
        Column("arrived", "Arrived", lambda t: count(t.arrived), lambda t: t.arrived, "n"),
        Column("goodput", "In time", lambda t: bar(t.goodput, share(t.goodput, 1), _low(t.goodput)), lambda t: t.goodput, "n"),
        Column("late", "Late", lambda t: count(t.late), lambda t: t.late, "n"),
        Column("rejected", "Rejected", lambda t: count(t.rejected), lambda t: t.rejected, "n"),
        Column("failed", "Failed", lambda t: count(t.failed), lambda t: t.failed, "n"),
        Column("share", "Share", lambda t: bar(t.share, share(t.share)), lambda t: t.share, "n", "Of all prompt tokens"),
        Column("prompt", "Prompt", lambda t: count(t.prompt_tokens), lambda t: t.prompt_tokens, "n mid", "Tokens"),
        Column("hit", "Hit rate", lambda t: bar(t.hit_rate, share(t.hit_rate)), lambda t: t.hit_rate, "n", "Cached of prompt tokens"),
        Column("p50", "P50, s", lambda t: seconds(t.ttft_p50), lambda t: t.ttft_p50, "n", "TTFT"),
        Column("p95", "P95, s", lambda t: seconds(t.ttft_p95), lambda t: t.ttft_p95, "n", "TTFT"),
        Column("limits", "Limits", lambda t: text("; ".join(t.limits)) if t.limits else NOTHING, css="wide"),
    ),
)  # fmt: skip


def _size(view: ScaleView) -> Markup:
    roles = f" ({view.prefill} prefill, {view.decode} decode)" if view.prefill else ""
    return Markup("{} → {}{}").format(f"{view.current:,}", f"{view.wanted:,}", roles)


SCALING: Table[ScaleView] = Table(
    key="scaling",
    fixed=False,
    caption="Decisions about the pool's size, newest first",
    identity=lambda s: f"s-{s.sequence}",
    columns=(
        Column("at", "Time", lambda s: clock(s.at), css="mid"),
        Column("size", "Engines", _size, css="n"),
        Column("by", "By", lambda s: text(s.by or s.policy), css="mid"),
        Column("reason", "Reason", lambda s: text(s.reason), css="rest wrap"),
        Column(
            "applied",
            "Applied",
            lambda s: clock(s.applied_at) if s.applied_at else state("waiting", "not yet"),
            css="mid",
        ),
        Column("detail", "Outcome", lambda s: text(s.applied_detail), css="wide wrap"),
    ),
)

MOVES: Table[MoveView] = Table(
    key="moves",
    fixed=False,
    caption="Requests moved between engines, newest first",
    identity=lambda m: f"m-{m.sequence}",
    level=lambda m: "warning" if m.refusal else "",
    columns=(
        Column("at", "Time", lambda m: clock(m.at), css="mid"),
        Column("request", "Request", lambda m: request_link(m.request), css="name id"),
        Column(
            "way",
            "From → to",
            lambda m: Markup("{} → {}").format(shortened(m.source), shortened(m.instance)),
            css="wide",
        ),
        Column("kind", "Move", lambda m: text("out of the engine" if m.rebound else "between queues"), css="wide"),
        Column("benefit", "Sooner by", lambda m: duration(m.benefit) if m.benefit > 0 else NOTHING, css="n"),
        Column(
            "outcome",
            "Outcome",
            lambda m: state("warning", f"refused: {m.refusal}") if m.refusal else state("ok", "moved"),
            css="wide wrap",
        ),
        Column("reason", "Reason", lambda m: text(m.reason or m.cause), css="rest wrap"),
    ),
)

EVENT_LEVELS = {
    "suspected": "serious",
    "ejected": "serious",
    "left": "warning",
    "writes lost": "serious",
    "draining": "warning",
}
EVENTS: Table[FleetEventView] = Table(
    key="events",
    fixed=False,
    caption="Engines and leaders coming and going, newest first",
    identity=lambda e: f"f-{e.sequence}",
    columns=(
        Column("at", "Time", lambda e: clock(e.at), css="mid"),
        Column("kind", "Event", lambda e: state(EVENT_LEVELS.get(e.kind, "note"), e.kind), css="mid"),
        Column("engine", "Engine", lambda e: text(e.instance) if e.instance else NOTHING, css="wide"),
        Column("detail", "Detail", lambda e: text(e.detail), css="rest wrap"),
    ),
)
