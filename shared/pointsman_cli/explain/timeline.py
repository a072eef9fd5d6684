"""Builds the `RequestTimeline` of one request from a re-readable log. All its dates are by the leader's clock, if the log
tells how far the ingress's is from that."""

from collections.abc import Callable, Iterable

from msgspec import structs

from pointsman.analysis.log_delays import LogDelays
from pointsman.analysis.log_time import LogTime
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    counts_as_end,
)
from pointsman.contracts.envelope import Stamp, is_fenced
from pointsman.contracts.requests import (
    PrefillFinished,
    PrefixFetchEnded,
    RequestArrived,
    RequestAttemptFailed,
    RequestEvent,
    RequestFinished,
)
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Sequence, Term
from pointsman.state.state import PoolSettings, State
from pointsman_cli.explain.decisions import Decision, add_decisions
from pointsman_cli.explain.values import Phase, RequestTimeline
from pointsman_cli.history.start_point import StartPoint

NOTHING_BEFORE = StartPoint(None, "")


def timeline_of(
    entries: Iterable[LogEntry],
    request: RequestId,
    settings: PoolSettings,
    *,
    base: StartPoint | None = None,
    beginning: Callable[[Sequence], StartPoint] = lambda _: NOTHING_BEFORE,
) -> RequestTimeline:
    """Reads `entries` twice or more. `base`: what was before them, of a part of a log. `beginning`: as of that entry or
    earlier, for a log that lost its beginning."""
    timeline = _outline(entries, request, settings, base.state if base is not None else None)
    points = [
        entry
        for entry in timeline.entries
        if isinstance(entry.event, Decision | RequestGranted) and entry.sequence not in timeline.passed_over
    ]
    start = base
    if start is None:
        start = beginning(min(point.sequence for point in points) - 1) if points else NOTHING_BEFORE
    timeline.note = start.note
    add_decisions(timeline, points, entries, settings, start.state)
    timeline.refused = _refused(timeline)
    timeline.phases = phases_of(timeline)
    return timeline


def _outline(
    entries: Iterable[LogEntry], request: RequestId, settings: PoolSettings, base: State | None
) -> RequestTimeline:
    timeline = RequestTimeline(request=request, speed=settings.speed, block_tokens=settings.block_tokens)
    term, time, delays = base.term if base is not None else Term(0), LogTime(settings.speed), LogDelays(settings.speed)
    for entry in entries:
        event = entry.event
        timeline.log_begins = timeline.log_begins or (entry.sequence if base is None else 1)
        if event is None:
            continue
        timeline.log_begins_at = timeline.log_begins_at or event.at
        time.tells(event)
        if not is_fenced(event.stamp, term):
            delays.note(event, entry.sequence)
        if isinstance(event, LeaderElected):
            term = max(term, event.term)
            timeline.elected.add(event.term)
        elif isinstance(event, RequestEvent) and event.request == request:
            timeline.entries.append(entry)
            if is_fenced(event.stamp, term):
                timeline.fenced.add(entry.sequence)
    timeline.passed_over = timeline.fenced | _told_again(timeline)
    counted = [entry.event for entry in timeline.entries if entry.sequence not in timeline.fenced]
    arrival = next((event for event in counted if isinstance(event, RequestArrived)), None)
    if arrival is not None:
        timeline.entries = [_by_leaders_clock(entry, arrival.clock_offset) for entry in timeline.entries]
    for entry in timeline.entries:
        if entry.event is not None and entry.sequence not in timeline.fenced:
            _note(timeline, entry.event)
    if arrival is not None and arrival.instead_of:
        timeline.failed[:0] = _failed_before(entries, arrival)
    timeline.last_at = time.now
    timeline.arrived_at = _arrived_at(timeline)
    until = timeline.last_at if timeline.ttft is None else timeline.arrived_at + timeline.ttft
    timeline.log_slow = delays.seconds_within(timeline.arrived_at, until)
    return timeline


def _told_again(timeline: RequestTimeline) -> set[Sequence]:
    """What its ingress told a new leader, who may not have known it, and the log has already."""
    told_again: set[Sequence] = set()
    newest: dict[type[LogEvent], tuple[int, InstanceId]] = {}
    for entry in timeline.entries:
        event = entry.event
        if entry.sequence in timeline.fenced or not isinstance(event, RequestGranted | RequestHandedOver):
            continue
        sent = event.attempt, event.instance
        if event.stamp is None and newest.get(type(event)) == sent:
            told_again.add(entry.sequence)
        newest[type(event)] = sent
    return told_again


def _failed_before(entries: Iterable[LogEntry], arrival: RequestArrived) -> list[RequestAttemptFailed]:
    """Attempts under each id that it had until its leader gave it up and its ingress asked again. Reads once for each."""
    failed: list[RequestAttemptFailed] = []
    ids = {arrival.request}
    while arrival.instead_of and arrival.instead_of not in ids:  # a forged log may go in circles
        ids.add(arrival.instead_of)
        own = [e.event for e in entries if isinstance(e.event, RequestEvent) and e.event.request == arrival.instead_of]
        earlier = next((event for event in own if isinstance(event, RequestArrived)), None)
        offset = arrival.clock_offset if earlier is None else earlier.clock_offset
        attempts = [event for event in own if isinstance(event, RequestAttemptFailed)]
        failed[:0] = [structs.replace(event, at=event.at + offset) for event in attempts]
        if earlier is None:
            break
        arrival = earlier
    return failed


