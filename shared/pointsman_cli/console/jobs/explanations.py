"""What `explain` says of one request, as a view."""

from msgspec.structs import asdict

from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.primitives import RequestId, Sequence
from pointsman_cli.console.jobs.views import ArrivalView, EventView, PhaseView, RefusedMoveView, TimelineView
from pointsman_cli.explain.candidates import as_listed
from pointsman_cli.explain.diagnosis import headline, reasons_and_details, verdict
from pointsman_cli.explain.lookup import Found, request_named
from pointsman_cli.explain.values import RequestTimeline, blocks_of
from pointsman_cli.explain.wait import instance_of
from pointsman_cli.explain.window import timeline_around
from pointsman_cli.history.sources import History
from pointsman_cli.tap import event_lines
from pointsman_cli.terminal import wall_time

EVENTS_MAX = 200


def timeline_of_request(history: History, text: str, *, first: Sequence = 0) -> TimelineView:
    """`text`: an id or an end of it. `first`: its first entry in the log, if known. Raises HistoryError."""
    found = Found(RequestId(text), first) if first else request_named(history, text, history.entries)
    return _view(timeline_around(history, found, history.entries), history.origin)


def _view(timeline: RequestTimeline, origin: str) -> TimelineView:
    found, (reasons, details) = verdict(timeline), reasons_and_details(timeline)
    arrival, placement = timeline.arrival, timeline.placement
    end = timeline.end if isinstance(timeline.end, RequestFinished) else None
    slo = arrival.slo_ttft if arrival else None
    return TimelineView(
        request=timeline.request,
        origin=origin,
        note=timeline.note,
        arrived_at=wall_time(timeline.arrived_at, timeline.speed).timestamp(),
        headline=headline(timeline),
        cause=str(found.cause),
        verdict=found.sentence,
        reasons=reasons,
        details=details,
        ttft=timeline.ttft,
        slo_ttft=slo,
        late=slo is not None and timeline.ttft is not None and timeline.ttft > slo,
        tenant=arrival.tenant if arrival else "",
        instance=instance_of(timeline),
        prompt_tokens=arrival.prompt_tokens if arrival else -1,
        cached_tokens=end.cached_tokens if end else -1,
        predicted_cached_tokens=placement.predicted_cached_tokens if placement else -1,
        predicted_ttft=placement.predicted_ttft if placement else None,
        predicted_ttft_upper=placement.predicted_ttft_upper if placement else None,
        phases=_phases(timeline),
        arrival=_arrival(arrival) if arrival else None,
        decisions=[as_listed(decision) for decision in timeline.decisions],
        grants=timeline.grants,
        failed_attempts=timeline.failed,
        refused_moves=[RefusedMoveView(**asdict(event), sequence=entry) for entry, event in timeline.refused],
        events=_events(timeline),
    )


def _arrival(arrival: RequestArrived) -> ArrivalView:
    return ArrivalView(**asdict(arrival) | {"keys": b""}, blocks=blocks_of(arrival))


def _phases(timeline: RequestTimeline) -> list[PhaseView]:
    whole = max((phase.since_seconds + phase.seconds for phase in timeline.phases), default=0.0) or 1.0
    return [
        PhaseView(
            kind=phase.kind,
            name=phase.name,
            instance=phase.instance,
            since_seconds=phase.since_seconds,
            seconds=phase.seconds,
            since_share=round(phase.since_seconds / whole, 4),
            share=round(phase.seconds / whole, 4),
        )
        for phase in timeline.phases
    ]


def _events(timeline: RequestTimeline) -> list[EventView]:
    return [
        EventView(
            sequence=entry.sequence,
            at=wall_time(entry.event.at, timeline.speed).timestamp(),
            after_seconds=round(entry.event.at - timeline.arrived_at, 3),
            kind=type(entry.event).__name__,
            text=event_lines.details(entry.event),
            without_effect=entry.sequence in timeline.fenced,
        )
        for entry in timeline.entries[:EVENTS_MAX]
        if entry.event is not None
    ]
