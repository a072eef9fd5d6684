"""Outlier detection: which instances to eject, to try again, and to readmit. Source: Envoy's `outlier_detection` and
its setting names. Our own: latency against the cost model and the others, and half-open instances, which get one
request at a time. Unlike Envoy's, mean and deviation of the success rate exclude the judged instance: of three or four,
none is 1.9 deviations below a mean that includes it. A failure of unclear cause counts once the request was inside
another engine for twice as long as it took to fail. An ejected instance must be replaceable."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from heapq import nlargest
from itertools import chain
from statistics import fmean, median, pstdev

from pointsman.bounds import SHARE, Bounds, bounded, check_settings
from pointsman.contracts.decisions import Settings
from pointsman.contracts.fleet import EjectionCause
from pointsman.primitives import EngineSeconds, InstanceId, WallSeconds, engine_seconds
from pointsman.state.fleet import Instance, Status
from pointsman.state.fold_versions import CLOCKS_DIFFER, FAILURE_SHARE_BACK
from pointsman.state.outliers import HISTORY_WALL_SECONDS, Failure, Prefill, Record
from pointsman.state.state import State
from pointsman.state.workload import UNGRANTED, Request

FAILURE_SHARE_REQUESTS_MIN = 10
SUCCESS_RATE_HOSTS_MIN = 3
SUCCESS_RATE_REQUESTS_MIN = 20
SUCCESS_RATE_STDEV_MIN = 0.05
"""So that a single failure does not make an outlier."""
PREFILLS_MIN = 5
PREFILLS_NEWEST = 10
SLOW_WALL_SECONDS_MIN: WallSeconds = WallSeconds(2.0)
"""From the first slow prefill to the last: a pause ends all prefills of an engine at once."""
EXCESS_WALL_SECONDS_MIN: WallSeconds = WallSeconds(0.2)
"""A slow prefill takes at least so much longer than expected; a busy machine causes less."""
OVERDUE_WALL_SECONDS_MIN: WallSeconds = WallSeconds(1.0)
TRIALS = 3
TRIALS_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
"""After so long one served request is enough."""
TRIAL_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
"""A trial request counts as served so long after its first token."""
DOUBT_WALL_SECONDS_MIN: WallSeconds = WallSeconds(0.5)
"""Least time inside another engine before a failure counts against the first."""


@dataclass(frozen=True, slots=True)
class Ejection:
    """`seconds`: engine time. `number`: ejections in a row."""

    instance: Instance
    cause: EjectionCause
    detail: str
    seconds: EngineSeconds
    number: int


@dataclass(frozen=True, slots=True)
class Readmission:
    instance: Instance
    half_open: bool


@dataclass(frozen=True)
class OutlierDetection:
    """Wall seconds; 0 turns a rule off, `max_ejection_share` 0 all. `failure_share`: of an interval.
    `success_rate_stdev_factor`: deviations below the mean of the others. `latency_factor`: times as slow as the
    others. An ejection lasts `base_ejection_seconds` times its number in a row, less one per interval without."""

    consecutive_failures: int = 5
    interval_seconds: WallSeconds = bounded(10.0, Bounds(most=float(HISTORY_WALL_SECONDS), above=True))
    failure_share: float = bounded(0.5, SHARE)
    success_rate_stdev_factor: float = 1.9
    latency_factor: float = 5.0
    base_ejection_seconds: WallSeconds = WallSeconds(5.0)
    max_ejection_seconds: WallSeconds = WallSeconds(15.0)
    max_ejection_share: float = bounded(0.75, SHARE)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def settings(self) -> Settings:
        return asdict(self)

    def next(self, state: State, now: EngineSeconds) -> Ejection | Readmission | None:
        """The first action; apply it before the next call."""
        return _Evaluation(self, state, now).next()


DEFAULT_OUTLIER_DETECTION = OutlierDetection()
NO_OUTLIER_DETECTION = OutlierDetection(max_ejection_share=0.0)


class _Evaluation:
    def __init__(self, settings: OutlierDetection, state: State, now: EngineSeconds) -> None:
        self._settings = settings
        self._state = state
        self._now = now
        self._speed = state.settings.speed
        self._since = now - engine_seconds(settings.interval_seconds, self._speed)
        self._instances = sorted(state.fleet.instances, key=lambda instance: instance.id)
        self._healthy = [i for i in self._instances if i.status is Status.READY and not i.half_open]

    def next(self) -> Ejection | Readmission | None:
        for instance in self._instances:
            if instance.ejected or instance.half_open:
                found = self._readmission(instance)
                if found is not None:
                    return found
        if not self._settings.max_ejection_share or len(self._healthy) < 2:
            return None
        return next(self._outliers(), None)

    def _readmission(self, instance: Instance) -> Ejection | Readmission | None:
        record = self._state.outliers.record(instance.id)
        if instance.ejected:
            longest = engine_seconds(2 * self._settings.max_ejection_seconds, self._speed)
            over = self._now >= record.until or record.until - self._now > longest  # then a clock was far ahead
            return Readmission(instance, half_open=True) if over else None
        if record.trial_failure:
            return self._eject_again(instance, f"the request that tried it again failed: {record.trial_failure}")
        if record.trial is None:
            return None
        slow = self._slowness(instance, [record.trial])
        if slow:
            return self._eject_again(instance, f"the request that tried it again was slow: {slow}")
        lasts = not record.trial_served and self._is_over(record.trial.at, TRIAL_WALL_SECONDS)
        waited = record.trials_served > 0 and self._is_over(record.half_open_since, TRIALS_WALL_SECONDS)
        return Readmission(instance, half_open=False) if lasts or waited or record.trials_served >= TRIALS else None

    def _is_over(self, since: EngineSeconds, wall_seconds: WallSeconds) -> bool:
        return self._now - since >= engine_seconds(wall_seconds, self._speed)

    def _eject_again(self, instance: Instance, detail: str) -> Ejection | None:
        return self._ejection(instance, "failed_probe", detail) if instance.is_replaceable(self._healthy) else None

    def _outliers(self) -> Iterator[Ejection]:
        failed, all_healthy = self._failed, self._healthy
        rules: tuple[tuple[EjectionCause, list[Instance], Callable[[Instance, Record], str]], ...] = (
            ("consecutive_failures", failed, self._consecutive_failures),
            ("failure_share", failed, self._failure_share),
            ("success_rate", failed, self._below_success_rate),
            ("latency", all_healthy if self._settings.latency_factor else [], self._slow),
        )
        for cause, instances, evidence in rules:
            for instance in instances:
                detail = evidence(instance, self._state.outliers.record(instance.id))
                if detail and instance.is_replaceable(self._healthy) and self._is_within_share():
                    yield self._ejection(instance, cause, detail)

    def _ejection(self, instance: Instance, cause: EjectionCause, detail: str) -> Ejection:
        settings, record = self._settings, self._state.outliers.record(instance.id)
        number = record.number
        if not instance.half_open:
            whole = max(0.0, self._now - record.whole_since)  # a leader's clock may be behind that of the one before it
            number -= int(whole / engine_seconds(settings.interval_seconds, self._speed))
        number = max(0, number) + 1
        seconds = min(settings.base_ejection_seconds * number, settings.max_ejection_seconds)
        return Ejection(instance, cause, detail, engine_seconds(seconds, self._speed), number)

    def _is_within_share(self) -> bool:
        ejected = sum(instance.ejected or instance.half_open for instance in self._instances)
        return ejected + 1 <= self._settings.max_ejection_share * (ejected + len(self._healthy))

    # Failures

    @property
    def _failed(self) -> list[Instance]:
        """Those of which any failure is known: most have none, and nothing else can be held against them."""
        known, unsettled = self._state.outliers.record, self._unsettled
        return [
            instance
            for instance in self._healthy
            if (record := known(instance.id)).last_failure or record.last_failure_at or instance.id in unsettled
        ]

    def _consecutive_failures(self, instance: Instance, record: Record) -> str:
        unsettled = [f for f in self._unsettled.get(instance.id, ()) if f.grant > record.newest_served]
        count = record.in_a_row + len(unsettled)
        recent = unsettled or record.last_failure_at >= self._since
        if not 0 < self._settings.consecutive_failures <= count or not recent:
            return ""
        return f"{count} requests in a row failed there: {unsettled[-1].what if unsettled else record.last_failure}"

    def _failure_share(self, instance: Instance, record: Record) -> str:
        share, seconds = self._settings.failure_share, self._settings.interval_seconds
        served, failed = self._served_and_failed(instance, self._since)
        goes_back = self._state.settings.fold_version >= FAILURE_SHARE_BACK and record.last_failure_at >= self._since
        if served + failed < FAILURE_SHARE_REQUESTS_MIN and goes_back:
            seconds, since = HISTORY_WALL_SECONDS, self._now - engine_seconds(HISTORY_WALL_SECONDS, self._speed)
            served, failed = self._served_and_failed(instance, since, newest=FAILURE_SHARE_REQUESTS_MIN)
        whole = served + failed
        if whole < FAILURE_SHARE_REQUESTS_MIN or not share or failed < share * whole:
            return ""
        return f"{failed} of {whole} requests in {seconds:g} s failed there: {record.last_failure}"

    def _below_success_rate(self, instance: Instance, record: Record) -> str:
        factor, own = self._settings.success_rate_stdev_factor, self._success_rates.get(instance.id, 1.0)
        if not factor or own == 1.0 or len(self._success_rates) < SUCCESS_RATE_HOSTS_MIN:
            return ""
        others = [rate for other, rate in self._success_rates.items() if other != instance.id]
        mean, deviation = fmean(others), max(pstdev(others), SUCCESS_RATE_STDEV_MIN)
        if own >= mean - factor * deviation:
            return ""
        return f"{own:.0%} of its requests succeeded, of the others' {mean:.0%}: {record.last_failure}"

    @cached_property
    def _success_rates(self) -> dict[InstanceId, float]:
        counts = ((i.id, *self._served_and_failed(i, self._since)) for i in self._healthy)
        return {
            name: served / (served + failed)
            for name, served, failed in counts
            if served + failed >= SUCCESS_RATE_REQUESTS_MIN
        }

    def _served_and_failed(
        self, instance: Instance, since: EngineSeconds, *, newest: int | None = None
    ) -> tuple[int, int]:
        served, failed = self._state.outliers.served_and_failed(instance.id, since=since, newest=newest)
        return served, failed + len(self._unsettled.get(instance.id, ()))

    @cached_property
    def _unsettled(self) -> dict[InstanceId, list[Failure]]:
        """Open failures of requests that run well elsewhere."""
        found: dict[InstanceId, list[Failure]] = {}
        outliers = self._state.outliers
        for request_id, failures in outliers.open_failures():
            request, last = self._state.workload.requests.get(request_id), failures[-1]
            alone = all(failure.instance == last.instance for failure in failures)
            if request is None or not alone or last.at < self._since:
                continue
            accused = outliers.accused(last, server=request.instance, prefiller=request.prefilled_by)
            if accused is not None and outliers.is_present(accused) and self._runs_elsewhere(request, accused):
                found.setdefault(accused.instance, []).append(accused)
        return found

    def _runs_elsewhere(self, request: Request, failure: Failure) -> bool:
        if request.stage in UNGRANTED or request.instance == failure.instance or request.granted_at < failure.at:
            return False
        settled_after = max(2 * (failure.at - failure.since), engine_seconds(DOUBT_WALL_SECONDS_MIN, self._speed))
        return self._now - request.granted_at > settled_after

    # Slowness

    def _slow(self, instance: Instance, _record: Record) -> str:
        lately = self._prefills[instance.id]  # a slowness of all that is over does not count
        least = self._settings.latency_factor * self._usual_at_least(instance)
        paces = [p.observed / p.predicted for p in lately if p.predicted > 0]
        if least > 0 and 2 * sum(pace >= least for pace in paces) < max(1, len(paces)):
            return ""  # its median is lower
        prefills = self._newest(instance)
        if len(prefills) < PREFILLS_MIN or not lately or min(_pace(prefills), _pace(lately)) < least:
            return ""
        slow = [p.at for p in prefills if p.observed >= least * p.predicted]
        if max(slow) - min(slow) < engine_seconds(SLOW_WALL_SECONDS_MIN, self._speed):
            return ""
        return self._slowness(instance, prefills)

    def _newest(self, instance: Instance) -> list[Prefill]:
        since = self._now - engine_seconds(HISTORY_WALL_SECONDS, self._speed)
        done = [p for p in self._state.outliers.record(instance.id).prefills if p.at >= since]
        overdue = [p for p in self._prefills[instance.id] if p.at == self._now]
        return [*done, *overdue][-PREFILLS_NEWEST:]

    def _usual_at_least(self, instance: Instance) -> float:
        middle = (len(self._paces) - len(self._prefills[instance.id]) - 1) // 2
        return self._paces[middle] if middle >= 0 else 0.0

    def _slowness(self, instance: Instance, prefills: list[Prefill]) -> str:
        """Empty if it is not slow, or unknown."""
        factor = self._settings.latency_factor
        others = [known for other, known in self._prefills.items() if other != instance.id]
        if not factor or sum(map(len, others)) < PREFILLS_MIN:
            return ""
        own, usual = _pace(prefills), _pace(list(chain(*others)))
        excess = median(prefill.observed - usual * prefill.predicted for prefill in prefills)
        if own < factor * usual or excess < engine_seconds(EXCESS_WALL_SECONDS_MIN, self._speed):
            return ""
        what = "its prefill took" if len(prefills) == 1 else f"{len(prefills)} prefills there took"
        return f"{what} {own:.1f} times what the cost model says, those of the others {usual:.1f} times"

    @cached_property
    def _paces(self) -> list[float]:
        return sorted(p.observed / p.predicted for p in chain(*self._prefills.values()) if p.predicted > 0)

    @cached_property
    def _prefills(self) -> dict[InstanceId, list[Prefill]]:
        """Finished and overdue prefills of the interval, by healthy instance."""
        outliers = self._state.outliers
        done = {i.id: [p for p in outliers.record(i.id).prefills if p.at >= self._since] for i in self._healthy}
        newest = nlargest(2, ((prefills[-1].at, name) for name, prefills in done.items() if prefills))
        for instance, prefills in done.items():
            other_at = next((at for at, other in newest if other != instance), 0.0)
            if self._state.settings.fold_version >= CLOCKS_DIFFER:
                other_at = min(other_at, self._now)  # a command that was delayed dates its request's events too late
            prefills += self._overdue(instance, other_at)
        return done

    def _overdue(self, instance: InstanceId, other_at: EngineSeconds) -> list[Prefill]:
        """Prefills that were slow when another instance finished one, at `other_at`: the ingresses report."""
        queue = self._state.workload.queues.get(instance)
        inside = () if queue is None else queue.prefill.values()
        least, factor = engine_seconds(OVERDUE_WALL_SECONDS_MIN, self._speed), self._settings.latency_factor
        return [
            Prefill(self._now, self._now - request.granted_at, request.engine_seconds)
            for request in inside
            if request.streaming and other_at > request.granted_at + factor * request.engine_seconds + least
        ]


def _pace(prefills: list[Prefill]) -> float:
    """Median of observed / predicted prefill seconds."""
    return median([p.observed / p.predicted for p in prefills if p.predicted > 0] or [0.0])