def _by_leaders_clock(entry: LogEntry, offset: EngineSeconds) -> LogEntry:
    event = entry.event
    if isinstance(event, RequestArrived):
        event = structs.replace(event, arrived_at=event.arrived_at + offset)
    elif event is not None and event.stamp is None:
        event = structs.replace(event, at=event.at + offset)
    return structs.replace(entry, event=event)


def _note(timeline: RequestTimeline, event: LogEvent) -> None:
    match event:
        case RequestArrived():
            timeline.arrival = timeline.arrival or event
        case PrefillFinished():
            if event.stamp is None and timeline.first_token is None:
                timeline.first_token = event
        case PrefixFetchEnded():
            timeline.fetch = event
        case RequestAttemptFailed():
            timeline.failed.append(event)
        case _ if counts_as_end(event, timeline.end):
            timeline.end = event
        case _:
            pass


def _arrived_at(timeline: RequestTimeline) -> EngineSeconds:
    if timeline.arrival is not None:
        return timeline.arrival.arrived_at
    if isinstance(timeline.end, RequestFinished):
        return timeline.end.at - timeline.end.e2e
    if timeline.first_token is not None:
        return timeline.first_token.at - timeline.first_token.ttft
    first = timeline.entries[0].event
    assert first is not None
    return first.at


def _refused(timeline: RequestTimeline) -> list[tuple[Sequence, MigrationRefused]]:
    refused: dict[Stamp | None, tuple[Sequence, MigrationRefused]] = {}
    for entry in timeline.entries:
        if isinstance(entry.event, MigrationRefused) and entry.sequence not in timeline.fenced:
            refused.setdefault(entry.event.stamp, (entry.sequence, entry.event))
    return list(refused.values())


def phases_of(timeline: RequestTimeline) -> list[Phase]:
    arrival = timeline.arrival
    way = f"as request {arrival.instead_of}" if arrival is not None and arrival.instead_of else "to the scheduler"
    first = ("gone", "before its first entry that is left") if timeline.arrived_before_the_log else ("way", way)
    marks: list[tuple[EngineSeconds, str, str, InstanceId]] = [(timeline.arrived_at, *first, InstanceId(""))]
    for entry in timeline.entries:
        if entry.event is not None and entry.sequence not in timeline.passed_over:
            marks += _marks(entry.event, timeline)
    marks.sort(key=lambda mark: mark[0])  # an ingress's event may precede its cause in the log
    over = timeline.end.at if timeline.end else max(timeline.last_at, marks[-1][0])
    marks = [mark for mark in marks if mark[0] <= over]
    phases: list[Phase] = []
    for (at, kind, name, instance), following in zip(marks, [*marks[1:], (over, "", "", "")], strict=True):
        seconds = max(0.0, min(following[0], over) - at)
        if kind and (seconds or kind != "way"):
            phases.append(
                Phase(kind=kind, name=name, instance=instance, since_seconds=at - timeline.arrived_at, seconds=seconds)
            )
    return [phase for phase in phases if phase.seconds > 0] or phases


def _marks(event: LogEvent, timeline: RequestTimeline) -> list[tuple[EngineSeconds, str, str, InstanceId]]:
    match event:
        case RequestArrived():
            return [(event.at, "queue", "in no queue yet", InstanceId(""))]
        case RequestPlaced() | RequestMigrated():
            return [(event.at, "queue", f"in the queue of {event.instance}", event.instance)]
        case RequestGranted() if event.fetch_from:
            name = f"its prefix on the way from {event.fetch_from} to {event.instance}"
            return [(event.at, "transfer", name, event.instance)]
        case PrefixFetchEnded():
            return [(event.at, "engine", f"in {event.instance}, to the first token", event.instance)]
        case RequestGranted():
            until = "the end of its prefill" if _is_handed_over(timeline, event.attempt) else "the first token"
            inside = (f"in {event.instance}, to {until}", event.instance)
            first = timeline.first_token
            if first is None or first.instance != event.instance:
                return [(event.at, "engine", *inside)]
            sent_at = min(first.at, max(event.at, first.at - first.prefill))
            return [(event.at, "way", f"on its way to {event.instance}", event.instance), (sent_at, "engine", *inside)]
        case RequestHandedOver() if timeline.is_whole_answer:
            return [(event.at, "engine", f"in {event.instance}, to the whole answer", event.instance)]
        case RequestHandedOver():
            return [(event.at, "transfer", f"fetched by {event.instance}, to the first token", event.instance)]
        case PrefillFinished():
            if event is timeline.first_token:
                return [(event.at, "decoding", f"decoding in {event.instance}", event.instance)]
            return []
        case _:
            return []


def _is_handed_over(timeline: RequestTimeline, attempt: int) -> bool:
    events = (entry.event for entry in timeline.entries)
    return any(isinstance(event, RequestHandedOver) and event.attempt == attempt for event in events)
