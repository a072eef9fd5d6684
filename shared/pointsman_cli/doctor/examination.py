"""Folds a log once and passes each event to every examiner, before and after it is applied."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pointsman.analysis.log_delays import LogDelays
from pointsman.analysis.log_time import LogTime
from pointsman.contracts.codec import LogEvent, short_reason
from pointsman.contracts.decisions import RequestEnd
from pointsman.contracts.envelope import is_fenced
from pointsman.contracts.requests import RequestArrived
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds
from pointsman.simulation.replay.folding import copy_state
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.findings import Finding, Severity, in_order
from pointsman_cli.doctor.ingress_hangs import IngressHangs
from pointsman_cli.doctor.request_ends import Ended, RequestEnds
from pointsman_cli.explain.causes import Cause
from pointsman_cli.history.start_point import StartPoint


class Examiner(ABC):
    """Detects one kind of anomaly, in bounded memory. Events of deposed leaders are left out."""

    area: ClassVar[str]

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.hangs = IngressHangs(settings.speed)
        """Shared by the examiners of a log; has noted the event that an examiner gets."""
        self.time = LogTime(settings.speed)
        self.delays = LogDelays(settings.speed)
        """Shared too; both have noted an event once it is applied."""

    def wall(self, seconds: EngineSeconds) -> EngineSeconds:
        return seconds / self.settings.speed

    def finding(
        self,
        severity: Severity,
        what: str,
        evidence: Iterable[str] = (),
        advice: str = "",
        *,
        cause: Cause | None = None,
    ) -> Finding:
        """`cause`: of slow requests, if this explains them."""
        return Finding(
            severity=severity, area=self.area, what=what, evidence=list(evidence), advice=advice, cause=cause
        )

    def serious(self, what: str, evidence: Iterable[str] = (), advice: str = "") -> Finding:
        return self.finding(Severity.SERIOUS, what, evidence, advice)

    def ongoing(self, what: str, evidence: Iterable[str] = (), advice: str = "") -> Finding:
        return replace(self.serious(what, evidence, advice), ongoing=True)

    def warning(
        self, what: str, evidence: Iterable[str] = (), advice: str = "", *, cause: Cause | None = None
    ) -> Finding:
        return self.finding(Severity.WARNING, what, evidence, advice, cause=cause)

    def note(self, what: str, evidence: Iterable[str] = (), advice: str = "") -> Finding:
        return self.finding(Severity.NOTE, what, evidence, advice)

    def begin(self, state: State, *, blind: bool) -> None:  # noqa: B027 - most examiners need one of these
        """The state before the first entry. `blind`: earlier entries are missing, without a checkpoint."""

    def read(self, entry: LogEntry) -> None:  # noqa: B027 - most examiners need one of these
        """Every entry, also undecodable and ineffective ones."""

    def before(self, event: LogEvent, state: State) -> None:  # noqa: B027 - most examiners need one of these
        """Before the event is applied."""

    def ended(self, end: Ended, state: State) -> None:  # noqa: B027 - most examiners need one of these
        """Once for each request that ended, before its end is applied; of one that could have come again, at the end of
        the log."""

    def ended_again(self, event: RequestEnd, earlier: str) -> None:  # noqa: B027 - most examiners need one of these
        """A second end, of a request whose end of type `earlier` counts."""

    def after(self, event: LogEvent, state: State) -> None:  # noqa: B027 - most examiners need one of these
        """After the event was applied."""

    def summary(self) -> Iterator[str]:
        """Lines printed for every log."""
        yield from ()

    @abstractmethod
    def findings(self, state: State) -> Iterator[Finding]:
        """After the whole log, with its final state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    entries: int
    first_at: EngineSeconds
    last_at: EngineSeconds
    summary: list[str]
    findings: list[Finding]


def examine(
    entries: Iterable[LogEntry], settings: PoolSettings, examiners: Sequence[Examiner], beginning: StartPoint
) -> Diagnosis:
    state = State(settings) if beginning.state is None else copy_state(beginning.state)
    runner, ends, hangs = _ExaminerRunner(examiners), RequestEnds(), IngressHangs(settings.speed)
    time, delays = LogTime(settings.speed), LogDelays(settings.speed)
    time.now = state.last_at
    for examiner in examiners:
        examiner.hangs, examiner.time, examiner.delays = hangs, time, delays
    runner.each(lambda examiner: examiner.begin(state, blind=beginning.is_blind), state)
    count, first_at = 0, 0.0
    for entry in entries:
        count += 1
        runner.each(lambda examiner: examiner.read(entry), state)  # noqa: B023 - called at once
        event = entry.event
        if event is None or is_fenced(event.stamp, state.term):
            state.apply_entry(entry)
            continue
        first_at = first_at or event.at
        hangs.note(event)
        runner.each(lambda examiner: examiner.before(event, state), state)  # noqa: B023
        if isinstance(event, RequestEnd):
            runner.end(event, ends, state)
        state.apply_entry(entry)
        time.tells(event)
        delays.note(event, entry.sequence)
        if isinstance(event, RequestArrived):
            ends.arrive(event, state)
        runner.each(lambda examiner: examiner.after(event, state), state)  # noqa: B023
    runner.ended(ends.held_back(), state)
    found: list[Finding] = []
    summary: list[str] = []
    runner.each(lambda examiner: found.extend(examiner.findings(state)), state)
    runner.each(lambda examiner: summary.extend(examiner.summary()), state)
    found += runner.stopped
    return Diagnosis(entries=count, first_at=first_at, last_at=time.now, summary=summary, findings=in_order(found))


class _ExaminerRunner:
    """Runs the examiners. One that raises is stopped and reported as a finding."""

    def __init__(self, examiners: Sequence[Examiner]) -> None:
        self._examiners = list(examiners)
        self.stopped: list[Finding] = []

    def each(self, step: Callable[[Examiner], None], state: State) -> None:
        for examiner in self._examiners:
            try:
                step(examiner)
            except Exception as error:  # noqa: BLE001 - the others go on
                self._stop(examiner, error, state)

    def end(self, event: RequestEnd, ends: RequestEnds, state: State) -> None:
        earlier = ends.earlier(event, state)
        if earlier is None:
            self.ended(ends.take(event, state), state)
        else:
            self.each(lambda examiner: examiner.ended_again(event, earlier), state)

    def ended(self, found: Iterable[Ended], state: State) -> None:
        for end in found:
            self.each(lambda examiner: examiner.ended(end, state), state)  # noqa: B023 - called at once

    def _stop(self, examiner: Examiner, error: Exception, state: State) -> None:
        self._examiners = [other for other in self._examiners if other is not examiner]
        self.stopped.append(
            Finding(
                severity=Severity.WARNING,
                area="doctor",
                what=f"the examination of {type(examiner).__name__} stopped at entry {state.sequence:,}",
                evidence=[short_reason(f"{type(error).__name__}: {error}")],
                advice="The log has entries that it does not expect there. Export this log and report it.",
            )
        )
