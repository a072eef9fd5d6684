"""Divides the wait of a request into seconds by what explains them. Work is by the cost model, with the cached tokens
that engines reported where the log has them, at the pace that is usual for the other engines. What exceeds that at its
last instance is the engine's slowness, or its lack of places."""

from dataclasses import dataclass
from statistics import median

from pointsman.analysis.lateness_rules import SLOW_FACTOR_MIN, USUAL_MAX
from pointsman.contracts.requests import RequestFinished, cached_of_keys
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman_cli.explain.values import DecisionRecord, GrantRecord, RequestTimeline

MISSED_TOKENS_SHARE = 0.1


@dataclass(slots=True, kw_only=True)
class Wait:
    """Seconds up to the first token, or to the end if none came. `own` to `whole_answer` are at the last instance."""

    whole: EngineSeconds = 0.0
    held_up: EngineSeconds = 0.0
    unplaced: EngineSeconds = 0.0
    failed: EngineSeconds = 0.0
    moved: EngineSeconds = 0.0
    transport: EngineSeconds = 0.0
    transfer: EngineSeconds = 0.0
    own: EngineSeconds = 0.0
    ahead: EngineSeconds = 0.0
    overtaken: EngineSeconds = 0.0
    missed: EngineSeconds = 0.0
    full: EngineSeconds = 0.0
    yielded: EngineSeconds = 0.0
    """As best effort, to requests that could be on time."""
    hung: EngineSeconds = 0.0
    """Beyond the work, while its ingress noticed nothing."""
    log_slow: EngineSeconds = 0.0
    """Beyond the work, while its leader learned late what engines had finished."""
    slow: EngineSeconds = 0.0
    whole_answer: EngineSeconds = 0.0
    queue: EngineSeconds = 0.0
    engine: EngineSeconds = 0.0
    usual: float = 1.0
    """Pace of the other engines, from 1 to USUAL_MAX."""
    pace: float = 1.0
    """Of this one: seconds over the work that had to be done."""
    work_tokens: Tokens = 0
    """Of that work, with what was really cached."""
    own_tokens: Tokens = 0
    own_missed: Tokens = 0
    ahead_missed: Tokens = 0
    ahead_tokens: Tokens = 0

    def share_out(
        self,
        spent: EngineSeconds,
        *,
        own: EngineSeconds,
        missed: EngineSeconds,
        ahead: EngineSeconds,
        overtaken: EngineSeconds = 0.0,
    ) -> EngineSeconds:
        """Divide what was spent at the last instance among work, given in seconds by the cost model. Returns what exceeds
        the usual pace, if that is slow."""
        work = own + missed + ahead + overtaken
        if not work or not spent:
            return 0.0
        self.pace = spent / work
        slow = self.pace >= SLOW_FACTOR_MIN * self.usual
        scale = self.usual if slow else self.pace
        self.own, self.missed = scale * own, scale * missed
        self.ahead, self.overtaken = scale * ahead, scale * overtaken
        return spent - scale * work if slow else 0.0

    def blame_for(
        self, excess: EngineSeconds, *, log_slow: EngineSeconds, is_whole_answer: bool, learned: float
    ) -> None:
        """Divide what exceeds the usual pace: a leader that does not learn what ended holds requests back; an answer that
        is not streamed comes with its last token, and its engine is slow no further than by its `learned` pace of prefills."""
        self.log_slow = min(excess, log_slow)
        excess -= self.log_slow
        if is_whole_answer:
            slow = min(excess, max(0.0, learned - self.usual) * excess / max(self.pace - self.usual, 1e-9))
            self.whole_answer, excess = excess - slow, slow
        self.slow = excess


def divided(timeline: RequestTimeline) -> Wait:
    wait = Wait()
    placed_after = timeline.placement.after_seconds if timeline.placement else float("inf")
    failed_before = (
        timeline.arrival is not None
        and bool(timeline.arrival.instead_of)
        and timeline.placement is not None
        and timeline.placement.attempt > 1
    )
    for phase in timeline.phases:
        if phase.kind == "decoding":
            continue
        wait.whole += phase.seconds
        before = phase.since_seconds < placed_after - 1e-9
        match phase.kind:
            case "way" if before and failed_before:
                wait.failed += phase.seconds
            case "way" | "gone":
                wait.transport += phase.seconds
            case "transfer":
                wait.transfer += phase.seconds
            case "queue" if before and not phase.instance:
                wait.unplaced += phase.seconds
            case _ if before:
                _add_elsewhere(wait, phase.seconds, timeline)
            case "queue":
                wait.queue += phase.seconds
            case _:
                wait.engine += phase.seconds
    _take_out_outage(wait, timeline)
    if timeline.placement is not None:
        _divide_visit(wait, timeline, timeline.placement)
    return wait


def _add_elsewhere(wait: Wait, spent: EngineSeconds, timeline: RequestTimeline) -> None:
    last = timeline.placement
    if last is not None and last.attempt > 1 and last.kind == "placed":
        wait.failed += spent
    else:
        wait.moved += spent


def _take_out_outage(wait: Wait, timeline: RequestTimeline) -> None:
    arrival, grant = timeline.arrival, timeline.grants[0] if timeline.grants else None
    if arrival is not None:
        wait.held_up = min(arrival.held_up, wait.transport)
    elif grant is not None and not grant.by_leader and not timeline.arrived_before_the_log:
        wait.held_up = min(grant.after_seconds, wait.transport)
    wait.transport -= wait.held_up


