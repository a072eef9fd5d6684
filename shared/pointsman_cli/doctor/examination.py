"""One reading of a log: every entry is folded, and shown to each examiner before and after."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pointsman.contracts.codec import LogEvent, short_reason
from pointsman.ports import LogEntry
from pointsman.primitives import Seconds
from pointsman.simulation.replay import apply_entry
from pointsman.simulation.replay.folding import copy_state
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.findings import Finding, Severity, in_order
from pointsman_cli.history.start_point import StartPoint


class Examiner(ABC):
    """Looks for one kind of anomaly. `before` sees the state that an event is about to change, `after` what it has
    become; an event of a deposed leader changes nothing and is shown to neither."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings

    def wall(self, seconds: Seconds) -> Seconds:
        """Engine seconds as seconds of the wall."""
        return seconds / self.settings.speed

    def begin(self, state: State, *, blind: bool) -> None:  # noqa: B027 - most examiners need one of these
        """What is known before the first entry is read. `blind`: entries are gone of which nothing is known, so that what
        the state does not have may have been."""

    def read(self, entry: LogEntry) -> None:  # noqa: B027 - most examiners need one of these
        """Every entry, also one that does not decode or that nobody applies."""

    def before(self, event: LogEvent, state: State) -> None:  # noqa: B027 - most examiners need one of these
        """The event is about to be applied."""

    def after(self, event: LogEvent, state: State) -> None:  # noqa: B027 - most examiners need one of these
        """The event was applied."""

    def summary(self) -> Iterator[str]:
        """What is worth knowing of any log, healthy or not."""
        yield from ()

    @abstractmethod
    def findings(self, state: State) -> Iterator[Finding]:
        """What is wrong, now that the log is read; `state` is that of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What came of it."""

    entries: int
    first_at: Seconds
    last_at: Seconds
    summary: list[str]
    findings: list[Finding]


def examine(
    entries: Iterable[LogEntry], settings: PoolSettings, examiners: Sequence[Examiner], beginning: StartPoint
) -> Diagnosis:
    """Read the entries once, from `beginning.start` on. The examiners must be fresh."""
    state = State(settings) if beginning.state is None else copy_state(beginning.state)
    board = _Board(examiners)
    board.each(lambda examiner: examiner.begin(state, blind=beginning.is_blind), state)
    count, first_at = 0, 0.0
    for entry in entries:
        count += 1
        board.each(lambda examiner: examiner.read(entry), state)  # noqa: B023 - called at once
        event = entry.event
        if event is None or (event.stamp is not None and event.stamp.term < state.term):
            apply_entry(state, entry)
            continue
        first_at = first_at or event.at
        board.each(lambda examiner: examiner.before(event, state), state)  # noqa: B023
        apply_entry(state, entry)
        board.each(lambda examiner: examiner.after(event, state), state)  # noqa: B023
    found: list[Finding] = []
    summary: list[str] = []
    board.each(lambda examiner: found.extend(examiner.findings(state)), state)
    board.each(lambda examiner: summary.extend(examiner.summary()), state)
    found += board.stopped
    return Diagnosis(entries=count, first_at=first_at, last_at=state.last_at, summary=summary, findings=in_order(found))


class _Board:
    """The examiners that still examine: what one of them fails on ends that one, and becomes a finding."""

    def __init__(self, examiners: Sequence[Examiner]) -> None:
        self._examiners = list(examiners)
        self.stopped: list[Finding] = []

    def each(self, step: Callable[[Examiner], None], state: State) -> None:
        for examiner in self._examiners:
            try:
                step(examiner)
            except Exception as error:  # noqa: BLE001 - the others still have something to say
                self._stop(examiner, error, state)

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
