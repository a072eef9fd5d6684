"""How instances serve and fail requests: what tells an outlier from the others (`policies.outliers`).

A failed attempt may be the engine's fault or the request's own. So it is *open* until that is known: the engine's as soon as
another one gives the request its first token, or when the request ends after one engine alone has failed it; the request's own
where two or more failed it and none served it (a "query of death"). A connection that was not made is never the request's
fault. What a client gave up before that proves nothing. Where the leader has given a request up before its ingress tells of the failure
(an engine that hangs says that nothing runs there), nobody will ever know more, and the engine is to blame.

Memory is bounded by the constants below. Seconds are engine seconds; what is kept covers HISTORY_WALL_SECONDS.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pointsman.primitives import InstanceId, RequestId, Seconds

HISTORY_WALL_SECONDS = 60
PREFILLS_MAX = 64
"""Newest prefills that are remembered of one instance."""
OPEN_MAX = 10_000
"""Requests whose failed attempts are open; of more the oldest are forgotten."""
OPEN_FAILURES_MAX = 64
"""Of one request; of more the oldest are forgotten."""
GIVEN_UP_MAX = 1_000
"""Requests that were given up while they were granted, and are remembered; likewise."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt that an instance failed. `since`: when it was granted there, or `at` where that is not known."""

    instance: InstanceId
    at: Seconds
    since: Seconds
    what: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """The first token of one request: seconds since its grant, and those that the cost model said, uncorrected."""

    at: Seconds
    observed: Seconds
    predicted: Seconds


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """Where a request was that the leader has ended, since when, and whether the engine says that nothing runs there."""

    instance: InstanceId
    since: Seconds
    idle: bool


@dataclass(slots=True)
class Tally:
    """Attempts that ended within one second of the wall."""

    served: int = 0
    failed: int = 0


