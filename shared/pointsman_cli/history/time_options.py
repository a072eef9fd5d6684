"""A moment in a log, as people name it: a sequence, a time of day as `tap` prints it, a date and time, or engine time.

Times of day are the wall's, on the day that the log began or, where that is earlier than its beginning, on the next. A
moment in time ends before the first entry that happened after it: what came late was not known then.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import click

from pointsman.adapters.clocks import ANCHOR_UNIX_SECONDS
from pointsman.ports import LogEntry
from pointsman.primitives import Seconds, Sequence
from pointsman.state.state import State
from pointsman_cli.history.entries import History
from pointsman_cli.terminal import wall_time

SEQUENCE = re.compile(r"\d{1,15}")
ENGINE_TIME = re.compile(r"@(\d+(?:\.\d+)?)")
TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d{1,6})?)?")

HELP = "a sequence (4711), a time of day (07:31:05.250), a date and time (2026-11-21T07:31:05), or engine time (@1767225600.5)"


@dataclass(frozen=True, slots=True)
class Moment:
    """Behind entry `sequence`, or at engine time `at`. Whichever is None does not bound it."""

    sequence: Sequence | None = None
    at: Seconds | None = None

    def is_before(self, entry: LogEntry) -> bool:
        """Whether this entry is later than the moment."""
        if self.sequence is not None:
            return entry.sequence > self.sequence
        return self.at is not None and entry.event is not None and entry.event.at > self.at

    def is_behind(self, state: State) -> bool:
        """Whether this state knows of more than was known at the moment."""
        if self.sequence is not None:
            return state.sequence > self.sequence
        return self.at is not None and state.last_at > self.at


@dataclass(frozen=True, slots=True)
class UpTo:
    """Entries up to a moment; as re-readable as they are themselves."""

    entries: Iterable[LogEntry]
    moment: Moment

    def __iter__(self) -> Iterator[LogEntry]:
        if self.moment == Moment():
            return iter(self.entries)
        return itertools.takewhile(lambda entry: not self.moment.is_before(entry), self.entries)


def moment_in(history: History, text: str | None) -> Moment:
    """What `text` means for this log; no text is its end. Raises click.BadParameter."""
    if text is None:
        return Moment()
    if SEQUENCE.fullmatch(text):
        return Moment(sequence=_sequence_in(history, int(text)))
    if found := ENGINE_TIME.fullmatch(text):
        return Moment(at=float(found[1]))
    speed = history.settings.speed
    wall = _wall_time(text, _beginning(history, speed))
    return Moment(at=engine_time_of(wall, speed))


def _sequence_in(history: History, sequence: Sequence) -> Sequence:
    last = history.header.last
    if sequence < 1 or (last and sequence > last):
        end = f" and ends at entry {last:,}" if last else ""
        msg = f"there is no entry {sequence:,}: the log begins at entry {max(1, history.header.first):,}{end}"
        raise click.BadParameter(msg)
    return sequence


def engine_time_of(wall: Seconds, speed: float) -> Seconds:
    """Engine time at a Unix time: the inverse of `adapters.clocks.wall_time_of`."""
    return ANCHOR_UNIX_SECONDS + (wall - ANCHOR_UNIX_SECONDS) * speed


def _beginning(history: History, speed: float) -> datetime:
    """When the first event happened, in local time."""
    first = next((entry.event for entry in history if entry.event is not None), None)
    return wall_time(first.at if first else 0.0, speed)


def _wall_time(text: str, beginning: datetime) -> Seconds:
    try:
        if not TIME_OF_DAY.fullmatch(text):
            return datetime.fromisoformat(text).astimezone().timestamp()
        hour_text, minute_text, *second_text = text.split(":")
        seconds = float(second_text[0]) if second_text else 0.0
        moment = beginning.replace(hour=int(hour_text), minute=int(minute_text), second=int(seconds), microsecond=0)
        moment += timedelta(seconds=seconds % 1)
    except ValueError as error:
        msg = f"'{text}' is no moment: give {HELP}"
        raise click.BadParameter(msg) from error
    # The end of a minute or second that is named without its fraction belongs to it.
    whole = (
        timedelta(seconds=1) if second_text and "." not in text else timedelta(minutes=1) if not second_text else None
    )
    latest = moment + whole if whole else moment
    return (moment if latest >= beginning else moment + timedelta(days=1)).timestamp()
