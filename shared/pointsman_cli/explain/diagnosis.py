"""Reasons for a request's latency: sentences with numbers, one function per cause. Shares are of the TTFT."""

from collections.abc import Callable, Iterator
from statistics import median

from pointsman.contracts.decisions import RequestRejected
from pointsman.contracts.requests import RequestCancelled, RequestFailed, RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.latency_model import CORRECTION_MAX
from pointsman_cli.explain.causes import Cause, Verdict
from pointsman_cli.explain.values import NOT_KNOWN, GrantRecord, PeerPrefills, RequestTimeline

PHASE_SHARE_MIN = 0.2
SLOW_FACTOR_MIN = 1.5
HOT_IN_FAIR_SHARES = 1.0
"""A hot prefix has more than one instance's even share of the arrivals (as in `state.hotness`)."""
HOT_ARRIVALS_MIN = 24
STUCK_FACTOR_MIN = 3.0
OTHERS_MIN = 3
MISSED_TOKENS_SHARE = 0.1
OFF_SECONDS_MIN = 0.05
OFF_SHARE_MIN = 0.25
WAY_SHARE_MIN = 0.1
NAMES_MAX = 3


def verdict(timeline: RequestTimeline) -> Verdict:
    """The cause that explains most of the time, in one line."""
    end, ttft, decision = timeline.end, timeline.ttft, timeline.placement
    match end:
        case None:
            return Verdict(Cause.NOT_ENDED, headline(timeline))
        case RequestRejected():
            return Verdict(Cause.REJECTED, f"rejected: {end.detail or end.reason}")
        case RequestFailed():
            return Verdict(Cause.FAILED, headline(timeline))
        case RequestCancelled():
            return Verdict(Cause.CLIENT_GONE, headline(timeline))
        case _:
            pass
    arrival = timeline.arrival
    late = arrival is not None and ttft is not None and ttft > arrival.slo_ttft
    word = "slow" if late else "in time, most of the wait"
    missing = decision.predicted_cached_tokens - end.cached_tokens if decision and end.cached_tokens >= 0 else 0
    if missing > MISSED_TOKENS_SHARE * max(1, end.prompt_tokens):
        return Verdict(
            Cause.STALE_INDEX, f"{word} because {missing:,} tokens that were predicted to be cached were not"
        )
    queue, engine = _spent(timeline, "queue"), _spent(timeline, "engine")
    if decision is not None and queue > engine:
        tokens = sum(ahead.uncached_tokens for ahead in decision.ahead)
        return Verdict(Cause.BUSY_INSTANCE, f"{word} because {tokens:,} tokens were ahead of it on {decision.instance}")
    if _prefilled_slowly(timeline):
        return Verdict(
            Cause.SLOW_ENGINE,
            f"{word} because {_instance(timeline)} was {_factor(timeline):.1f} times as slow as usual",
        )
    if late:
        return Verdict(Cause.LONG_PROMPT, f"slow because its own prompt took {seconds(engine)}")
    return Verdict(Cause.NOTHING, headline(timeline))


def reasons(timeline: RequestTimeline) -> list[str]:
    findings: tuple[Callable[[RequestTimeline], Iterator[str]], ...] = (
        _refusal,
        _held_up,
        _failed_attempts,
        _retries,
        _out,
        _queue,
        _slow_engine,
        _alternative,
        _hot_prefix,
        _missed_hit,
        _way,
        _prediction,
        _doubt,
        _no_end,
    )
    return [sentence for finding in findings for sentence in finding(timeline)]


def headline(timeline: RequestTimeline) -> str:
    end, ttft = timeline.end, timeline.ttft
    where = f" on {instance}" if (instance := _instance(timeline)) else ""
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


def seconds(value: EngineSeconds) -> str:
    return f"{value:.3f} s" if abs(value) < 10 else f"{value:.1f} s"


