"""A log in; a timeline out: instances in service, requests on time, remapped prefixes, drains. A request counts in the
stretch of its arrival."""

from collections.abc import Iterable

import msgspec

from pointsman.contracts.decisions import RequestGranted, RequestMigrated, RequestPlaced, RequestRejected, ScaleDecided
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft, InstanceUndrained
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestFailed
from pointsman.policies.hash_ring import candidate_pair
from pointsman.ports import LogEntry
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, RequestId
from pointsman.state.fleet import Status
from pointsman.state.state import PoolSettings, State

REMAP_MARGIN = 0.1


class Stretch(msgspec.Struct, kw_only=True):
    start_s: EngineSeconds
    requests: int = 0
    on_time: int = 0
    refused: int = 0
    failed: int = 0
    attainment: float | None = None


class Change(msgspec.Struct, kw_only=True):
    """One instance more or less in service. `remapped`: share of prefixes with another pair of candidates; `bound`: 2/n
    + 10%, n the larger size."""

    at_s: EngineSeconds
    before: int
    after: int
    prefixes: int
    remapped: float
    bound: float


class ScaleDecision(msgspec.Struct, kw_only=True):
    at_s: EngineSeconds
    current: int
    wanted: int
    reason: str


class Drained(msgspec.Struct, kw_only=True):
    """`had`: requests at the drain; `placed_after`: placed or moved there while it drained; `failed`: failed there from
    then on. `seconds`: engine time until it left, or null. `taken_back`: drain undone."""

    at_s: EngineSeconds
    instance: str
    had: int
    placed_after: int = 0
    failed: int = 0
    seconds: EngineSeconds | None = None
    taken_back: bool = False


class Timeline(msgspec.Struct, kw_only=True):
    stretch_s: EngineSeconds
    stretches: list[Stretch]
    sizes: list[tuple[EngineSeconds, int]]
    decisions: list[ScaleDecision]
    changes: list[Change]
    drains: list[Drained]


class TimelineReader:
    def __init__(self, settings: PoolSettings, *, stretch_s: EngineSeconds) -> None:
        self._state = State(settings)
        self._stretch_s = stretch_s
        self._start: EngineSeconds | None = None
        self._stretches: dict[int, Stretch] = {}
        self._arrivals: dict[RequestId, RequestArrived] = {}
        self._on_time: set[RequestId] = set()
        self._prefixes: set[BlockKey] = set()
        self._serving: tuple[InstanceId, ...] = ()
        self._sizes: list[tuple[EngineSeconds, int]] = []
        self._decisions: list[ScaleDecision] = []
        self._changes: list[tuple[EngineSeconds, tuple[InstanceId, ...], tuple[InstanceId, ...]]] = []
        self._drains: list[Drained] = []
        self._draining: dict[str, Drained] = {}

    def read(self, entries: Iterable[LogEntry]) -> Timeline:
        for entry in entries:
            self._before(entry)
            self._state.apply_entry(entry)
            self._after(entry)
        for stretch in self._stretches.values():
            stretch.attainment = stretch.on_time / stretch.requests if stretch.requests else None
        start = self._start or 0.0
        return Timeline(
            stretch_s=self._stretch_s,
            stretches=[self._stretches[number] for number in sorted(self._stretches)],
            sizes=[(at - start, size) for at, size in self._sizes],
            decisions=[msgspec.structs.replace(d, at_s=d.at_s - start) for d in self._decisions],
            changes=[self._change(at - start, before, after) for at, before, after in self._changes],
            drains=[msgspec.structs.replace(d, at_s=d.at_s - start) for d in self._drains],
        )

    def _before(self, entry: LogEntry) -> None:
        event = entry.event
        if isinstance(event, RequestFailed):
            if stretch := self._stretch_of(event.request):
                stretch.failed += 1
            if event.instance in self._draining:
                self._draining[event.instance].failed += 1
        elif isinstance(event, InstanceDraining):
            line = self._state.workload.queues.get(event.instance)
            drained = Drained(at_s=event.at, instance=event.instance, had=line.requests if line else 0)
            self._draining[event.instance] = drained
            self._drains.append(drained)
        elif isinstance(event, InstanceUndrained):
            if back := self._draining.pop(event.instance, None):
                back.taken_back = True
        elif isinstance(event, InstanceLeft) and event.instance in self._draining:
            drained = self._draining.pop(event.instance)
            drained.seconds = event.at - drained.at_s

    def _after(self, entry: LogEntry) -> None:
        event = entry.event
        match event:
            case RequestArrived():
                self._arrived(event)
            case PrefillFinished():
                self._first_token(event)
            case RequestRejected():
                if stretch := self._stretch_of(event.request):
                    stretch.refused += 1
            case RequestPlaced() | RequestMigrated():
                if event.instance in self._draining:
                    self._draining[event.instance].placed_after += 1
            case RequestGranted() if event.stamp is None and event.instance in self._draining:
                self._draining[event.instance].placed_after += 1
            case ScaleDecided():
                decided = ScaleDecision(at_s=event.at, current=event.current, wanted=event.wanted, reason=event.reason)
                self._decisions.append(decided)
            case _:
                pass
        if event is not None:
            self._note_size(event.at)

    def _arrived(self, event: RequestArrived) -> None:
        if self._start is None:
            self._start = event.arrived_at
        self._arrivals[event.request] = event
        if stretch := self._stretch_of(event.request):
            stretch.requests += 1
        request = self._state.workload.requests.get(event.request)
        key = self._state.hotness.affinity_key(request.keys) if request else None
        if key is not None:
            self._prefixes.add(key)

    def _first_token(self, event: PrefillFinished) -> None:
        arrival = self._arrivals.get(event.request)
        if arrival is None or event.request in self._on_time or event.stamp is not None:
            return
        if event.at <= arrival.arrived_at + arrival.slo_ttft and (stretch := self._stretch_of(event.request)):
            self._on_time.add(event.request)
            stretch.on_time += 1

    def _stretch_of(self, request: RequestId) -> Stretch | None:
        arrival = self._arrivals.get(request)
        if arrival is None or self._start is None:
            return None
        number = int((arrival.arrived_at - self._start) // self._stretch_s)
        return self._stretches.setdefault(number, Stretch(start_s=number * self._stretch_s))

    def _note_size(self, at: EngineSeconds) -> None:
        fleet = self._state.fleet
        serving = tuple(sorted(i.id for i in fleet.instances if i.status is Status.READY and i.answered))
        if serving == self._serving:
            return
        before, self._serving = self._serving, serving
        self._sizes.append((at, len(serving)))
        if before and serving and self._arrivals:
            self._changes.append((at, before, serving))

    def _change(self, at: EngineSeconds, before: tuple[InstanceId, ...], after: tuple[InstanceId, ...]) -> Change:
        remapped = sum(set(candidate_pair(before, key)) != set(candidate_pair(after, key)) for key in self._prefixes)
        return Change(
            at_s=at,
            before=len(before),
            after=len(after),
            prefixes=len(self._prefixes),
            remapped=remapped / max(1, len(self._prefixes)),
            bound=min(1.0, 2 / max(len(before), len(after)) + REMAP_MARGIN),
        )
