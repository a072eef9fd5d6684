"""Moments of `--since` and `--until`. A time of day is local, within a day of the log's beginning."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import click

from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, Sequence, engine_time_of
from pointsman.state.state import State
from pointsman_cli.history.entries import History
from pointsman_cli.options import MOMENT_HELP
from pointsman_cli.terminal import wall_time

SEQUENCE = re.compile(r"\d{1,15}")
ENGINE_TIME = re.compile(r"@(\d+(?:\.\d+)?)")
NOW = "now"
TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d{1,6})?)?")


@dataclass(frozen=True, slots=True)
class Moment:
    """After entry `sequence`, or at engine time `at`; with neither, the end of the log."""

    sequence: Sequence | None = None
    at: EngineSeconds | None = None

    def is_before(self, entry: LogEntry) -> bool:
        if self.sequence is not None:
            return entry.sequence > self.sequence
        return self.at is not None and entry.event is not None and entry.event.at > self.at

    def is_reached_by(self, entry: LogEntry) -> bool:
        """Whether what `--since` selects begins with this entry or before it."""
        return self.is_before(entry) or entry.sequence == self.sequence

    def is_behind(self, state: State) -> bool:
        if self.sequence is not None:
            return state.sequence > self.sequence
        return self.at is not None and state.last_at > self.at


@dataclass(frozen=True, slots=True)
class UpTo:
    entries: Iterable[LogEntry]
    moment: Moment

    def __iter__(self) -> Iterator[LogEntry]:
        if self.moment == Moment():
            return iter(self.entries)
        return itertools.takewhile(lambda entry: not self.moment.is_before(entry), self.entries)


def moment_in(history: History, text: str | None) -> Moment:
    """Raises click.BadParameter. Without text, the end of the log."""
    if text is None or text == NOW:
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
        msg = f"there is no entry {sequence:,}: {history.begins}{end}"
        raise click.BadParameter(msg)
    return sequence


def _beginning(history: History, speed: float) -> datetime:
    first = next((entry.event for entry in history if entry.event is not None), None)
    return wall_time(first.at if first else 0.0, speed)


def _wall_time(text: str, beginning: datetime) -> EngineSeconds:
    try:
        if not TIME_OF_DAY.fullmatch(text):
            return datetime.fromisoformat(text).astimezone().timestamp()
        hour_text, minute_text, *second_text = text.split(":")
        seconds = float(second_text[0]) if second_text else 0.0
        moment = beginning.replace(hour=int(hour_text), minute=int(minute_text), second=int(seconds), microsecond=0)
        moment += timedelta(seconds=seconds % 1)
    except (ValueError, OverflowError) as error:
        msg = f"'{text}' is no moment: give {MOMENT_HELP}"
        raise click.BadParameter(msg) from error
    # Without a fraction, the whole second or minute is meant.
    whole = (
        timedelta(seconds=1) if second_text and "." not in text else timedelta(minutes=1) if not second_text else None
    )
    latest = moment + whole if whole else moment
    return (moment if latest >= beginning else moment + timedelta(days=1)).timestamp()