def _instance(timeline: RequestTimeline) -> InstanceId:
    ended_at = getattr(timeline.end, "instance", "") if timeline.end else ""
    if ended_at:
        return InstanceId(ended_at)
    placement = timeline.placement
    return placement.instance if placement else InstanceId("")


def _punctuality(timeline: RequestTimeline, ttft: EngineSeconds) -> str:
    arrival = timeline.arrival
    what = "first token" if arrival is None or arrival.streaming else "answer"
    if arrival is None:
        return f"{what} after {seconds(ttft)}"
    late = ttft - arrival.slo_ttft
    verdict = f"{seconds(late)} too late" if late > 0 else f"in time ({seconds(arrival.slo_ttft)})"
    return f"{what} after {seconds(ttft)}, {verdict}"


def _refusal(timeline: RequestTimeline) -> Iterator[str]:
    rejected = next((d for d in timeline.decisions if d.kind == "rejected"), None)
    if rejected is None:
        return
    best = min(rejected.candidates, key=lambda c: c.predicted_ttft, default=None)
    who = f"admission {rejected.settings['admission']}" if "admission" in rejected.settings else rejected.policy
    yield f"{who} refused it: {rejected.detail or rejected.reason}"
    if best is not None:
        yield (
            f"the least predicted anywhere was {seconds(best.predicted_ttft)}, on {best.instance}; "
            f"{seconds(rejected.budget_seconds)} of its objective were left"
        )


def _held_up(timeline: RequestTimeline) -> Iterator[str]:
    arrival = timeline.arrival
    if arrival is not None and arrival.held_up > OFF_SECONDS_MIN:
        yield f"no scheduler answered for {seconds(arrival.held_up)}: for admission its objective was longer by that"


FAILURES = {
    "connect_failure": "no connection to it could be made",
    "http_5xx": "it answered with an error",
    "stream_reset": "its answer broke off",
    "first_byte_timeout": "its first byte did not come in time",
    "chunk_timeout": "the next part of its answer did not come in time",
}


def _failed_attempts(timeline: RequestTimeline) -> Iterator[str]:
    for event in timeline.failed:
        what = event.what if event.what != event.failure else ""
        yield (
            f"{event.instance} failed it {seconds(event.at - timeline.arrived_at)} after its arrival (attempt {event.attempt}): "
            f"{FAILURES[event.failure]}{f', {what}' if what else ''}"
        )


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
            failed = ", ".join(decision.excluded)
            yield f"{failed} failed it: placed again after {seconds(decision.after_seconds)} (attempt {decision.attempt})"
        if decision.kind == "moved":
            yield f"moved from {decision.source} after {seconds(decision.after_seconds)}: {decision.reason}"
    if timeline.refused:
        _, last = timeline.refused[-1]
        often = f", {len(timeline.refused)} times" if len(timeline.refused) > 1 else ""
        yield f"{last.policy or 'a rebalancer'} requested a move{often}, which was refused: {last.reason}, {last.detail}"


def _queue(timeline: RequestTimeline) -> Iterator[str]:
    waited, decision = _spent(timeline, "queue"), timeline.placement
    if decision is None or not _is_relevant(timeline, waited):
        return
    work = sum(ahead.uncached_tokens for ahead in decision.ahead)
    share = _share_of_wait(timeline, waited)
    text = (
        f"it waited {seconds(waited)} in the queue of {decision.instance}{share}: when it was placed, "
        f"{_requests(len(decision.ahead))} with {work:,} tokens to compute {_were(len(decision.ahead))} before it"
    )
    overtaken = next((g.overtaken_by for g in timeline.grants if g.instance == decision.instance), [])
    yield text + (f", and {len(overtaken)} that came later went first" if overtaken else "")


