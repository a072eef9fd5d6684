"""Rules of ejections and returns, written from docs/policies.md; part of the pool model. Keeps every attempt and
recomputes each sum. Where the leader may wait for more evidence, the rules are wider. EngineSeconds are engine seconds."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from pointsman.contracts.decisions import Settings
from pointsman.contracts.fleet import InstanceEjected, InstanceUnejected
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, WallSeconds, engine_seconds

PREFILLS_MIN = 5
SHARE_REQUESTS_MIN = 10
RATE_REQUESTS_MIN = 20
RATE_HOSTS_MIN = 3
RATE_GAP_MIN = 0.05
MEMORY_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
SAME_TIME: EngineSeconds = 1e-6


@dataclass(eq=False)
class Attempt:
    request: RequestId
    instance: InstanceId
    at: EngineSeconds
    grant: int
    to_blame: bool | None
    phase: int
    prefilled: bool = False
    """The same attempt as one of the engine that prefilled it: either may be to blame."""


@dataclass(frozen=True)
class Served:
    at: EngineSeconds
    grant: int


@dataclass(frozen=True)
class FirstToken:
    at: EngineSeconds
    grant: int
    observed: EngineSeconds
    predicted: EngineSeconds

    @property
    def pace(self) -> float:
        return self.observed / self.predicted if self.predicted > 0 else 0.0


@dataclass(eq=False)
class HealthRecord:
    """One epoch of an instance. `phase_at`: of its ejection or return; what was before does not count. `phase`: their
    number so far; `phase_from`: the first grant of it. The clock of its worker, which dates its joins, says nothing of
    failures."""

    phase_at: EngineSeconds = 0.0
    phase: int = 0
    phase_from: int = 0
    failures: list[Attempt] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    number: int = 0
    ejected_until: EngineSeconds = 0.0

    def begin_phase(self, at: EngineSeconds, first: int) -> None:
        self.phase_at, self.phase_from = at, first
        self.phase += 1

    @property
    def blamed(self) -> list[Attempt]:
        """Failures of this phase that are the instance's, or may be."""
        return [failure for failure in self.failures if failure.to_blame is not False and failure.phase == self.phase]

    @property
    def in_a_row(self) -> int:
        """Of those, granted after the newest success."""
        served = max((answer.grant for answer in self.served), default=0)
        return sum(failure.grant > served for failure in self.blamed)

    def outcomes(self, since: EngineSeconds, second: EngineSeconds) -> tuple[int, int, int]:
        """Served, failed, and served with the whole of the interval's first second, as the leader counts them."""
        served = [answer.at for answer in self.served if answer.at >= max(since - second, self.phase_at)]
        failed = sum(failure.at >= since - second for failure in self.blamed)
        return sum(at >= since for at in served), failed, len(served)


class HealthRecords:
    def __init__(self) -> None:
        self._of: dict[InstanceId, HealthRecord] = {}
        self._open: dict[RequestId, list[Attempt]] = {}

    def of(self, instance: InstanceId) -> HealthRecord:
        return self._of.setdefault(instance, HealthRecord())

    def joined(self, instance: InstanceId) -> None:
        self._of[instance] = HealthRecord()

    def left(self, instance: InstanceId) -> None:
        self._of.pop(instance, None)

    def failed(
        self,
        request: RequestId,
        instance: InstanceId,
        at: EngineSeconds,
        grant: int,
        *,
        proven: bool,
        prefilled_by: InstanceId | None = None,
    ) -> None:
        record = self.of(instance)
        attempt = Attempt(request, instance, at, grant, True if proven else None, record.phase)
        record.failures.append(attempt)
        if proven:
            return
        self._open.setdefault(request, []).append(attempt)
        if prefilled_by is not None:
            other = self.of(prefilled_by)
            other.failures.append(replace(attempt, instance=prefilled_by, phase=other.phase, prefilled=True))
            self._open[request].append(other.failures[-1])
        self._compare(request)

    def answers(self, request: RequestId, instance: InstanceId, prefilled_by: InstanceId) -> None:
        for attempt in self._open.pop(request, ()):
            attempt.to_blame = attempt.instance != (prefilled_by if attempt.prefilled else instance)

    def ended(self, request: RequestId, *, given_up: bool) -> None:
        attempts = self._open.pop(request, [])
        alone = _are_of_one(attempts)
        for attempt in attempts:
            attempt.to_blame = alone and not given_up

    def ejected(self, event: InstanceEjected, first: int) -> None:
        record = self.of(event.instance)
        record.begin_phase(event.at, first)
        record.number, record.ejected_until = event.number, event.at + event.seconds

    def unejected(self, event: InstanceUnejected, first: int) -> None:
        self.of(event.instance).begin_phase(event.at, first)

    def _compare(self, request: RequestId) -> None:
        attempts = self._open[request]
        if not _are_of_one(attempts):
            for attempt in attempts:
                attempt.to_blame = False


def _are_of_one(attempts: list[Attempt]) -> bool:
    return len({attempt.instance for attempt in attempts if not attempt.prefilled}) == 1


@dataclass(frozen=True)
class Peer:
    """`waits`: of each prefill inside the engine, its start and expected duration."""

    id: InstanceId
    role: str
    whole: bool
    unwell: bool
    half_open: bool
    waits: list[tuple[EngineSeconds, EngineSeconds]]


