"""One request for the reader: how far it asks for attention, the axis of its picture, and who was ahead of it."""

from typing import Any

from pointsman.contracts.requests import RequestAttemptFailed
from pointsman_cli.console.jobs.views import TimelineView
from pointsman_cli.console.pages.cells import Level
from pointsman_cli.explain.values import QueuedAhead

TICKS = 5
WORDS = {"nothing": "In time", "limit": "Tenant's limit", "transport": "Between processes", "not_ended": "Under way"}
"""Causes whose code, without its underscores, is not what a reader is told."""
SERIOUS = frozenset({"rejected", "limit", "failed"})


def timeline_page(view: TimelineView) -> dict[str, Any]:
    """`marks`: kind, label and seconds of the moments drawn; `lines`: the same as shares of the axis. `ahead`: requests before
    it in its engine or in its queue, where more was to compute, largest first."""
    whole = max((phase.since_seconds + phase.seconds for phase in view.phases), default=0.0)
    marks = [
        (kind, label, at)
        for kind, label, at in (
            ("predicted", "predicted TTFT", view.predicted_ttft),
            ("predicted", "9 of 10 within", view.predicted_ttft_upper),
            ("slo", "SLO", view.slo_ttft),
        )
        if at is not None and at > 0
    ]
    waits = [(phase.seconds, place) for place, phase in enumerate(view.phases) if phase.kind != "decoding"]
    ahead = _ahead(view)
    slow = view.late or view.cause in SERIOUS
    return dict(  # noqa: C408 - as keywords it reads like the template that uses it
        level=_level(view),
        word=WORDS.get(view.cause, view.cause.replace("_", " ").capitalize() or "Unknown"),
        streaming=view.arrival is None or view.arrival.streaming,
        queued=sum(phase.seconds for phase in view.phases if phase.kind == "queue") if view.phases else None,
        marks=marks,
        lines=[(kind, at / whole) for kind, _, at in marks] if whole else [],
        ticks=[whole * place / (TICKS - 1) for place in range(TICKS)] if whole else [],
        longest=max(waits)[1] if slow and waits else -1,
        ahead=ahead,
        ahead_on=view.instance,
        ahead_tokens=sum(one.uncached_tokens for one in ahead),
        ahead_most=max((one.uncached_tokens for one in ahead), default=0),
        slowest_candidate={
            decision.sequence: max((one.predicted_ttft for one in decision.candidates), default=0.0)
            for decision in view.decisions
        },
        failed=[_failed(one) for one in view.failed_attempts],
    )


def _failed(event: RequestAttemptFailed) -> dict[str, Any]:
    what = event.detail or event.failure
    said = f"{event.status} {what}" if event.status else what
    return {"attempt": event.attempt, "instance": event.instance, "what": said}


def _level(view: TimelineView) -> Level:
    if view.cause in SERIOUS:
        return "serious"
    if view.late:
        return "warning"
    return "ok" if view.cause == "nothing" else "note"


def _ahead(view: TimelineView) -> list[QueuedAhead]:
    inside = view.grants[-1].in_engine if view.grants else []
    placed = [decision for decision in view.decisions if decision.kind != "rejected"]
    queued = placed[-1].ahead if placed else []
    chosen = (
        queued if sum(one.uncached_tokens for one in queued) > sum(one.uncached_tokens for one in inside) else inside
    )
    return sorted(chosen, key=lambda one: -one.uncached_tokens)
