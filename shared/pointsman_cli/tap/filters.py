"""Selects events by subject (NATS patterns, with or without `pm.<pool>.`), type, request and instance."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import get_args

from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import MigrationRefused, RequestMigrated
from pointsman.contracts.fleet import FleetEvent
from pointsman.contracts.subjects import SUBJECT_ROOT
from pointsman.ports import LogEntry

EVENT_TYPES = tuple(sorted(event.__name__ for event in get_args(LogEvent)))


class BadPatternError(ValueError):
    """A malformed subject, or an unknown type."""


@dataclass(frozen=True, slots=True)
class SubjectPattern:
    tokens: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        literal: list[str] = []
        for token in self.tokens:
            if token in ("*", ">"):
                break
            literal.append(token)
        return (".".join(literal),) if literal else ()

    def matches(self, subject: str) -> bool:
        own = subject.split(".")[2:]
        for place, token in enumerate(self.tokens):
            if token == ">":
                return len(own) > place
            if place >= len(own) or token not in ("*", own[place]):
                return False
        return len(own) == len(self.tokens) or len(self.tokens) < 2


def subject_pattern(text: str) -> tuple[str | None, SubjectPattern]:
    """Returns the pool, if the pattern names one, and the pattern. Raises BadPatternError."""
    tokens = text.split(".") if text else []
    if any(not token or (token == ">" and place < len(tokens) - 1) for place, token in enumerate(tokens)):
        raise BadPatternError(f"'{text}' is not a subject: tokens between dots, * for one of them, > for the rest")
    if tokens[:1] != [SUBJECT_ROOT]:
        return None, SubjectPattern(tuple(tokens))
    pool = tokens[1] if len(tokens) > 1 and tokens[1] not in ("*", ">") else None
    return pool, SubjectPattern(tuple(tokens[2:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """All conditions must hold. Types may have shell wildcards; the end of a request id is enough."""

    subject: SubjectPattern = SubjectPattern()
    types: Sequence[str] = ()
    request: str | None = None
    instance: str | None = None

    def __post_init__(self) -> None:
        for wanted in self.types:
            if not _is_one_of(wanted, EVENT_TYPES):
                raise BadPatternError(f"no event is a {wanted}; there are: {', '.join(EVENT_TYPES)}")

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.request and not self.subject.tokens:
            return ("request",)
        return self.subject.kinds

    def matches(self, entry: LogEntry) -> bool:
        if not self.subject.matches(entry.subject):
            return False
        if entry.event is None:
            return not (self.types or self.request or self.instance)
        name = type(entry.event).__name__
        return (
            (not self.types or any(_is_one_of(wanted, (name,)) for wanted in self.types))
            and (self.request is None or getattr(entry.event, "request", "").endswith(self.request))
            and (self.instance is None or self.instance in _instances_of(entry.event))
        )


def _is_one_of(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern.lower()) for name in names)


def _instances_of(event: LogEvent) -> tuple[str, ...]:
    if isinstance(event, RequestMigrated | MigrationRefused):
        return event.source, event.instance
    if isinstance(event, CacheEvent | FleetEvent):
        return (event.instance,)
    return (getattr(event, "instance", ""),)