class EjectionRules:
    def __init__(self, settings: Settings, health: HealthRecords, speed: float) -> None:
        prefix = "outlier."
        self._settings = {
            name.removeprefix(prefix): float(v) for name, v in settings.items() if name.startswith(prefix)
        }
        self._health = health
        self._speed = speed

    def ejected(self, event: InstanceEjected, peers: list[Peer]) -> Iterator[str]:
        settings, own = self._settings, next(peer for peer in peers if peer.id == event.instance)
        others = [peer for peer in peers if peer.whole and peer.id != own.id]
        if not settings or not settings["max_ejection_share"]:
            yield "ejection is off"
            return
        if not (own.whole or (own.half_open and event.cause == "failed_probe")):
            yield f"{own.id} is not whole, and ejected for its {event.cause}"
        if own.half_open != (event.cause == "failed_probe"):
            yield f"{own.id} is ejected for its {event.cause}, and is {'' if own.half_open else 'not '}half-open"
        prefill, decode = (any(other.role in (part, "both") for other in others) for part in ("prefill", "decode"))
        if not (prefill or own.role == "decode") or not (decode or own.role == "prefill"):
            yield f"no whole instance is left to do what {own.id} does"
        unwell = sum(peer.unwell for peer in peers) + (not own.unwell)
        share = settings["max_ejection_share"] * sum(peer.whole or peer.unwell for peer in peers)
        if not own.unwell and unwell > share:
            yield f"{unwell} would be ejected or half-open, of {share} that may be"
        yield from self._ejection_time(event)
        if not self._is_evident(event, own, others):
            yield f"the log has no such evidence ({event.cause}: {event.detail}), but {self._evidence(own.id)}"

    def returned(self, event: InstanceUnejected, *, ejected: bool, half_open: bool) -> Iterator[str]:
        record = self._health.of(event.instance)
        if event.half_open and not ejected:
            yield f"{event.instance} is not ejected"
        elif event.half_open and event.at < record.ejected_until - SAME_TIME:
            yield f"{event.instance} is let in at {event.at}, and ejected until {record.ejected_until}"
        elif not event.half_open:
            begun = [answer.grant for answer in record.served] + [token.grant for token in record.first_tokens]
            if not half_open:
                yield f"{event.instance} is not half-open"
            elif not any(grant >= record.phase_from for grant in begun):
                yield f"{event.instance} is called recovered, and has served nothing since its return"

    def overdue(self, instance: InstanceId, now: EngineSeconds) -> EngineSeconds:
        return now - self._health.of(instance).ejected_until

    def _ejection_time(self, event: InstanceEjected) -> Iterator[str]:
        settings, before = self._settings, self._health.of(event.instance)
        if not 1 <= event.number <= before.number + 1:
            yield f"it is called number {event.number} in a row, after {before.number}"
        wall = min(settings["base_ejection_seconds"] * event.number, settings["max_ejection_seconds"])
        if abs(event.seconds - wall * self._speed) > SAME_TIME:
            yield f"number {event.number} in a row takes {event.seconds} s, not {wall * self._speed}"

    def _is_evident(self, event: InstanceEjected, own: Peer, others: list[Peer]) -> bool:
        record, settings, now = self._health.of(own.id), self._settings, event.at
        since = now - settings["interval_seconds"] * self._speed
        served, failed, served_at_most = record.outcomes(since, self._speed)
        enough = served_at_most + failed
        match event.cause:
            case "consecutive_failures":
                return 0 < settings["consecutive_failures"] <= record.in_a_row
            case "failure_share":
                back = range(int(settings["interval_seconds"]), round(float(MEMORY_WALL_SECONDS)) + 1)
                longer = [record.outcomes(now - seconds * self._speed, self._speed) for seconds in back]
                return any(
                    at_most + failed >= SHARE_REQUESTS_MIN and failed >= settings["failure_share"] * (served + failed)
                    for served, failed, at_most in longer
                )
            case "success_rate":
                rates = [rate for other in others if (rate := self._rate(other.id, since)) is not None]
                many = len(rates) + 1 >= RATE_HOSTS_MIN and enough >= RATE_REQUESTS_MIN
                gap = settings["success_rate_stdev_factor"] * RATE_GAP_MIN
                return many and gap > 0 and served < (fmean(rates) - gap) * (served + failed)
            case "latency":
                paces = self._paces(own, now)
                slow = sum(self._is_slow(pace, others, since) for pace in paces)
                return len(paces) >= PREFILLS_MIN and 2 * slow >= PREFILLS_MIN
            case "failed_probe":
                failures = [failure for failure in record.blamed if failure.grant >= record.phase_from]
                tried = [t.pace for t in record.first_tokens if t.grant >= record.phase_from]
                return bool(failures) or any(self._is_slow(pace, others, since) for pace in tried)

    def _is_slow(self, pace: float, others: list[Peer], since: EngineSeconds) -> bool:
        usual = [t.pace for other in others for t in self._health.of(other.id).first_tokens if t.at >= since]
        return bool(usual) and 0 < self._settings["latency_factor"] * median(usual) <= pace + SAME_TIME

    def _paces(self, own: Peer, now: EngineSeconds) -> list[float]:
        record, since = self._health.of(own.id), now - engine_seconds(MEMORY_WALL_SECONDS, self._speed)
        done = [t.pace for t in record.first_tokens if t.at >= max(since, record.phase_at)]
        return done + [(now - begun) / predicted for begun, predicted in own.waits if predicted > 0]

    def _rate(self, instance: InstanceId, since: EngineSeconds) -> float | None:
        served, failed, at_most = self._health.of(instance).outcomes(since, self._speed)
        return served / (served + failed) if at_most + failed >= RATE_REQUESTS_MIN and served + failed else None

    def _evidence(self, instance: InstanceId) -> str:
        record = self._health.of(instance)
        failures = ", ".join(f"{f.request} at {f.at:.2f}" for f in record.blamed[-8:])
        return f"{record.in_a_row} failures in a row since {record.phase_at:.2f}: {failures}"
