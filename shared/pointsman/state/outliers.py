"""Served and failed requests of each instance: the evidence for outlier detection (`policies.outliers`). A failed
attempt, or one that was redispatched long after its first token was due, is *open* until attributed. The engine is to
blame if another one gives the request its first token, or if the request ends with a single engine failing it; the
request, if two or more failed it and none served it. One that the leader gave up keeps its failures under the id under
which it comes again. Refused connections are always the engine's fault. Client cancellations prove nothing. Where a KV cache
should have come from another engine, either may be to blame: of those two, the one that has failed more requests since it last
served one. Engine seconds; history covers HISTORY_WALL_SECONDS."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from pointsman.primitives import EngineSeconds, InstanceId, RequestId, WallSeconds
from pointsman.state.fold_versions import ATTEMPTS_COUNTED, FOLD_VERSION, LEFT_FORGOTTEN
from pointsman.state.workload import NO_INSTANCE, NO_REQUEST

HISTORY_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
PREFILLS_MAX = 64
OPEN_MAX = 10_000
"""Requests with open failures; the oldest are dropped first, here and in the next two."""
OPEN_FAILURES_MAX = 64
GIVEN_UP_MAX = 1_000
OVERDUE_SECONDS: EngineSeconds = 3.0
"""A request is redispatched so long after its first token was due, and has then failed at its engine."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`since`: when it was granted, or `at` if unknown; `grant`: its place among all grants. `phase`: of the instance's
    record."""

    instance: InstanceId
    at: EngineSeconds
    since: EngineSeconds
    grant: float
    what: str
    phase: int = 0
    prefiller: "Failure | None" = None
    """The same as a failure of the engine whose KV cache it was to fetch."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A first token: seconds since its grant, and by the uncorrected cost model."""

    at: EngineSeconds
    observed: EngineSeconds
    predicted: EngineSeconds


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A request that the leader ended: its instance and grant, and whether the engine reported no work."""

    instance: InstanceId
    since: EngineSeconds
    grant: float
    idle: bool
    comes_as: RequestId = NO_REQUEST
    """The id under which it came again."""


@dataclass(slots=True)
class Tally:
    served: int = 0
    failed: int = 0


@dataclass(slots=True)
class Record:
    """One epoch of an instance. `until`, `half_open_since` and `trials_from` are 0 outside these phases."""

    phase: int = 0
    """Which of all phases of all instances: each join, ejection and return begins one."""
    tallies: dict[int, Tally] = field(default_factory=dict)
    in_a_row: int = 0
    """Consecutive failed attempts begun after the newest served one."""
    suspected: int = 0
    """As many attempts that another engine may have failed instead."""
    last_failure: str = ""
    last_failure_at: EngineSeconds = 0.0
    prefills: deque[Prefill] = field(default_factory=deque)
    newest_served: float = 0.0
    """Its grant."""
    number: int = 0
    ejected_at: EngineSeconds = 0.0
    until: EngineSeconds = 0.0
    why: str = ""
    half_open_since: EngineSeconds = 0.0
    trials_from: float = 0.0
    """The first grant of this half-open phase."""
    whole_since: EngineSeconds = 0.0
    """Since when not ejected."""
    trial: Prefill | None = None
    trial_served: bool = False
    trials_served: int = 0
    trial_failure: str = ""

    def clear(self) -> None:
        self.tallies = {}
        self.prefills = deque()
        self.in_a_row, self.suspected, self.last_failure = 0, 0, ""
        self.until = self.half_open_since = self.trials_from = 0.0
        self.trial, self.trial_served, self.trials_served, self.trial_failure = None, False, 0, ""


class Outliers:
    def __init__(self, speed: float, *, fold_version: int = FOLD_VERSION) -> None:
        self._speed = speed
        self._fold_version = fold_version
        self._phases = 0
        self._records: dict[InstanceId, Record] = {}
        self._open: dict[RequestId, list[Failure]] = {}
        self._given_up: dict[RequestId, _GivenUp] = {}

    def record(self, instance: InstanceId) -> Record:
        """Read only; empty for an unknown instance."""
        return self._records.get(instance) or Record()

    def open_failures(self) -> Iterator[tuple[RequestId, list[Failure]]]:
        """Failed requests with neither a first token since nor an end."""
        yield from self._open.items()

    def is_open(self, instance: InstanceId, *, first: float, since: EngineSeconds) -> bool:
        """Whether an attempt there, of the grant `first` or a later one and begun since then, failed or was given up and is
        not attributed yet."""
        failures = list(chain(*self._open.values()))
        prefillers = (failure.prefiller for failure in failures if failure.prefiller is not None)
        attempts: Iterable[Failure | _GivenUp] = chain(self._given_up.values(), failures, prefillers)
        return any(a.instance == instance and a.grant >= first and a.since >= since for a in attempts)

    def served_and_failed(
        self, instance: InstanceId, *, since: EngineSeconds, newest: int | None = None
    ) -> tuple[int, int]:
        """In whole seconds from `since` on; only in the newest of them that have `newest` together."""
        first, served, failed = int(since / self._speed), 0, 0
        for second, tally in sorted(self.record(instance).tallies.items(), reverse=True):
            if second < first or (newest is not None and served + failed >= newest):
                break
            served, failed = served + tally.served, failed + tally.failed
        return served, failed

    def failed(self, request: RequestId, failure: Failure, *, proven: bool) -> None:
        """`proven`: certainly the engine's fault."""
        failure, prefiller = self._begun(failure), failure.prefiller
        if proven:
            self._convict(failure)
            return
        if prefiller is not None:
            failure = replace(failure, prefiller=self._begun(prefiller))
            for suspect in (failure, prefiller):
                record = self._of(suspect.instance)
                record.suspected += suspect.grant > record.newest_served
        failures = self._open.setdefault(request, [])
        failures.append(failure)
        if len(failures) > OPEN_FAILURES_MAX:
            del failures[0]
        if len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]

    def _begun(self, failure: Failure) -> Failure:
        return replace(failure, phase=self.record(failure.instance).phase)

    def accused(
        self, failure: Failure, *, server: InstanceId = NO_INSTANCE, prefiller: InstanceId = NO_INSTANCE
    ) -> Failure | None:
        """Of the engines of this attempt, whom those do not clear that serve the request now (`server`, and the one that
        prefilled it for that). At a tie the one that said that it failed."""
        suspects = [failure] if failure.instance != server else []
        if failure.prefiller is not None and failure.prefiller.instance != prefiller:
            suspects.append(failure.prefiller)
        return max(suspects, key=lambda suspect: self.record(suspect.instance).suspected, default=None)

    def gave_up(
        self, request: RequestId, instance: InstanceId, *, since: EngineSeconds, grant: float, idle: bool
    ) -> None:
        """The leader ended a request granted there at `since`. `idle`: because the engine reported no work."""
        self._given_up[request] = _GivenUp(instance, since, grant, idle)
        if len(self._given_up) > GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]

    def is_idle_at(self, request: RequestId, instance: InstanceId) -> bool:
        gone = self._given_up.get(request)
        return gone is not None and gone.idle and gone.instance == instance

    def came_again(self, before: RequestId, request: RequestId) -> None:
        """A request that the leader gave up, under another id."""
        if before in self._open:
            self._open[request] = self._open.pop(before)
        if before in self._given_up:
            self._given_up[before] = replace(self._given_up[before], comes_as=request)

    def pop_given_up(self, request: RequestId, instance: InstanceId) -> _GivenUp | None:
        """Of a request that the leader gave up there, once; else None."""
        gone = self._given_up.get(request)
        if gone is None or gone.instance != instance:
            return None
        return self._given_up.pop(request)

    def answered(self, request: RequestId, instance: InstanceId, *, prefiller: InstanceId = NO_INSTANCE) -> None:
        """A first token: engines that failed the request before are to blame."""
        for failure in self._open.pop(request, ()):
            accused = self.accused(failure, server=instance, prefiller=prefiller)
            if accused is not None:
                self._convict(accused)

    def ended(self, request: RequestId, *, cancelled: bool) -> None:
        """The request ended unserved. `cancelled`: by its client or the leader, so not for what the engine did."""
        failures = self._open.pop(request, [])
        if not cancelled and len({failure.instance for failure in failures}) == 1:
            self._convict(self.accused(failures[-1]) or failures[-1])

    def prefilled(self, instance: InstanceId, prefill: Prefill, *, grant: float) -> None:
        record = self._of(instance)
        record.prefills.append(prefill)
        if len(record.prefills) > PREFILLS_MAX:
            record.prefills.popleft()
        if record.trials_from and grant >= record.trials_from:
            record.trial, record.trial_served, record.trial_failure = prefill, False, ""

    def served(self, instance: InstanceId, at: EngineSeconds, *, grant: float) -> None:
        record = self._of(instance)
        self._tally(record, at).served += 1
        if grant >= record.newest_served:
            record.newest_served = grant
            record.in_a_row = record.suspected = 0
        if record.trials_from and grant >= record.trials_from:
            record.trial, record.trial_served = record.trial or Prefill(at, 0.0, 0.0), True
            record.trials_served += 1
            record.trial_failure = ""

    def ejected(
        self, instance: InstanceId, at: EngineSeconds, *, seconds: EngineSeconds, number: int, why: str
    ) -> None:
        record = self._of(instance)
        record.clear()
        record.phase = self._next_phase()
        record.ejected_at, record.until, record.number, record.why = at, at + seconds, number, why

    def unejected(self, instance: InstanceId, at: EngineSeconds, *, half_open: bool, first: float) -> None:
        """`first`: place of the next grant."""
        record = self._of(instance)
        record.clear()
        record.phase = self._next_phase()
        if half_open:
            record.half_open_since, record.trials_from = at, first
        record.whole_since = at

    def joined(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._records[instance] = Record(phase=self._next_phase(), whole_since=at)

    def left(self, instance: InstanceId) -> None:
        self._records.pop(instance, None)

    def _next_phase(self) -> int:
        self._phases += 1
        return self._phases

    def is_present(self, failure: Failure) -> bool:
        """Whether it is of the present phase of its instance. Decided by order: clocks differ, and dates jump."""
        record = self.record(failure.instance)
        if self._fold_version < ATTEMPTS_COUNTED:
            return failure.at >= max(record.ejected_at, record.whole_since)
        return failure.phase == record.phase

    def _of(self, instance: InstanceId) -> Record:
        return self._records.setdefault(instance, Record())

    def _convict(self, failure: Failure) -> None:
        if failure.instance not in self._records and self._fold_version >= LEFT_FORGOTTEN:
            return
        record = self._of(failure.instance)
        if not self.is_present(failure):
            return
        self._tally(record, failure.at).failed += 1
        record.last_failure, record.last_failure_at = failure.what, failure.at
        if failure.grant > record.newest_served:
            record.in_a_row += 1
        if record.trials_from and failure.grant >= record.trials_from:
            record.trial, record.trial_served, record.trial_failure = None, False, failure.what

    def _tally(self, record: Record, at: EngineSeconds) -> Tally:
        second = int(at / self._speed)
        tally = record.tallies.setdefault(second, Tally())
        while len(record.tallies) > float(HISTORY_WALL_SECONDS):
            del record.tallies[min(record.tallies)]
        return record.tallies.setdefault(second, tally)