def _divide_visit(wait: Wait, timeline: RequestTimeline, decision: DecisionRecord) -> None:
    grant = timeline.grants[-1] if timeline.grants and timeline.grants[-1].instance == decision.instance else None
    if decision.best_effort:
        _divide_best_effort(wait, timeline, decision, grant)
        return
    own, missed = _own_work(wait, timeline, decision, grant)
    ahead_missed = _ahead_missed(wait, timeline, decision, grant)
    wait.ahead_tokens = decision.ahead_tokens + wait.ahead_missed
    wait.work_tokens = wait.own_tokens + wait.ahead_tokens + (grant.overtaken_tokens if grant else 0)
    wait.usual = min(USUAL_MAX, usual_elsewhere(grant))
    excess = wait.share_out(
        wait.queue + wait.engine,
        own=own,
        missed=missed + ahead_missed,
        ahead=decision.ahead_seconds,
        overtaken=grant.overtaken_seconds if grant is not None else 0.0,
    )
    if is_full(decision):
        wait.full = min(excess, wait.queue)
    _divide_excess(wait, timeline, grant, excess - wait.full)


def _divide_best_effort(
    wait: Wait, timeline: RequestTimeline, decision: DecisionRecord, grant: GrantRecord | None
) -> None:
    """No order of arrival says when it is granted: until then it yields, and only what follows tells of the engine."""
    own, missed = _own_work(wait, timeline, decision, grant)
    inside = grant.work_seconds - grant.own_seconds if grant is not None else 0.0
    wait.usual = min(USUAL_MAX, usual_elsewhere(grant))
    wait.work_tokens = wait.own_tokens + (grant.work_tokens - grant.own_tokens if grant is not None else 0)
    excess = wait.share_out(wait.engine, own=own, missed=missed, ahead=inside)
    wait.yielded, wait.ahead = wait.queue + wait.ahead, 0.0
    _divide_excess(wait, timeline, grant, excess)


def _own_work(
    wait: Wait, timeline: RequestTimeline, decision: DecisionRecord, grant: GrantRecord | None
) -> tuple[EngineSeconds, EngineSeconds]:
    """Predicted work of its own prompt, and what the hits that were missed added to it."""
    chosen = decision.chosen
    tokens = chosen.uncached_tokens if chosen is not None else grant.own_tokens if grant is not None else 0
    if decision.cost is None:
        wait.own_tokens = tokens
        return (grant.own_seconds if grant is not None else 0.0), 0.0
    prompt, cached = tokens + decision.predicted_cached_tokens, decision.predicted_cached_tokens
    work = decision.cost.seconds(prompt, cached) if tokens else 0.0
    wait.own_tokens = tokens
    delivered = delivered_tokens(timeline)
    if delivered < 0:
        return work, 0.0
    real = decision.cost.seconds(prompt, min(delivered, prompt - 1))
    wait.own_tokens = prompt - delivered
    if cached - delivered > MISSED_TOKENS_SHARE * prompt:
        wait.own_missed = cached - delivered
        return work, max(0.0, real - work)
    return real, 0.0


def _ahead_missed(
    wait: Wait, timeline: RequestTimeline, decision: DecisionRecord, grant: GrantRecord | None
) -> EngineSeconds:
    """What hits missed by those ahead of it added to its wait."""
    seconds = 0.0
    seen = {other.request: other for other in (*decision.ahead, *(grant.in_engine if grant else ()))}
    for other in seen.values():
        delivered = timeline.delivered.get(other.request, -1)
        missing = other.prompt_tokens - other.uncached_tokens - delivered
        if decision.cost is None or delivered < 0 or missing <= MISSED_TOKENS_SHARE * other.prompt_tokens:
            continue
        real = decision.cost.seconds(other.prompt_tokens, min(delivered, other.prompt_tokens - 1))
        wait.ahead_missed += missing
        seconds += max(0.0, real - other.prefill_seconds)
    return seconds


def _divide_excess(wait: Wait, timeline: RequestTimeline, grant: GrantRecord | None, excess: EngineSeconds) -> None:
    if timeline.ingress_hung:
        wait.hung = excess
        return
    learned = grant.correction if grant is not None and grant.instance_known else 0.0
    wait.blame_for(excess, log_slow=timeline.log_slow, is_whole_answer=timeline.is_whole_answer, learned=learned)


def is_full(decision: DecisionRecord) -> bool:
    """Whether requests that decode or are in prefill took all places of the engine."""
    chosen = decision.chosen
    places = decision.settings.get("running_max", 0)
    if chosen is None or not isinstance(places, int | float) or not places:
        return False
    return chosen.decoding > 0 and chosen.decoding + chosen.in_prefill + chosen.pending >= places


def delivered_tokens(timeline: RequestTimeline) -> Tokens:
    """Cached tokens by its engine's report; -1 if unknown, or of an instance other than the one it was placed at."""
    end, placement = timeline.end, timeline.placement
    if not isinstance(end, RequestFinished) or placement is None:
        return -1
    handed_over = timeline.first_token is not None and timeline.first_token.instance != placement.instance
    known = end.instance == placement.instance or handed_over
    return cached_of_keys(end, timeline.answers) if known else -1


def usual_elsewhere(grant: GrantRecord | None) -> float:
    """Median pace of the other instances, as learned by then; at least 1."""
    if grant is None:
        return 1.0
    others = [value for name, value in grant.corrections.items() if name != grant.instance]
    return max(1.0, median(others)) if others else 1.0


def instance_of(timeline: RequestTimeline) -> InstanceId:
    """Where it ended, else where it was placed last."""
    ended_at: InstanceId = getattr(timeline.end, "instance", InstanceId("")) if timeline.end else InstanceId("")
    placement = timeline.placement
    return ended_at or (placement.instance if placement else InstanceId(""))
