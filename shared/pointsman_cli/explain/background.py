"""Sentences about a request that explain no part of its wait by themselves."""

from collections.abc import Iterator

from pointsman.contracts.decisions import RequestRejected
from pointsman.contracts.requests import RequestFinished, tpot_of_each
from pointsman_cli.explain.causes import Cause, Reason
from pointsman_cli.explain.findings import has_hot_prefix
from pointsman_cli.explain.text import FAILURES, named
from pointsman_cli.explain.values import RequestTimeline, soonest
from pointsman_cli.explain.wait import Wait
from pointsman_cli.formatting import plural, seconds, were

OFF_SECONDS_MIN = 0.05
OFF_SHARE_MIN = 0.25


def background(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    yield from _refusal(timeline, wait)
    yield from _failed_attempts(timeline, wait)
    for sentence in (
        *_retries(timeline),
        *_out(timeline),
        *_hot_prefix(timeline),
        *_doubt(timeline),
        *_prediction(timeline),
        *_refused_moves(timeline),
        *_no_end(timeline),
    ):
        yield Reason(Cause.NOTHING, 0.0, sentence)
    yield from _decode(timeline)


def _refusal(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    rejected = next((d for d in timeline.decisions if d.kind == "rejected"), None)
    if rejected is None or not isinstance(timeline.end, RequestRejected):
        return
    best = soonest(rejected.candidates)
    who = f"admission {rejected.settings['admission']}" if "admission" in rejected.settings else rejected.policy
    yield Reason(Cause.REJECTED, wait.whole, f"{who} refused it: {rejected.detail or rejected.reason}")
    if best is not None:
        left = f"{seconds(rejected.budget_seconds)} of its objective were left"
        text = f"the least predicted anywhere was {seconds(best.predicted_ttft)}, on {best.instance}; {left}"
        yield Reason(Cause.REJECTED, wait.whole, text)
    if rejected.ahead:
        count = len(rejected.ahead)
        ahead = f"{plural(count, 'request')} {were(count)} at {rejected.ahead_at} already"
        text = f"{ahead}, with {rejected.ahead_tokens:,} tokens to compute"
        yield Reason(Cause.REJECTED, wait.whole, text)


def _failed_attempts(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    for event in timeline.failed:
        what = event.what if event.what != event.failure else ""
        text = (
            f"{event.instance} failed it {seconds(event.at - timeline.arrived_at)} after its arrival (attempt {event.attempt}): "
            f"{FAILURES[event.failure]}{f', {what}' if what else ''}"
        )
        yield Reason(Cause.FAILED_ATTEMPTS, wait.failed, text)


def _out(timeline: RequestTimeline) -> Iterator[str]:
    placement = timeline.placement
    for candidate in placement.candidates if placement is not None else ():
        if candidate.why_out and candidate.chosen:
            yield f"it was to try {candidate.instance} after its ejection, which was {candidate.why_out}"
        elif candidate.why_out and not candidate.weighed:
            yield f"{candidate.instance} was no candidate: {candidate.why_out}"


def _retries(timeline: RequestTimeline) -> Iterator[str]:
    for decision in timeline.decisions:
        if decision.excluded:
            without = ", ".join(decision.excluded)
            yield f"placed again without {without} after {seconds(decision.after_seconds)} (attempt {decision.attempt})"
        if decision.kind == "moved":
            yield f"moved from {decision.source} after {seconds(decision.after_seconds)}: {decision.reason}"


def _refused_moves(timeline: RequestTimeline) -> Iterator[str]:
    if timeline.refused:
        _, last = timeline.refused[-1]
        often = f", {len(timeline.refused)} times" if len(timeline.refused) > 1 else ""
        yield f"{last.policy or 'a rebalancer'} requested a move{often}, which was refused: {last.reason}, {last.detail}"


def _hot_prefix(timeline: RequestTimeline) -> Iterator[str]:
    decision = timeline.placement or (timeline.decisions[-1] if timeline.decisions else None)
    prefix = decision.prefix if decision is not None else None
    if decision is None or prefix is None or not has_hot_prefix(decision):
        return
    held = named(prefix.holders) or "none"
    yield (
        f"its prefix was hot: {prefix.arrivals / prefix.window:.0%} of the last {prefix.window:,} arrivals began with the same "
        f"{prefix.tokens:,} tokens (even would be {1 / prefix.ready:.0%} an instance); held by {held}"
    )


def _prediction(timeline: RequestTimeline) -> Iterator[str]:
    decision, ttft = timeline.placement, timeline.ttft
    if decision is None or decision.predicted_ttft is None or ttft is None or timeline.first_token is None:
        return
    off = ttft - decision.predicted_ttft
    if abs(off) > max(OFF_SECONDS_MIN, OFF_SHARE_MIN * ttft):
        how = "longer" if off > 0 else "shorter"
        yield f"it took {seconds(abs(off))} {how} than predicted ({seconds(decision.predicted_ttft)})"


def _doubt(timeline: RequestTimeline) -> Iterator[str]:
    decision = timeline.placement
    chosen = decision.chosen if decision is not None else None
    if chosen is None:
        return
    if chosen.doubt:
        yield f"what {chosen.instance} held was in doubt: {chosen.doubt}"
    elif chosen.knowledge == "blind":
        yield f"what {chosen.instance} held was not known: its engine publishes no KV events"
    if timeline.arrival is not None and not timeline.arrival.exact:
        yield "its tokens had to be guessed, so no hit could be predicted for sure"


def _no_end(timeline: RequestTimeline) -> Iterator[str]:
    if timeline.end is None and timeline.phases:
        phase = timeline.phases[-1]
        yield f"since {seconds(phase.since_seconds)} after its arrival it is {phase.name}, for {seconds(phase.seconds)}"


def _decode(timeline: RequestTimeline) -> Iterator[Reason]:
    end, arrival = timeline.end, timeline.arrival
    if not isinstance(end, RequestFinished) or arrival is None or not arrival.slo_tpot:
        return
    tpot = tpot_of_each(end.tpot, end.completion_tokens, arrival.answers)
    if tpot <= arrival.slo_tpot:
        return
    grant = timeline.grants[-1] if timeline.grants else None
    beside = (
        f": {plural(grant.decoding, 'request')} {were(grant.decoding)} decoding beside it when it was granted"
        if grant and grant.decoding
        else ""
    )
    because = (
        f"its tokens came from {end.instance} every {tpot * 1000:.0f} ms, {arrival.slo_tpot * 1000:g} ms were wanted"
    )
    yield Reason(Cause.SLOW_DECODE, 0.0, f"{because}{beside}", because)
