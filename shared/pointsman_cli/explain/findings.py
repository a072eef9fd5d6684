"""What explains a part of the wait: one function per cause, each with the seconds that it explains."""

from collections.abc import Iterator

from pointsman.analysis.lateness_rules import HALF, NOTICED_SECONDS, SLOW_FACTOR_MIN, is_hot
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.correction import CORRECTION_MAX
from pointsman_cli.explain.alternatives import less_busy, others_ready, while_less_busy
from pointsman_cli.explain.causes import Cause, Reason, cause_ahead
from pointsman_cli.explain.text import FAILURES, of_the_wait
from pointsman_cli.explain.values import NOT_KNOWN, DecisionRecord, GrantRecord, RequestTimeline
from pointsman_cli.explain.wait import Wait, delivered_tokens, usual_elsewhere
from pointsman_cli.formatting import milliseconds, plural, seconds, were

STUCK_FACTOR_MIN = 3.0
PEERS_MIN = 3


def found(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    decision = timeline.placement
    yield from _outage(timeline, wait)
    yield from _unplaced(wait)
    yield from _transport(timeline, wait)
    if decision is None:
        return
    yield from _failed(timeline, wait, decision)
    yield from _moved(timeline, wait, decision)
    yield from _transfer(timeline, wait)
    yield from _missed(timeline, wait, decision)
    yield from _ahead(timeline, wait, decision)
    yield from _overtaken(timeline, wait, decision)
    yield from _full(wait, decision)
    yield from _yielded(wait, decision)
    yield from _hung(wait, decision)
    yield from _log_slow(wait, decision)
    yield from _slow(timeline, wait, decision)
    yield from _own(timeline, wait, decision)
    yield from _whole_answer(timeline, wait)


def _outage(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    if wait.held_up <= 0:
        return
    because = f"no scheduler answered for {seconds(wait.held_up)}"
    if timeline.arrival is None:
        yield Reason(Cause.NO_SCHEDULER, wait.held_up, f"{because}: its ingress chose the engine itself", because)
    else:
        longer = ": for admission its objective was longer by that"
        yield Reason(Cause.NO_SCHEDULER, wait.held_up, f"{because}{longer}", because)


def _unplaced(wait: Wait) -> Iterator[Reason]:
    if wait.unplaced > 0:
        because = f"no instance could take it for {seconds(wait.unplaced)}"
        yield Reason(Cause.NO_INSTANCE, wait.unplaced, f"{because}{of_the_wait(wait.unplaced, wait.whole)}", because)


def _transport(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    if wait.transport > 0:
        because = f"{seconds(wait.transport)} went by between the processes"
        on_wall = f" ({seconds(wait.transport / timeline.speed)} on the wall)" if timeline.speed != 1 else ""
        why = "ingress, scheduler or network were busy, or no scheduler led"
        yield Reason(Cause.TRANSPORT, wait.transport, f"{because}{on_wall}: {why}", because)


def _failed(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    if wait.failed <= 0:
        return
    events = [event for event in timeline.failed if event.attempt < decision.attempt]
    by = events[-1].instance if events else next(iter(reversed(decision.excluded)), InstanceId("an engine"))
    what = FAILURES[events[-1].failure] if events else "no reason is in the log"
    often = f" and {plural(len(events) - 1, 'attempt')} before" if len(events) > 1 else ""
    because = f"{by} failed it ({what}){often}: {seconds(wait.failed)} were lost"
    sentence = f"{because}{of_the_wait(wait.failed, wait.whole)} until it was placed again, on {decision.instance}"
    yield Reason(Cause.FAILED_ATTEMPTS, wait.failed, sentence, because)


def _moved(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    if wait.moved <= 0:
        return
    move = next((d for d in reversed(timeline.decisions) if d.kind == "moved"), None)
    before = next((d for d in timeline.decisions if d.kind == "placed" and d is not decision), None)
    source = move.source if move else before.instance if before else InstanceId("another engine")
    behind = f" behind {before.ahead_tokens:,} tokens" if before is not None and before.ahead_tokens else ""
    because = f"it waited {seconds(wait.moved)} at {source}{behind} before it was moved to {decision.instance}"
    why = f": {move.reason}" if move is not None else ""
    yield Reason(Cause.MOVED, wait.moved, f"{because}{of_the_wait(wait.moved, wait.whole)}{why}", because)


def _transfer(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    first, fetch = timeline.first_token, timeline.fetch
    if wait.transfer > 0:
        where = f"{first.instance} fetched" if first is not None else "fetching"
        because = f"{where} its KV cache from the prefill engine in {seconds(wait.transfer)}"
        if fetch is not None:
            because = (
                f"it waited {seconds(wait.transfer)} for {fetch.tokens:,} tokens of its prefix from {fetch.source}"
            )
        if fetch is not None and fetch.failure:
            because = f"it waited {seconds(wait.transfer)} for its prefix from {fetch.source} in vain ({fetch.failure})"
        yield Reason(Cause.KV_TRANSFER, wait.transfer, f"{because}{of_the_wait(wait.transfer, wait.whole)}", because)


def _missed(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    if wait.missed <= 0:
        return
    instance, tokens = decision.instance, wait.own_missed + wait.ahead_missed
    whose = "by it" if wait.own_missed else "by those ahead of it"
    if wait.own_missed and wait.ahead_missed:
        whose = "by it and those ahead of it"
    spent = f"{seconds(wait.missed)}{of_the_wait(wait.missed, wait.whole)} went into"
    missed = f"{tokens:,} tokens that were expected in the cache of {instance} and had to be computed, {whose}"
    gone = _gone_before_the_grant(timeline, wait, decision)
    if gone:
        because = f"{tokens:,} tokens expected in the cache of {instance} were not there when it was granted"
        yield Reason(Cause.EVICTED, wait.missed, f"{spent} {missed}: {gone}", because)
        return
    because = f"the index was stale: {tokens:,} tokens expected in the cache of {instance} were not there"
    if wait.own_missed:
        said = f"the index said that {decision.predicted_cached_tokens:,} were cached"
        missed += f"; {said}, the engine found {delivered_tokens(timeline):,}"
    yield Reason(Cause.STALE_INDEX, wait.missed, f"{spent} {missed}", because)


def _gone_before_the_grant(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> str:
    """Why the log itself knew at the grant that a predicted hit would be missed."""
    grant = timeline.grants[-1] if timeline.grants else None
    delivered = delivered_tokens(timeline)
    if (
        not wait.own_missed
        or grant is None
        or not grant.instance_known
        or grant.held_tokens - delivered > wait.own_missed / 2
    ):
        return ""
    chosen = decision.chosen
    promised = chosen.hit_blocks - chosen.held_blocks if chosen and chosen.status != NOT_KNOWN else 0
    if promised > 0:
        return f"{plural(promised, 'block')} of them were only promised by prompts placed there before it"
    return f"evicted while it waited; the log knew of {grant.held_tokens:,} by then"


def _ahead(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    if wait.ahead <= 0 or not decision.ahead:
        return
    cause, because = why_ahead(timeline, wait, decision)
    count, tokens = len(decision.ahead), decision.ahead_tokens
    sentence = (
        f"{seconds(wait.ahead)}{of_the_wait(wait.ahead, wait.whole)} were the work of {plural(count, 'request')} with {tokens:,} "
        f"tokens to compute, which {were(count)} before it on {decision.instance}"
    )
    longest = max(decision.ahead, key=lambda other: other.uncached_tokens)
    if longest.uncached_tokens > HALF * tokens:
        part = f"{longest.uncached_tokens:,} tokens were" if count > 1 else "that was"
        sentence += f"; {part} request {longest.request}"
    yield Reason(cause, wait.ahead, sentence, because)


def why_ahead(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> tuple[Cause, str]:
    ahead, where, tokens = decision.ahead, decision.ahead_at, decision.ahead_tokens
    longest = max(ahead, key=lambda other: other.uncached_tokens)
    elsewhere, alike = less_busy(decision), sum(other.same_prefix for other in ahead)
    cause = cause_ahead(
        longest=wait.usual * longest.prefill_seconds,
        ahead=wait.ahead,
        objective=timeline.arrival.slo_ttft if timeline.arrival is not None else wait.own,
        less_busy=bool(elsewhere),
        hot=has_hot_prefix(decision),
        alike=alike / len(ahead),
    )
    crowd = f"{plural(len(ahead), 'request')} with {tokens:,} tokens {were(len(ahead))} ahead of it on {where}"
    if cause is Cause.LONG_PROMPT_AHEAD:
        others = tokens - longest.uncached_tokens
        of_one = f", {longest.uncached_tokens:,} of them one prompt" if others > 0 else ", of one long prompt"
        return cause, f"{tokens:,} tokens were ahead of it on {where}{of_one}"
    if cause is Cause.OVERLOAD:
        return cause, f"{_no_idle_engine(decision)}: {crowd}"
    meanwhile, prefix = while_less_busy(elsewhere), decision.prefix
    if cause is Cause.HOT_PREFIX and prefix is not None:
        return cause, (
            f"its prefix is hot ({prefix.arrivals / prefix.window:.0%} of arrivals): {alike} of the "
            f"{plural(len(ahead), 'request')} ahead of it on {where} began with the same {prefix.tokens:,} tokens, {meanwhile}"
        )
    return cause, f"{crowd}, {meanwhile}"


def _no_idle_engine(decision: DecisionRecord) -> str:
    others = others_ready(decision)
    if not others:
        return "there was no other engine"
    shortest = min([c.queue_seconds for c in decision.candidates if c.status == "ready"], default=0.0)
    every = "both" if len(others) == 1 else f"all {len(others) + 1}"
    return f"{every} engines were busy, the least of them with {seconds(shortest)} of work"


def has_hot_prefix(decision: DecisionRecord) -> bool:
    prefix = decision.prefix
    return prefix is not None and is_hot(prefix.arrivals, prefix.window, prefix.ready)


def _overtaken(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    grant = timeline.grants[-1] if timeline.grants else None
    if grant is None or wait.overtaken <= 0:
        return
    count = len(grant.overtaken_by)
    order = decision.settings.get("ordering", "")
    rule = f" by the order {order}" if order else ""
    because = f"{plural(count, 'request')} with {grant.overtaken_tokens:,} tokens came later and went first{rule}"
    yield Reason(Cause.OVERTAKEN, wait.overtaken, f"{because}{of_the_wait(wait.overtaken, wait.whole)}", because)


def _full(wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    chosen = decision.chosen
    if wait.full > 0 and chosen is not None:
        places = int(float(decision.settings.get("running_max", 0)))
        taken = f"{plural(places, 'place')} of {decision.instance} {were(places)} taken"
        because = f"the {taken}, {chosen.decoding} by requests that were decoding"
        yield Reason(Cause.ENGINE_FULL, wait.full, f"{because}{of_the_wait(wait.full, wait.whole)}", because)


def _yielded(wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    if wait.yielded > 0:
        room = f"{seconds(wait.yielded)} for room that others did not need"
        because = f"its prompt was late even alone: as best effort it waited {room}"
        sentence = f"as best effort it waited {room}{of_the_wait(wait.yielded, wait.whole)}, on {decision.instance}"
        yield Reason(Cause.LONG_PROMPT, wait.yielded, sentence, because)


def _hung(wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    given_up = "its leader had given it up, because its ingress was silent"
    yield from _beyond_work(Cause.TRANSPORT, wait.hung, "its ingress hung", given_up, wait, decision)


def _log_slow(wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    learned_late = "its leader learned late what engines had finished"
    yield from _beyond_work(Cause.LOG_SLOW, wait.log_slow, "the log was slow", learned_late, wait, decision)


def _beyond_work(
    cause: Cause, spent: EngineSeconds, what: str, effect: str, wait: Wait, decision: DecisionRecord
) -> Iterator[Reason]:
    if spent > 0:
        because = f"{what}: {seconds(spent)} more went by than {decision.instance} had work"
        yield Reason(cause, spent, f"{because}{of_the_wait(spent, wait.whole)}; {effect}", because)


def _slow(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    if wait.slow <= NOTICED_SECONDS * timeline.speed:
        return
    grant = timeline.grants[-1] if timeline.grants else None
    spent, name = wait.engine + (0.0 if decision.best_effort else wait.queue), decision.instance
    usual = f", {usual_elsewhere(grant):.1f} times is usual for the others" if others_ready(decision) else ""
    alone = _is_alone(timeline, wait)
    who = f"{name} was slow: it" if alone else f"all engines were slow: {name}"
    because = f"{who} took {wait.pace:.1f} times what its cost model says"
    real = " (with what was really cached)" if wait.own_missed or wait.ahead_missed else ""
    sentence = (
        f"{seconds(spent)} passed at {name}{of_the_wait(spent, wait.whole)} for {wait.work_tokens:,} tokens of work{real}, "
        f"{seconds(spent / wait.pace)} by its cost model: {wait.pace:.1f} times as long{usual}"
    )
    yield Reason(Cause.SLOW_ENGINE, wait.slow, sentence + _or_missed(timeline, wait, decision), because)
    if grant is not None and grant.instance_known:
        yield from _pace(grant, wait)
    yield from _peers(timeline, wait, name)


def _or_missed(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> str:
    """A missed hit looks the same where the engine does not report cached tokens."""
    cached = decision.predicted_cached_tokens
    if (
        not isinstance(timeline.end, RequestFinished)
        or timeline.end.cached_tokens >= 0
        or cached <= 0
        or not decision.cost
    ):
        return ""
    computed = wait.usual * decision.cost.seconds(wait.own_tokens + cached, 0)
    if computed < HALF * wait.slow:
        return ""
    return (
        f"; its engine does not report cached tokens: had the {cached:,} that were expected not been there, "
        f"{seconds(computed)} would be usual"
    )


def _is_alone(timeline: RequestTimeline, wait: Wait) -> bool:
    peers = timeline.meanwhile
    if peers is not None and peers.prefills >= PEERS_MIN:
        return peers.pace < SLOW_FACTOR_MIN * wait.usual
    return not timeline.grants or usual_elsewhere(timeline.grants[-1]) < SLOW_FACTOR_MIN * wait.usual


def _pace(grant: GrantRecord, wait: Wait) -> Iterator[Reason]:
    name, behind = grant.instance, 0.9 * wait.slow
    first = grant.in_engine[0] if grant.in_engine else None
    if grant.correction >= SLOW_FACTOR_MIN * wait.usual:
        or_more = "or more " if grant.correction >= CORRECTION_MAX else ""
        text = f"{name} had been slow before: its prefills had been taking {grant.correction:.1f} times {or_more}what its cost model says"
    elif first is not None and first.inside_seconds > STUCK_FACTOR_MIN * max(first.prefill_seconds, NOTICED_SECONDS):
        text = (
            f"{name} was behind already: the first of its prefills, {seconds(first.prefill_seconds)} of work, had "
            f"been there for {seconds(first.inside_seconds)}"
        )
    elif wait.engine < wait.queue:
        return
    else:
        load = f", with {plural(grant.decoding, 'request')} decoding beside it" if grant.decoding else ""
        text = f"that was unusual for {name}, whose prefills had been taking {grant.correction:.1f} times{load}"
    yield Reason(Cause.SLOW_ENGINE, behind, text)


def _peers(timeline: RequestTimeline, wait: Wait, name: InstanceId) -> Iterator[Reason]:
    peers = timeline.meanwhile
    if peers is None or peers.prefills < PEERS_MIN:
        return
    was = "was" if _is_alone(timeline, wait) else "was not"
    text = (
        f"it {was} {name} alone: {peers.prefills} prefills that ended elsewhere meanwhile took {peers.pace:.1f} times what "
        "their cost models say"
    )
    yield Reason(Cause.SLOW_ENGINE, 0.8 * wait.slow, text)


def _own(timeline: RequestTimeline, wait: Wait, decision: DecisionRecord) -> Iterator[Reason]:
    if wait.own <= 0:
        return
    chosen, arrival = decision.chosen, timeline.arrival
    tokens = wait.own_tokens - wait.own_missed
    work = f"{tokens:,} tokens of its own prompt"
    cached = decision.predicted_cached_tokens
    if cached > wait.own_missed:
        work += f", with {cached - wait.own_missed:,} more in the cache"
    elif chosen is not None and chosen.knowledge and chosen.knowledge != "exact":
        work += f", and nobody knew what {decision.instance} held ({chosen.knowledge})"
    sentence = f"{seconds(wait.own)}{of_the_wait(wait.own, wait.whole)} were the work of {work}"
    if arrival is not None and wait.own > arrival.slo_ttft:
        objective = f"more than its objective of {seconds(arrival.slo_ttft)}"
        because = f"its own {tokens:,} tokens take {seconds(wait.own)} to compute, {objective}"
        if decision.best_effort:
            because += ": late even alone, best effort"
            sentence += f": {objective}, so it was admitted as best effort"
        else:
            sentence += f": {objective}, with nothing ahead of it"
        yield Reason(Cause.LONG_PROMPT, wait.own, sentence, because)
    else:
        yield Reason(Cause.NOTHING, wait.own, sentence)


def _whole_answer(timeline: RequestTimeline, wait: Wait) -> Iterator[Reason]:
    end = timeline.end
    if wait.whole_answer > 0 and isinstance(end, RequestFinished):
        tokens = f"its {plural(end.completion_tokens, 'token')}" if end.completion_tokens >= 0 else "all tokens"
        because = f"it was not streamed: {tokens} had to be written before the answer"
        each = wait.whole_answer / end.completion_tokens if end.completion_tokens > 0 and timeline.answers == 1 else 0.0
        if timeline.arrival is not None and each > timeline.arrival.slo_tpot > 0:
            because += f", {milliseconds(each)} each where {milliseconds(timeline.arrival.slo_tpot)} were wanted"
        sentence = f"{because}{of_the_wait(wait.whole_answer, wait.whole)}"
        yield Reason(Cause.WHOLE_ANSWER, wait.whole_answer, sentence, because)