@dataclass(slots=True)
class Record:
    """One instance in its present epoch."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """By second of the wall, the newest HISTORY_WALL_SECONDS of those in which an attempt ended."""
    in_a_row: int = 0
    """Attempts that failed and were begun after the newest that was served."""
    last_failure: str = ""
    last_failure_at: Seconds = 0.0
    prefills: deque[Prefill] = field(default_factory=deque)
    served_since: Seconds = 0.0
    """When the newest attempt that was served was begun."""
    number: int = 0
    """Ejections in a row, as of `whole_since`."""
    ejected_at: Seconds = 0.0
    until: Seconds = 0.0
    """When the ejection ends; 0 where it is not ejected."""
    why: str = ""
    """Of the newest ejection."""
    half_open_since: Seconds = 0.0
    """0 where it is not half-open."""
    whole_since: Seconds = 0.0
    """Since when it is not ejected."""
    trial: Prefill | None = None
    """The first token of the newest attempt of those begun since then, where it has one."""
    trial_served: bool = False
    """Whether that one was answered whole."""
    trials_served: int = 0
    """How many were, since then."""
    trial_failure: str = ""
    """And where it failed."""

    def clear(self) -> None:
        """A new phase begins: nothing before it counts."""
        self.tallies = {}
        self.prefills = deque()
        self.in_a_row, self.last_failure = 0, ""
        self.until = self.half_open_since = 0.0
        self.trial, self.trial_served, self.trials_served, self.trial_failure = None, False, 0, ""


class Outliers:
    """What is known of each instance that has served or failed a request."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._records: dict[InstanceId, Record] = {}
        self._open: dict[RequestId, list[Failure]] = {}
        self._given_up: dict[RequestId, _GivenUp] = {}

    def record(self, instance: InstanceId) -> Record:
        """To be read only; empty for an instance of which nothing is known."""
        return self._records.get(instance) or Record()

    def open_failures(self) -> Iterator[tuple[RequestId, list[Failure]]]:
        """Requests that were failed, and have neither a first token since nor an end."""
        yield from self._open.items()

    def is_open(self, instance: InstanceId, *, since: Seconds) -> bool:
        """Whether an attempt that began there since then has failed, or was given up, and whose fault that was is not known."""
        if any(gone.instance == instance and gone.since >= since for gone in self._given_up.values()):
            return True
        return any(f.instance == instance and f.since >= since for failures in self._open.values() for f in failures)

    def served_and_failed(self, instance: InstanceId, *, since: Seconds) -> tuple[int, int]:
        """Attempts that ended since then, to a second of the wall."""
        first = int(since / self._speed)
        tallies = [tally for second, tally in self.record(instance).tallies.items() if second >= first]
        return sum(tally.served for tally in tallies), sum(tally.failed for tally in tallies)

    # Attempts

    def failed(self, request: RequestId, failure: Failure, *, proven: bool) -> None:
        """`proven`: it cannot be the request's fault."""
        if proven:
            self._convict(failure)
            return
        failures = self._open.setdefault(request, [])
        failures.append(failure)
        if len(failures) > OPEN_FAILURES_MAX:
            del failures[0]
        if len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]

    def gave_up(self, request: RequestId, instance: InstanceId, *, since: Seconds, idle: bool) -> None:
        """The leader ended a request that had been granted there then. `idle`: since the engine says that nothing runs."""
        self._given_up[request] = _GivenUp(instance, since, idle)
        if len(self._given_up) > GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]

    def is_idle_at(self, request: RequestId, instance: InstanceId) -> bool:
        """Whether a request was given up because this engine says that nothing runs there, and nobody told of it since."""
        gone = self._given_up.get(request)
        return gone is not None and gone.idle and gone.instance == instance

    def given_up(self, request: RequestId, instance: InstanceId) -> Seconds | None:
        """Since when a request was granted there that the leader then gave up; None for any other. Said once."""
        gone = self._given_up.get(request)
        if gone is None or gone.instance != instance:
            return None
        del self._given_up[request]
        return gone.since

    def answered(self, request: RequestId, instance: InstanceId) -> None:
        """The request has its first token from there: who failed it before was to blame."""
        for failure in self._open.pop(request, ()):
            if failure.instance != instance:
                self._convict(failure)

    def ended(self, request: RequestId, *, given_up: bool) -> None:
        """The request ended unserved. `given_up`: its client did not wait for whether anybody would serve it."""
        failures = self._open.pop(request, [])
        if not given_up and len({failure.instance for failure in failures}) == 1:
            self._convict(failures[-1])

    def prefilled(self, instance: InstanceId, prefill: Prefill, *, since: Seconds) -> None:
        """An attempt begun then has its first token."""
        record = self._of(instance)
        record.prefills.append(prefill)
        if len(record.prefills) > PREFILLS_MAX:
            record.prefills.popleft()
        if record.half_open_since and since >= record.half_open_since:
            record.trial, record.trial_served, record.trial_failure = prefill, False, ""

    def served(self, instance: InstanceId, at: Seconds, *, since: Seconds) -> None:
        """An attempt begun then was answered whole."""
        record = self._of(instance)
        self._tally(record, at).served += 1
        if since >= record.served_since:
            record.served_since = since
            record.in_a_row = 0
        if record.half_open_since and since >= record.half_open_since:
            record.trial, record.trial_served = record.trial or Prefill(at, 0.0, 0.0), True
            record.trials_served += 1
            record.trial_failure = ""

    # Phases

    def ejected(self, instance: InstanceId, at: Seconds, *, seconds: Seconds, number: int, why: str) -> None:
        record = self._of(instance)
        record.clear()
        record.ejected_at, record.until, record.number, record.why = at, at + seconds, number, why

    def unejected(self, instance: InstanceId, at: Seconds, *, half_open: bool) -> None:
        record = self._of(instance)
        record.clear()
        record.half_open_since = at if half_open else 0.0
        record.whole_since = at

    def joined(self, instance: InstanceId, at: Seconds) -> None:
        """It begins a new life."""
        self._records[instance] = Record(whole_since=at)

    def left(self, instance: InstanceId) -> None:
        self._records.pop(instance, None)

    def _of(self, instance: InstanceId) -> Record:
        return self._records.setdefault(instance, Record())

    def _convict(self, failure: Failure) -> None:
        record = self._of(failure.instance)
        if failure.at < max(record.ejected_at, record.whole_since):
            return  # that was before it was ejected, tried again or started anew
        self._tally(record, failure.at).failed += 1
        record.last_failure, record.last_failure_at = failure.what, failure.at
        if failure.since > record.served_since:
            record.in_a_row += 1
        if record.half_open_since and failure.since >= record.half_open_since:
            record.trial, record.trial_served, record.trial_failure = None, False, failure.what

    def _tally(self, record: Record, at: Seconds) -> Tally:
        second = int(at / self._speed)
        tally = record.tallies.setdefault(second, Tally())
        while len(record.tallies) > HISTORY_WALL_SECONDS:
            del record.tallies[min(record.tallies)]
        return record.tallies.setdefault(second, tally)
