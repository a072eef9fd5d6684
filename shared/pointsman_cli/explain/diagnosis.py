"""The verdict on a request: its cause in one line, and the sentences behind it, most of the time first."""

from pointsman.contracts.decisions import RequestRejected
from pointsman.contracts.reasons import TENANT_LIMITS, CancelCause, RejectReason
from pointsman.contracts.requests import RequestCancelled, RequestFailed, RequestFinished
from pointsman.primitives import EngineSeconds
from pointsman_cli.explain.alternatives import why_not_elsewhere
from pointsman_cli.explain.background import background
from pointsman_cli.explain.causes import REFUSALS, Cause, Reason, Verdict, cause_alone
from pointsman_cli.explain.findings import found, why_ahead
from pointsman_cli.explain.text import FAILURES
from pointsman_cli.explain.values import RequestTimeline, WeighedCandidate, soonest
from pointsman_cli.explain.wait import Wait, divided, instance_of
from pointsman_cli.formatting import seconds

CAUSE_SHARE_MIN = 0.2
"""Of the wait: what explains less is no cause."""
SLOW_SHARE_OF_OBJECTIVE = 0.2
"""A request in time that waited less than this has no cause."""
REASON_SHARE_MIN = 0.05
REASONS_MIN, REASONS_MAX = 3, 7
CANCELLED_BECAUSE = {
    CancelCause.CLIENT_GONE: "the client left",
    CancelCause.TIMEOUT: "its time limit ended",
    CancelCause.INGRESS_STOPPED: "its ingress stopped",
}


def verdict(timeline: RequestTimeline) -> Verdict:
    wait = divided(timeline)
    match timeline.end:
        case RequestFinished():
            return _of_answered(timeline, wait)
        case RequestRejected():
            return _of_rejected(timeline)
        case RequestFailed():
            return _of_failed(timeline, wait)
        case RequestCancelled():
            return _of_cancelled(timeline, wait)
        case None:
            top = _top(timeline, wait)
            why = f", so far because {top.because}" if top is not None else ""
            return Verdict(top.cause if top is not None else Cause.NOT_ENDED, f"not ended: {_state(timeline)}{why}")


def reasons_and_details(timeline: RequestTimeline) -> tuple[list[str], list[str]]:
    """Three to seven sentences, if there are so many, and the others."""
    wait = divided(timeline)
    every = [*found(timeline, wait), *why_not_elsewhere(timeline, wait), *background(timeline, wait)]
    ranked = sorted(every, key=lambda reason: -reason.seconds)
    cause = verdict(timeline).cause
    ranked.sort(key=lambda reason: reason.cause is not cause or not reason.because)  # stable: the cause first
    first = ranked[:1] if ranked and ranked[0].cause is cause else []
    weighty = [*first, *(r for r in ranked[len(first) :] if r.seconds > REASON_SHARE_MIN * wait.whole)][:REASONS_MAX]
    light = [r for r in ranked if r not in weighty]
    count = max(0, REASONS_MIN - len(weighty))
    return [r.sentence for r in (*weighty, *light[:count])], [r.sentence for r in light[count:]]


def headline(timeline: RequestTimeline) -> str:
    end, ttft = timeline.end, timeline.ttft
    where = f" on {instance}" if (instance := instance_of(timeline)) else ""
    match end:
        case None:
            age = timeline.last_at - timeline.arrived_at
            return f"not ended{where}: {seconds(age)} old at the end of the log"
        case RequestRejected():
            return f"rejected ({end.reason}) after {seconds(end.at - timeline.arrived_at)}"
        case RequestFailed():
            return f"failed{where} ({end.reason}, HTTP {end.status}) after {seconds(end.at - timeline.arrived_at)}"
        case RequestCancelled():
            return f"cancelled{where} ({end.reason}) after {seconds(end.at - timeline.arrived_at)}"
        case RequestFinished():
            out = f"; {end.completion_tokens:,} tokens" if end.completion_tokens >= 0 else "; the whole answer"
            return f"finished{where}: {_punctuality(timeline, ttft or 0.0)}{out} in {seconds(end.e2e)}"


def _of_answered(timeline: RequestTimeline, wait: Wait) -> Verdict:
    arrival, ttft = timeline.arrival, timeline.ttft or 0.0
    objective = arrival.slo_ttft if arrival is not None else None
    late = objective is not None and ttft > objective
    top = _top(timeline, wait)
    decode = next((r for r in background(timeline, wait) if r.cause is Cause.SLOW_DECODE), None)
    if not late and decode is not None:
        if top is not None and top.cause is Cause.SLOW_ENGINE:
            return Verdict(top.cause, f"first token in time, but {decode.because}, because {top.because}")
        return Verdict(decode.cause, f"first token in time, but {decode.because}")
    brief = objective is not None and ttft < SLOW_SHARE_OF_OBJECTIVE * objective
    if not late and (top is None or brief or top.seconds < wait.own):
        in_time = "in time" if objective is not None else "answered"
        return Verdict(Cause.NOTHING, f"{in_time}: first token after {seconds(ttft)}, nothing held it up")
    if top is None:
        return Verdict(Cause.UNKNOWN, f"slow, and the log does not say why: first token after {seconds(ttft)}")
    if late or objective is None:
        return Verdict(top.cause, f"slow because {top.because}")
    if seconds(top.seconds) in top.because:
        return Verdict(top.cause, f"in time after {seconds(ttft)}, although {top.because}")
    return Verdict(top.cause, f"in time, but {seconds(top.seconds)} of {seconds(ttft)} because {top.because}")