def _alternative(timeline: RequestTimeline) -> Iterator[str]:
    decision = timeline.placement
    if decision is None or not (_is_relevant(timeline, _spent(timeline, "queue")) or _prefilled_slowly(timeline)):
        return
    chosen = next((c for c in decision.candidates if c.chosen), None)
    others = [c for c in decision.candidates if not c.chosen and c.status == "ready"]
    if chosen is None or not others:
        return
    best = min(others, key=lambda c: c.predicted_ttft)
    numbers = f"queue {seconds(best.queue_seconds)}, {best.uncached_tokens:,} tokens to compute"
    text = f"{best.instance} was predicted to take {seconds(best.predicted_ttft)} ({numbers})"
    if best.predicted_ttft >= chosen.predicted_ttft:
        yield f"nothing better was predicted: {text}, {chosen.instance} {seconds(chosen.predicted_ttft)}"
    elif best.weighed:
        yield f"{text}, {chosen.instance} {seconds(chosen.predicted_ttft)}; chosen all the same: {decision.reason}"
    else:
        yield f"{text}, but {decision.policy or 'the policy'} did not weigh it: {decision.reason}"


def _slow_engine(timeline: RequestTimeline) -> Iterator[str]:
    grant, first = (timeline.grants[-1] if timeline.grants else None), timeline.first_token
    if grant is None or first is None or (factor := _factor(timeline)) is None:
        return
    if _is_relevant(timeline, first.prefill):
        others = (
            f", behind {_requests(len(grant.in_engine))} that {_were(len(grant.in_engine))} being prefilled"
            if grant.in_engine
            else ""
        )
        yield (
            f"{seconds(first.prefill)} passed inside {grant.instance}{_share_of_wait(timeline, first.prefill)}{others}: "
            f"{grant.work_tokens:,} tokens of work, {seconds(grant.work_seconds)} by its cost model"
            + (f"; it took {factor:.1f} times as long" if factor >= SLOW_FACTOR_MIN else "")
        )
    if grant.instance_known:
        yield from _pace(grant, factor)
    if _prefilled_slowly(timeline):
        yield from _others(timeline.meanwhile, grant)


def _factor(timeline: RequestTimeline) -> float | None:
    grant, first = (timeline.grants[-1] if timeline.grants else None), timeline.first_token
    if grant is None or first is None or not grant.work_seconds or first.instance != grant.instance:
        return None
    return first.prefill / grant.work_seconds


def _prefilled_slowly(timeline: RequestTimeline) -> bool:
    factor, first = _factor(timeline), timeline.first_token
    return (
        factor is not None and first is not None and factor >= SLOW_FACTOR_MIN and _is_relevant(timeline, first.prefill)
    )


def _pace(grant: GrantRecord, factor: float) -> Iterator[str]:
    usual = _usual_elsewhere(grant)
    if grant.correction >= SLOW_FACTOR_MIN * usual and grant.correction >= SLOW_FACTOR_MIN:
        or_more = "or more " if grant.correction >= CORRECTION_MAX else ""
        yield (
            f"{grant.instance} was slow: its prefills had been taking {grant.correction:.1f} times {or_more}what its cost "
            f"model says, those of the others {usual:.1f} times"
        )
        return
    first = grant.in_engine[0] if grant.in_engine else None
    if first is not None and first.inside_seconds > STUCK_FACTOR_MIN * max(first.prefill_seconds, OFF_SECONDS_MIN):
        yield (
            f"{grant.instance} was behind already: the first of its prefills, {seconds(first.prefill_seconds)} of work, had "
            f"been there for {seconds(first.inside_seconds)}"
        )
    elif factor >= 2 * max(SLOW_FACTOR_MIN, grant.correction):
        load = f", with {_requests(grant.decoding)} decoding beside it" if grant.decoding else ""
        yield f"that was unusual for {grant.instance}, whose prefills had been taking {grant.correction:.1f} times{load}"


def _others(meanwhile: PeerPrefills | None, grant: GrantRecord) -> Iterator[str]:
    if meanwhile is None or meanwhile.prefills < OTHERS_MIN:
        return
    usual = _usual_elsewhere(grant)
    was = "was" if meanwhile.pace < SLOW_FACTOR_MIN * max(1.0, usual) else "was not"
    yield (
        f"it {was} {grant.instance} alone: {meanwhile.prefills} prefills that ended elsewhere meanwhile took "
        f"{meanwhile.pace:.1f} times what their cost models say, where {usual:.1f} times was usual"
    )


