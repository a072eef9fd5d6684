"""One reading of a log: every entry is folded, and shown to each examiner before and after."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pointsman.contracts.codec import LogEvent
from pointsman.ports import LogEntry
from pointsman.primitives import Seconds
from pointsman.simulation.replay import take_in
from pointsman.state.state import PoolSettings, State
from pointsman.tooling.doctor.findings import Finding, in_order


class Examiner(ABC):
    """Looks for one kind of anomaly. `before` sees the state that an event is about to change, `after` what it has
    become; an event of a deposed leader changes nothing and is shown to neither."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings

    def wall(self, seconds: Seconds) -> Seconds:
        """Engine seconds as seconds of the wall."""
        return seconds / self.settings.speed

    def read(self, entry: LogEntry) -> None:  # noqa: B027 - most examiners need one of these
        """Every entry, also one that does not decode or that nobody applies."""

    def before(self, event: LogEvent, state: State) -> None:  # noqa: B027 - most examiners need one of these
        """The event is about to be applied."""

    def after(self, event: LogEvent, state: State) -> None:  # noqa: B027 - most examiners need one of these
        """The event was applied."""

    @abstractmethod
    def findings(self, state: State) -> Iterator[Finding]:
        """What is wrong, now that the log is read; `state` is that of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What came of it."""

    entries: int
    first_at: Seconds
    last_at: Seconds
    findings: list[Finding]


def examine(entries: Iterable[LogEntry], settings: PoolSettings, examiners: Sequence[Examiner]) -> Diagnosis:
    """Read the entries once. The examiners must be fresh."""
    state = State(settings)
    count, first_at = 0, 0.0
    for entry in entries:
        count += 1
        for examiner in examiners:
            examiner.read(entry)
        event = entry.event
        if event is None or (event.stamp is not None and event.stamp.term < state.term):
            take_in(state, entry)
            continue
        first_at = first_at or event.at
        for examiner in examiners:
            examiner.before(event, state)
        take_in(state, entry)
        for examiner in examiners:
            examiner.after(event, state)
    found = [finding for examiner in examiners for finding in examiner.findings(state)]
    return Diagnosis(entries=count, first_at=first_at, last_at=state.last_at, findings=in_order(found))