def _top(timeline: RequestTimeline, wait: Wait) -> Reason | None:
    """What explains most of the wait. The work of its own prompt counts if that alone takes too long."""
    causes = [r for r in found(timeline, wait) if r.because and r.cause is not Cause.NOTHING]
    top = max(causes, key=lambda reason: reason.seconds, default=None)
    return top if top is not None and top.seconds >= CAUSE_SHARE_MIN * wait.whole else None


LOADED = (RejectReason.SLO_TTFT, RejectReason.HELD_BACK)


def _of_rejected(timeline: RequestTimeline) -> Verdict:
    end = timeline.end
    assert isinstance(end, RequestRejected)
    decision = next((d for d in reversed(timeline.decisions) if d.kind == "rejected"), None)
    if end.reason in TENANT_LIMITS:
        return Verdict(Cause.LIMIT, f"rejected because it was beyond its tenant's limit: {end.detail or end.reason}")
    if end.reason == RejectReason.QUEUE_FULL:
        return Verdict(Cause.OVERLOAD, f"rejected because the queue was full: {end.detail}")
    best = soonest(decision.candidates) if decision is not None else None
    arrival = timeline.arrival
    if best is not None and arrival is not None and (alone := _alone(end.reason, best, arrival.slo_ttft)) is not None:
        return alone
    if end.reason in LOADED and decision is not None and decision.ahead and best is not None:
        cause, because = why_ahead(timeline, Wait(ahead=decision.ahead_seconds), decision)
        left = f"{seconds(best.predicted_ttft)} predicted at least, {seconds(max(0.0, decision.budget_seconds))} left"
        kept = "; room is kept for those who got less than their share" if end.reason == RejectReason.HELD_BACK else ""
        return Verdict(cause, f"rejected because {because} ({left}{kept})")
    cause = REFUSALS.get(end.reason, Cause.REJECTED)
    return Verdict(cause, f"rejected because {end.detail or end.reason}")


def _alone(reason: str, best: WeighedCandidate, objective: EngineSeconds) -> Verdict | None:
    """If no load was too much for it."""
    cause = cause_alone(reason, queue=best.queue_seconds, predicted_ttft=best.predicted_ttft, objective=objective)
    if cause is None:
        return None
    takes = f"{seconds(best.predicted_ttft)} on {best.instance}, which was idle"
    if cause is Cause.LONG_PROMPT:
        return Verdict(cause, f"rejected because its prompt takes longer than its objective: {takes}")
    return Verdict(cause, f"rejected because too much of its objective had gone by before: it takes {takes}")


def _of_failed(timeline: RequestTimeline, wait: Wait) -> Verdict:
    end = timeline.end
    assert isinstance(end, RequestFailed)
    if not timeline.failed:
        top = _top(timeline, wait) if timeline.first_token is None else None
        why = f"; until then {top.because}" if top is not None else ""
        after = seconds(end.at - timeline.arrived_at)
        return Verdict(Cause.FAILED, f"failed after {after}: {end.reason} (HTTP {end.status}){why}")
    last = timeline.failed[-1]
    engines = list(dict.fromkeys(event.instance for event in timeline.failed))
    tried = (
        f"{len(engines)} engines failed it, at last {last.instance}"
        if len(engines) > 1
        else f"{last.instance} failed it"
    )
    return Verdict(Cause.FAILED_ATTEMPTS, f"failed because {tried}: {FAILURES[last.failure]}")


def _of_cancelled(timeline: RequestTimeline, wait: Wait) -> Verdict:
    end = timeline.end
    assert isinstance(end, RequestCancelled)
    after = end.at - timeline.arrived_at
    top = _top(timeline, wait) if timeline.first_token is None else None
    before = "before its first token" if timeline.first_token is None else "while its answer was coming"
    why = f"; until then {top.because}" if top is not None else ""
    if (what := CANCELLED_BECAUSE.get(end.cause)) is not None:
        cause = Cause.CLIENT_GONE if end.cause is CancelCause.CLIENT_GONE else Cause.CANCELLED
        return Verdict(cause, f"cancelled because {what} after {seconds(after)}, {before}{why}")
    return Verdict(Cause.CANCELLED, f"cancelled after {seconds(after)}, {before}: {end.reason}{why}")


def _punctuality(timeline: RequestTimeline, ttft: EngineSeconds) -> str:
    arrival = timeline.arrival
    what = "first token" if arrival is None or arrival.streaming else "answer"
    if arrival is None:
        return f"{what} after {seconds(ttft)}"
    late = ttft - arrival.slo_ttft
    ending = f"{seconds(late)} too late" if late > 0 else f"in time ({seconds(arrival.slo_ttft)})"
    return f"{what} after {seconds(ttft)}, {ending}"


def _state(timeline: RequestTimeline) -> str:
    if not timeline.phases:
        return "the log says nothing of where it is"
    phase = timeline.phases[-1]
    return f"{phase.name} for {seconds(phase.seconds)}"
