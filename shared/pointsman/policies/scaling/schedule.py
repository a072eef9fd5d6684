"""Sizes by a cron table, in UTC. The entry that fired last applies, until a later `pointsman scale`. Five fields with
`*`, numbers, ranges, steps and lists; either day suffices if both are given, as in cron. Bias: ignores load."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.scaling import CLOCKS_APART_MAX
from pointsman.state.state import State

DAYS_BACK_MAX = 8 * 366
"""29 February may be eight years ago."""

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))


@dataclass(frozen=True, slots=True)
class CronTime:
    """Sunday is 0. `either_day`: both kinds of day are restricted, one is enough."""

    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool

    def last_firing(self, now: EngineSeconds) -> EngineSeconds | None:
        moment = datetime.fromtimestamp(now, UTC)
        for back in range(DAYS_BACK_MAX):
            day = moment.date() - timedelta(days=back)
            if self._fires_on(day):
                for fired in self._firings(day):
                    if fired <= moment:
                        return fired.timestamp()
        return None

    def _fires_on(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_month or by_week if self.either_day else by_month and by_week

    def _firings(self, day: date) -> Iterator[datetime]:
        for hour in reversed(self.hours):
            for minute in reversed(self.minutes):
                yield datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC)


@dataclass(frozen=True)
class Schedule(ScalingPolicy):
    """`times`: entries like `0 8 * * 1-5 = 8`, separated by semicolons."""

    name: ClassVar[str] = "schedule"
    by_date: ClassVar[bool] = True

    times: str = ""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        parse_table(self.times)

    @override
    def scale_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        fired = [(at, wanted, time.text) for time, wanted in parse_table(self.times) if (at := time.last_firing(now))]
        decided = state.scaling.decided
        if not fired:
            return ScaleTarget(size.wanted, "no entry has fired yet", deliberate=True)
        at, wanted, text = max(fired)
        if decided is not None and decided.by and at <= decided.at <= now + CLOCKS_APART_MAX:
            return ScaleTarget(size.wanted, f"decided after {text} fired", deliberate=True)
        return ScaleTarget(wanted, f"it is time: {text}", deliberate=True)


@lru_cache(maxsize=8)
def parse_table(times: str) -> tuple[tuple[CronTime, int], ...]:
    """Raises ValueError."""
    return tuple(_entry(text.strip()) for text in times.split(";") if text.strip())


def parse_cron(text: str) -> CronTime:
    """Raises ValueError."""
    parts = text.split()
    if len(parts) != len(FIELDS):
        raise ValueError(f"'{text}' has {len(parts)} fields; a time has five: minute hour day month weekday")
    minutes, hours, days, months, weekdays = (
        _allowed(part, name, lowest, highest) for part, (name, lowest, highest) in zip(parts, FIELDS, strict=True)
    )
    return CronTime(
        text=text,
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(day % 7 for day in weekdays),
        either_day=not parts[2].startswith("*") and not parts[4].startswith("*"),
    )


def _entry(text: str) -> tuple[CronTime, int]:
    time, equals, size = text.rpartition("=")
    if not equals or not size.strip().isdecimal():
        raise ValueError(f"'{text}' is not an entry; write for instance: 0 8 * * 1-5 = 8")
    return parse_cron(time.strip()), int(size)


def _allowed(text: str, name: str, lowest: int, highest: int) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        try:
            begin, end = (lowest, highest) if span == "*" else (int(first), int(last) if dash else int(first))
            stride = int(step) if slash else 1
            if slash and not dash and span != "*":
                end = highest
        except ValueError:
            raise ValueError(f"'{part}' is not a {name}") from None
        if not lowest <= begin <= end <= highest or stride < 1:
            raise ValueError(f"'{part}' is not a {name}: from {lowest} to {highest}")
        found.update(range(begin, end + 1, stride))
    return found
