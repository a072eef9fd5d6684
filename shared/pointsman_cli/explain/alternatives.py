"""Why a request was placed where it was, although another engine was idle or was predicted to be sooner."""

from collections.abc import Iterator

from pointsman.analysis.lateness_rules import NOTICED_SECONDS, is_less_busy
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman_cli.explain.causes import Cause, Reason
from pointsman_cli.explain.text import named
from pointsman_cli.explain.values import DecisionRecord, RequestTimeline, WeighedCandidate
from pointsman_cli.explain.wait import Wait
from pointsman_cli.formatting import plural, seconds, were

WAIT_SHARE_MIN = 0.2

POINTSMAN_RULES = {
    "late everywhere": "no engine was predicted to meet its objective, and a late request goes where it delays nobody who is in time",
    "on time only": "an engine that met its objective would have made others late",
    "held only": "the engines that hold its prefix have long queues of late requests, so it is computed again elsewhere",
}


def others_ready(decision: DecisionRecord) -> list[WeighedCandidate]:
    return [
        c
        for c in decision.candidates
        if c.instance != decision.ahead_at and c.status == "ready" and c.instance not in decision.excluded
    ]


def less_busy(decision: DecisionRecord) -> list[WeighedCandidate]:
    """Engines with a much shorter queue, where it was predicted to be in time; the shortest first."""
    here = next((c.queue_seconds for c in decision.candidates if c.instance == decision.ahead_at), 0.0)
    found = [
        c
        for c in others_ready(decision)
        if is_less_busy(c.queue_seconds, here, in_time=c.predicted_ttft <= decision.budget_seconds)
    ]
    return sorted(found, key=lambda c: c.queue_seconds)


def while_less_busy(others: list[WeighedCandidate]) -> str:
    idle = [c.instance for c in others if is_idle(c)]
    if idle:
        return f"while {named(idle)} {were(len(idle))} idle"
    return f"while {others[0].instance} had only {seconds(others[0].queue_seconds)} of work"


def is_idle(candidate: WeighedCandidate) -> bool:
    return not candidate.pending and not candidate.in_prefill and candidate.queue_seconds < NOTICED_SECONDS


def why_not_elsewhere(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    """Where the wait was at an instance, and not the work of its own prompt alone."""
    decision = timeline.placement
    chosen = decision.chosen if decision is not None else None
    others = others_ready(decision) if decision is not None else []
    here = wait.whole - wait.own
    if decision is None or chosen is None or not others or here < max(NOTICED_SECONDS, WAIT_SHARE_MIN * wait.whole):
        return
    best = min(others, key=lambda c: c.predicted_ttft)
    gain = chosen.predicted_ttft - best.predicted_ttft
    if gain > 0:
        yield Reason(
            Cause.BUSY_INSTANCE,
            min(gain, 0.95 * (wait.ahead + wait.overtaken + wait.full)),
            f"{_described(best, chosen)}: {seconds(best.predicted_ttft)} predicted, {seconds(gain)} sooner. "
            f"{chosen.instance} was chosen all the same: {_rule(decision, chosen, best)}",
        )
    else:
        yield Reason(
            Cause.BUSY_INSTANCE,
            0.0,
            f"nothing better was predicted: {_described(best, chosen)}: {seconds(best.predicted_ttft)}, "
            f"{chosen.instance} {seconds(chosen.predicted_ttft)}",
        )


def _described(other: WeighedCandidate, chosen: WeighedCandidate) -> str:
    state = "was idle" if is_idle(other) else f"had {seconds(other.queue_seconds)} of work in its queue"
    if other.uncached_tokens == chosen.uncached_tokens:
        work = f"and would have computed {other.uncached_tokens:,} tokens, as here"
    elif other.uncached_tokens > chosen.uncached_tokens:
        held = "held none" if not other.hit_blocks else "held less"
        work = f"but {held} of its prompt: {other.uncached_tokens:,} tokens to compute there, {chosen.uncached_tokens:,} here"
    else:
        work = f"and held more of its prompt: {other.uncached_tokens:,} tokens to compute there, {chosen.uncached_tokens:,} here"
    return f"{other.instance} {state} {work}"


def _rule(decision: DecisionRecord, chosen: WeighedCandidate, best: WeighedCandidate) -> str:
    if decision.policy == "pointsman":
        return _pointsman_rule(decision, chosen, best)
    unseen = "" if best.weighed else f"{decision.policy or 'the policy'} did not weigh {best.instance}"
    policy = ROUTING_POLICIES.get(decision.policy)
    rule = f"{policy.name} {policy.rule}" if policy is not None else unseen
    return "; ".join(text for text in (rule, decision.reason) if text)


def _pointsman_rule(decision: DecisionRecord, chosen: WeighedCandidate, best: WeighedCandidate) -> str:
    for beginning, text in POINTSMAN_RULES.items():
        if decision.reason.startswith(beginning):
            return text
    if not best.weighed:
        return f"{best.instance} was not weighed, since what was known of the queues was old and too many would have gone there"
    decoding = f", where {plural(best.decoding, 'request')} would be stalled" if best.decoding else ""
    return (
        f"it takes {seconds(chosen.prefill_seconds)} of engine time from the other requests on {chosen.instance}, "
        f"{seconds(best.prefill_seconds)} on {best.instance}{decoding} ({decision.reason})"
    )
