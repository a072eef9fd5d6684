"""Splits a request's latency into phases."""

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestHandedOver, RequestMigrated, RequestPlaced
from pointsman.contracts.requests import PrefillFinished, PrefixFetchEnded, RequestArrived
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman_cli.explain.values import Phase, RequestTimeline


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
