"""Which events to show: by subject, type, request and instance.

A subject pattern is NATS's: `*` stands for one token, `>` for all that follow. It may leave out `pm.<pool>.` and,
where nothing follows, the rest: `kv` is `kv.>`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import get_args

from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import MigrationRefused, RequestMigrated
from pointsman.contracts.fleet import FleetEvent
from pointsman.contracts.requests import RequestEvent
from pointsman.contracts.subjects import SUBJECT_ROOT
from pointsman.ports import LogEntry

EVENT_TYPES = tuple(sorted(event.__name__ for event in get_args(LogEvent)))


class BadPatternError(ValueError):
    """A subject that is none, or a type that matches no event. The message says what there is."""


@dataclass(frozen=True, slots=True)
class SubjectPattern:
    """Tokens after `pm.<pool>.`, with wildcards; no tokens match everything."""

    tokens: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What to ask the log for: the tokens before the first wildcard, nothing where there are none."""
        literal: list[str] = []
        for token in self.tokens:
            if token in ("*", ">"):
                break
            literal.append(token)
        return (".".join(literal),) if literal else ()

    def matches(self, subject: str) -> bool:
        """`subject` in full, as the log has it."""
        own = subject.split(".")[2:]
        for place, token in enumerate(self.tokens):
            if token == ">":
                return len(own) > place
            if place >= len(own) or token not in ("*", own[place]):
                return False
        return len(own) == len(self.tokens) or len(self.tokens) < 2


def subject_pattern(text: str) -> tuple[str | None, SubjectPattern]:
    """The pool that a pattern names, if it does, and the pattern itself. Raises BadPatternError."""
    tokens = text.split(".") if text else []
    if any(not token or (token == ">" and place < len(tokens) - 1) for place, token in enumerate(tokens)):
        msg = f"'{text}' is no subject: tokens between dots, * for one of them, > for the rest"
        raise BadPatternError(msg)
    if tokens[:1] != [SUBJECT_ROOT]:
        return None, SubjectPattern(tuple(tokens))
    pool = tokens[1] if len(tokens) > 1 and tokens[1] not in ("*", ">") else None
    return pool, SubjectPattern(tuple(tokens[2:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """All that is given must fit. Types may hold shell wildcards (`Blocks*`); of a request's id the end is enough."""

    subject: SubjectPattern = SubjectPattern()
    types: Sequence[str] = ()
    without: Sequence[str] = ()
    request: str | None = None
    instance: str | None = None

    def __post_init__(self) -> None:
        for wanted in (*self.types, *self.without):
            if not _is_one_of(wanted, EVENT_TYPES):
                msg = f"no event is a {wanted}; there are: {', '.join(EVENT_TYPES)}"
                raise BadPatternError(msg)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What to ask the log for; the rest is sorted out by `matches`."""
        if self.request and not self.subject.tokens:
            return ("request",)
        return self.subject.kinds

    def matches(self, entry: LogEntry) -> bool:
        if not self.subject.matches(entry.subject):
            return False
        if entry.event is None:  # what does not decode is always shown, unless something particular is looked for
            return not (self.types or self.request or self.instance)
        name = type(entry.event).__name__
        return (
            (not self.types or any(_is_one_of(wanted, (name,)) for wanted in self.types))
            and not any(_is_one_of(unwanted, (name,)) for unwanted in self.without)
            and (self.request is None or _request_of(entry.event).endswith(self.request))
            and (self.instance is None or self.instance in _instances_of(entry.event))
        )


def _is_one_of(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern.lower()) for name in names)


def _request_of(event: LogEvent) -> str:
    return event.request if isinstance(event, RequestEvent) else ""


def _instances_of(event: LogEvent) -> tuple[str, ...]:
    if isinstance(event, RequestMigrated | MigrationRefused):
        return event.source, event.instance
    if isinstance(event, CacheEvent | FleetEvent):
        return (event.instance,)
    return (getattr(event, "instance", ""),)
