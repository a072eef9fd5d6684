"""Engines that are slow, always or for a while: prefill times over the cost model, with the cached tokens that were
delivered. Missed hits are known only when the answers end, so paces are reckoned at the end of the log."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from typing_extensions import override

from pointsman.analysis.lateness_rules import SLOW_FACTOR_MIN, STALL_FACTOR
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.requests import PrefillFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import EMPTY_QUEUE
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity
from pointsman_cli.doctor.missed_hits import MissedHits
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.doctor.samples import Sample, keep
from pointsman_cli.explain.causes import Cause
from pointsman_cli.explain.prefills import prefilled
from pointsman_cli.options import as_given
from pointsman_cli.terminal import wall_span

PREFILLS_MIN = 20
COMPARED_MIN = 5
"""Prefills of an engine that others are compared with."""
SLOW_SERIOUS_FACTOR = 2.5
SLOW_SHARE_OF_OBJECTIVE = 0.02
"""Of the SLO, that the median prefill is too long by: less is the overhead of short ones."""
STALL_SHARE_OF_OBJECTIVE = 0.1
"""A stalled prefill exceeds the cost model by STALL_FACTOR, and by this share of the SLO."""
STALLS_MIN = 3
"""In one stretch. Few, since policies avoid a slow engine; others may end between them."""
STRETCH_SHARE_OF_OBJECTIVE = 0.5
"""Least time that its stalled prefills take together; those side by side count once."""
STRETCH_GAP_WALL_SECONDS = 30.0
STALLS_MAX = 4096
STRETCHES_SHOWN = 5
IN_PREFILL_MAX = 20_000
AHEAD_MAX = 64


@dataclass(frozen=True, slots=True)
class _Prefill:
    at: EngineSeconds
    took: EngineSeconds
    work: EngineSeconds
    objective: EngineSeconds
    request: RequestId
    ahead: tuple[RequestId, ...]


@dataclass(slots=True)
class _Engine:
    prefills: Sample[_Prefill] = field(default_factory=Sample)
    stalls: list[_Prefill] = field(default_factory=list)
    """With the predicted hits; checked again at the end."""


class SlowEngines(Examiner):
    area = "engines"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._engines: dict[InstanceId, _Engine] = {}
        self._missed = MissedHits()
        self._ahead: dict[RequestId, tuple[RequestId, ...]] = {}

    @override
    def before(self, event: LogEvent, state: State) -> None:
        match event:
            case RequestGranted():
                queue = state.workload.queues.get(event.instance, EMPTY_QUEUE)
                if queue.prefill:
                    keep(self._ahead, event.request, tuple(queue.prefill)[:AHEAD_MAX], IN_PREFILL_MAX)
            case PrefillFinished():
                self._first_token(event, state)
            case _:
                pass

    @override
    def ended(self, end: Ended, state: State) -> None:
        self._missed.note(end, state)

    def _first_token(self, event: PrefillFinished, state: State) -> None:
        found = prefilled(event, state)
        if found is None or found[0].engine_seconds <= 0 or self.hangs.of_attempt(event) is not None:
            return
        request, at = found
        ahead = self._ahead.pop(event.request, ())
        took, work = at - request.granted_at, request.engine_seconds
        prefill = _Prefill(at, took, work, request.slo_ttft, request.id, ahead)
        engine = self._engines.setdefault(event.instance, _Engine())
        engine.prefills.add(prefill)
        if _stalls(prefill, work) and len(engine.stalls) < STALLS_MAX:
            engine.stalls.append(prefill)

    def _work(self, prefill: _Prefill) -> EngineSeconds:
        missed = sum(map(self._missed.seconds, prefill.ahead)) + self._missed.seconds(prefill.request)
        return prefill.work + missed

    def _pace(self, prefill: _Prefill) -> float:
        return prefill.took / self._work(prefill)

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        paces = {
            name: median(map(self._pace, engine.prefills.values))
            for name, engine in sorted(self._engines.items())
            if engine.prefills.seen >= COMPARED_MIN
        }
        slow: set[InstanceId] = set()
        for name, pace in paces.items():
            if self._engines[name].prefills.seen < PREFILLS_MIN:
                continue
            others = [value for other, value in paces.items() if other != name]
            usual = max(1.0, median(others)) if others else 1.0
            if pace >= SLOW_FACTOR_MIN * usual and self._is_noticed(self._engines[name].prefills.values, usual):
                slow.add(name)
                yield self._slow(name, pace, usual, paces)
        stretches = {
            name: found for name in sorted(self._engines) if name not in slow and (found := self._stretches(name))
        }
        if stretches:
            worst = max(stretches, key=lambda name: max(stall.took for stall in stretches[name][0]))
            named = f"{', '.join(stretches)}; " + (f"{worst}: " if len(stretches) > 1 else "")
            yield self.warning(
                f"slow for a while: {named}{self._summary(stretches[worst][0])}",
                [
                    f"{name}: {self._line(stalls)}"
                    for name, found in stretches.items()
                    for stalls in found[:STRETCHES_SHOWN]
                ],
                f"Something held the engine or its machine up then: `pointsman explain{as_given()}` the request says whether others were slow, too.",
                cause=Cause.SLOW_ENGINE,
            )

    def _is_noticed(self, prefills: list[_Prefill], usual: float) -> bool:
        extra = median((p.took - usual * self._work(p)) / max(p.objective, 1e-9) for p in prefills)
        return extra > SLOW_SHARE_OF_OBJECTIVE

    def _slow(self, name: InstanceId, pace: float, usual: float, paces: dict[InstanceId, float]) -> Finding:
        of_others = f", others {usual:.1f} times" if len(paces) > 1 else ""
        return self.finding(
            Severity.SERIOUS if pace > SLOW_SERIOUS_FACTOR * usual else Severity.WARNING,
            f"{name} is slow: its prefills take {pace:.1f} times what its cost model says{of_others}",
            [
                f"{other}: {value:.2f} times, median of {self._engines[other].prefills.seen:,}"
                for other, value in paces.items()
            ],
            "Compare its machine with the others' (clock rate, neighbours, other tenants); drain it if need be."
            if len(paces) > 1
            else "Nothing to compare it with: measure it (pointsman calibrate URL), or look at its machine.",
            cause=Cause.SLOW_ENGINE,
        )

    def _stretches(self, name: InstanceId) -> list[list[_Prefill]]:
        """Stalls with no long gap between them, three at least; the worst first."""
        found: list[list[_Prefill]] = []
        for stall in self._engines[name].stalls:
            if not _stalls(stall, self._work(stall)):
                continue
            if found and self.wall(stall.at - found[-1][-1].at) < STRETCH_GAP_WALL_SECONDS:
                found[-1].append(stall)
            else:
                found.append([stall])
        enough = [stalls for stalls in found if len(stalls) >= STALLS_MIN and _is_long(stalls)]
        return sorted(enough, key=lambda stalls: -max(stall.took for stall in stalls))

    def _summary(self, stalls: list[_Prefill]) -> str:
        return f"{len(stalls)} prefills took {median(map(self._pace, stalls)):.1f} times what the cost model says"

    def _line(self, stalls: list[_Prefill]) -> str:
        span = wall_span(stalls[0].at, stalls[-1].at, self.settings.speed)
        longest = max(stalls, key=lambda stall: stall.took)
        return f"{span}: {self._summary(stalls)}, the longest {longest.took:.2f} s (request {longest.request})"


def _stalls(prefill: _Prefill, work: EngineSeconds) -> bool:
    extra = prefill.took - work
    return prefill.took >= STALL_FACTOR * work and extra > STALL_SHARE_OF_OBJECTIVE * prefill.objective


def _is_long(stalls: list[_Prefill]) -> bool:
    together, until = 0.0, float("-inf")
    for stall in stalls:
        together += max(0.0, stall.at - max(until, stall.at - stall.took))
        until = max(until, stall.at)
    return together > STRETCH_SHARE_OF_OBJECTIVE * max(stall.objective for stall in stalls)