def _usual_elsewhere(grant: GrantRecord) -> float:
    others = [value for name, value in grant.corrections.items() if name != grant.instance]
    return median(others) if others else 1.0


def _hot_prefix(timeline: RequestTimeline) -> Iterator[str]:
    decision = timeline.placement or (timeline.decisions[-1] if timeline.decisions else None)
    prefix = decision.prefix if decision else None
    if prefix is None or prefix.window < HOT_ARRIVALS_MIN:
        return
    share = prefix.arrivals / prefix.window
    if share * max(1, prefix.ready) > HOT_IN_FAIR_SHARES and prefix.ready > 1:
        held = ", ".join(prefix.holders[:NAMES_MAX]) or "none"
        more = "" if len(prefix.holders) <= NAMES_MAX else " and others"
        yield (
            f"its prefix was hot: {share:.0%} of the last {prefix.window:,} arrivals began with the same "
            f"{prefix.tokens:,} tokens (even would be {1 / prefix.ready:.0%} an instance); held by {held}{more}"
        )


def _missed_hit(timeline: RequestTimeline) -> Iterator[str]:
    end, decision = timeline.end, timeline.placement
    if not isinstance(end, RequestFinished) or decision is None or end.cached_tokens < 0:
        return
    missing = decision.predicted_cached_tokens - end.cached_tokens
    if missing <= MISSED_TOKENS_SHARE * max(1, end.prompt_tokens):
        return
    chosen = next((c for c in decision.candidates if c.chosen), None)
    promised = chosen.hit_blocks - chosen.held_blocks if chosen and chosen.status != NOT_KNOWN else 0
    why = f"; {promised} of the blocks were only promised by prompts placed there before it" if promised > 0 else ""
    grant = timeline.grants[-1] if timeline.grants else None
    when = (
        f"; when it was granted the log knew of {grant.held_tokens:,}"
        if grant and grant.instance_known and grant.held_tokens < decision.predicted_cached_tokens
        else ""
    )
    yield f"{missing:,} tokens that were predicted to be cached had to be computed{why}{when}"


def _way(timeline: RequestTimeline) -> Iterator[str]:
    spent = _spent(timeline, "way")
    if timeline.ttft and spent > WAY_SHARE_MIN * timeline.ttft:
        yield (
            f"{seconds(spent)} went by between the processes ({seconds(spent / timeline.speed)} on the wall): "
            "ingress, scheduler or network were busy, or no scheduler led"
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
    chosen = next((c for c in decision.candidates if c.chosen), None) if decision else None
    if chosen is None:
        return
    if chosen.doubt:
        yield f"what {chosen.instance} held was in doubt: {chosen.doubt}"
    if timeline.arrival is not None and not timeline.arrival.exact:
        yield "its tokens had to be guessed, so no hit could be predicted for sure"


def _no_end(timeline: RequestTimeline) -> Iterator[str]:
    if timeline.end is None and timeline.phases:
        phase = timeline.phases[-1]
        yield f"since {seconds(phase.since_seconds)} after its arrival it is {phase.name}, for {seconds(phase.seconds)}"


def _spent(timeline: RequestTimeline, kind: str) -> EngineSeconds:
    return sum(phase.seconds for phase in timeline.phases if phase.kind == kind)


def _until_first_token(timeline: RequestTimeline) -> EngineSeconds:
    return sum(phase.seconds for phase in timeline.phases if phase.kind != "decoding")


def _is_relevant(timeline: RequestTimeline, spent: EngineSeconds) -> bool:
    return spent > PHASE_SHARE_MIN * _until_first_token(timeline) and spent > 0


def _share_of_wait(timeline: RequestTimeline, spent: EngineSeconds) -> str:
    whole = _until_first_token(timeline)
    return f" ({min(1.0, spent / whole):.0%} of the time to the first token)" if whole else ""


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
