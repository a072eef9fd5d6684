"""Moments of `--since` and `--until`. A time of day is local: the first one in the log, or of a log that is still written the
last one; for `--since`, one before the log begins is its beginning. A time is reached where `LogTime` reaches it: an event with
a wrong clock does not count."""

import itertools
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

import click
import msgspec
from typing_extensions import override

from pointsman.analysis.log_time import AHEAD_WALL_SECONDS_MAX, SEARCHED_ENTRIES_MAX, LogTime, Passed, leader_time
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, Sequence, engine_seconds, engine_time_of
from pointsman.simulation.replay import BaseState
from pointsman.state.state import PoolSettings, State
from pointsman_cli.history.entries import History
from pointsman_cli.options import MOMENT_HELP
from pointsman_cli.terminal import wall_time

SEQUENCE = re.compile(r"\d{1,15}")
ENGINE_TIME = re.compile(r"@(\d+(?:\.\d+)?)")
NOW = "now"
TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d{1,6})?)?")


@dataclass(frozen=True, slots=True)
class Moment:
    """After entry `sequence`, or at engine time `at`; with neither, the end of the log. `leader_at`: what its leader's
    clock showed near the log's beginning, if known."""

    sequence: Sequence | None = None
    at: EngineSeconds | None = None
    speed: float = field(default=1.0, compare=False)
    leader_at: EngineSeconds | None = field(default=None, compare=False)

    def passed(self) -> Passed:
        """Whether an entry is behind this moment. Each call is for one reading, which passes every entry, in order."""
        sequence, at = self.sequence, self.at
        if sequence is not None:
            return lambda entry: entry.sequence > sequence
        if at is None:
            return lambda _entry: False
        time = LogTime(self.speed, leader_at=self.leader_at)
        return lambda entry: entry.event is not None and time.tells(entry.event) and entry.event.at > at

    def reached(self) -> Passed:
        """As `passed`, but true also of entry `sequence` itself, with which `--since` begins."""
        passed = self.passed()
        return lambda entry: passed(entry) or entry.sequence == self.sequence

    def is_behind(self, state: State, history: History) -> bool:
        """`state`: of a checkpoint of this log."""
        if self.sequence is not None:
            return state.sequence > self.sequence
        return self.at is not None and state.last_at > self.at and self._last_at(state, history) > self.at

    def _last_at(self, state: State, history: History) -> EngineSeconds:
        """One event with a wrong clock may have set that of the state."""
        with closing(history.entries(state.sequence)) as entries:
            time = LogTime(self.speed, leader_at=leader_time(entries))
        return state.last_at if time.believes(state.last_at) else time.now


@dataclass(frozen=True, slots=True)
class UpTo:
    entries: Iterable[LogEntry]
    moment: Moment

    def __iter__(self) -> Iterator[LogEntry]:
        if self.moment == Moment():
            return iter(self.entries)
        passed = self.moment.passed()
        return itertools.takewhile(lambda entry: not passed(entry), self.entries)


def moment_in(history: History, text: str | None, *, begins: bool = False) -> Moment:
    """Without text, the end of the log. `begins`: of `--since`, for which a time of day is never to come. Raises
    click.BadParameter."""
    if text is None or text == NOW:
        return Moment()
    if SEQUENCE.fullmatch(text):
        return Moment(sequence=_sequence_in(history, int(text)))
    speed = history.settings.speed
    with closing(history.entries()) as entries:
        leader_at = leader_time(entries)
    if found := ENGINE_TIME.fullmatch(text):
        at = float(found[1])
    else:
        now = datetime.now().astimezone() if history.extent is not None else None
        at = engine_time_of(_wall_time(text, _beginning(history, speed, leader_at), now, begins=begins), speed)
    return Moment(at=at, speed=speed, leader_at=leader_at)


def shortly_before(history: History, moment: Moment) -> Sequence:
    """An entry from which reading reaches `moment`. By halving, with the clocks of leaders."""
    if moment.sequence is not None:
        return moment.sequence
    low, high = max(1, history.header.first), history.header.last
    if moment.at is None or not history.is_seekable:
        return low
    at = moment.at - engine_seconds(AHEAD_WALL_SECONDS_MAX, moment.speed)
    while high - low > SEARCHED_ENTRIES_MAX:
        middle = (low + high) // 2
        with closing(history.entries(middle)) as entries:
            leader_at = leader_time(entries)
        if leader_at is not None and leader_at < at:
            low = middle
        else:
            high = middle
    return low


def _sequence_in(history: History, sequence: Sequence) -> Sequence:
    last = history.header.last
    if sequence < 1 or (last and sequence > last):
        end = f" and ends at entry {last:,}" if last else ""
        raise click.BadParameter(f"there is no entry {sequence:,}: {history.begins}{end}")
    return sequence


def _beginning(history: History, speed: float, leader_at: EngineSeconds | None) -> datetime:
    time = LogTime(speed, leader_at=leader_at)
    with closing(history.entries()) as entries:
        first = next((entry.event for entry in entries if entry.event is not None and time.tells(entry.event)), None)
    return wall_time(first.at if first else 0.0, speed)


def _wall_time(text: str, beginning: datetime, now: datetime | None, *, begins: bool) -> EngineSeconds:
    """`now`: of a log that is still written."""
    try:
        if not TIME_OF_DAY.fullmatch(text):
            return datetime.fromisoformat(text).astimezone().timestamp()
        hour_text, minute_text, *second_text = text.split(":")
        seconds = float(second_text[0]) if second_text else 0.0
        moment = beginning.replace(hour=int(hour_text), minute=int(minute_text), second=int(seconds), microsecond=0)
        moment += timedelta(seconds=seconds % 1)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(f"'{text}' is no moment: give {MOMENT_HELP}") from error
    # Without a fraction, the whole second or minute is meant.
    whole = (
        timedelta(seconds=1) if second_text and "." not in text else timedelta(minutes=1) if not second_text else None
    )
    latest, day = moment + whole if whole else moment, timedelta(days=1)
    if latest < beginning and not (begins and now is None):
        moment += day
    if now is not None:
        moment += day * max(-1 if begins else 0, (now - moment) // day)
    return moment.timestamp()


class BoundedHistory(History):
    """A recorded log up to a moment: to its readers, what comes behind it is not there. Its header still names the log's last entry
    if `until` is a time."""

    def __init__(self, history: History, until: Moment) -> None:
        self._history = history
        self._until = until
        self.origin = history.origin
        last = history.header.last if until.sequence is None else until.sequence
        self.header = msgspec.structs.replace(history.header, last=last, entries=0)

    @property
    @override
    def begins(self) -> str:
        return self._history.begins

    @cached_property
    @override
    def known(self) -> BaseState | None:
        return self._unless_behind(self._history.known)

    @cached_property
    @override
    def settings(self) -> PoolSettings:
        return self._history.settings

    @cached_property
    @override
    def guesses_settings(self) -> bool:
        return self._history.guesses_settings

    @override
    def known_before(self, sequence: Sequence) -> BaseState | None:
        return self._unless_behind(self._history.known_before(sequence))

    @override
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        with closing(self._history.entries(start)) as entries:
            yield from UpTo(entries, self._until)

    def _unless_behind(self, known: BaseState | None) -> BaseState | None:
        return None if known is not None and self._until.is_behind(known.state, self._history) else known
