"""Engines: failed requests, ejections and recovery, by engine."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestRejected
from pointsman.contracts.fleet import InstanceEjected
from pointsman.contracts.requests import RequestAttemptFailed, RequestCancelled, RequestFailed, RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.state.fleet import Instance
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity, times
from pointsman_cli.formatting import plural
from pointsman_cli.terminal import wall_time

TOUCHED_SHARE_MAX = 0.02
REQUESTS_MAX = 10_000
SHOWN_MAX = 8


@dataclass(slots=True)
class _Engine:
    granted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first_at: EngineSeconds = 0.0
    last_at: EngineSeconds = 0.0
    example: str = ""
    ejected: Counter[str] = field(default_factory=Counter)
    away: EngineSeconds = 0.0
    why: str = ""
    was_alone: bool = False
    """At its last failure."""


class EngineFailures(Examiner):
    area = "engines"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._engines: dict[InstanceId, _Engine] = {}
        self._granted = 0
        self._failed_at: dict[RequestId, list[tuple[InstanceId, str]]] = {}
        self._failed_everywhere = 0
        self._failed_everywhere_examples: list[str] = []

    @override
    def before(self, event: LogEvent, state: State) -> None:
        match event:
            case RequestGranted():
                self._granted += 1
                self._engine(event.instance).granted += 1
            case RequestAttemptFailed():
                self._note_failure(event)
                self._engine(event.instance).was_alone = len(state.fleet.instances) < 2
            case InstanceEjected():
                engine = self._engine(event.instance)
                engine.ejected[event.cause] += 1
                engine.away += self.wall(event.seconds)
                engine.why = event.detail
            case RequestFinished() | RequestRejected() | RequestCancelled():
                self._failed_at.pop(event.request, None)
            case RequestFailed():
                self._note_end(event.request)
            case _:
                pass

    def _engine(self, name: InstanceId) -> _Engine:
        return self._engines.setdefault(name, _Engine())

    def _note_failure(self, event: RequestAttemptFailed) -> None:
        engine = self._engine(event.instance)
        how = f"{event.failure} {event.status}" if event.status else event.failure
        engine.failed[how] += 1
        engine.first_at, engine.last_at = engine.first_at or event.at, event.at
        engine.example = f"{event.request}: {event.detail}" if event.detail else event.request
        self._failed_at.setdefault(event.request, []).append((event.instance, how))
        if len(self._failed_at) > REQUESTS_MAX:
            del self._failed_at[next(iter(self._failed_at))]

    def _note_end(self, request: RequestId) -> None:
        failures = self._failed_at.pop(request, [])
        where = dict.fromkeys(instance for instance, _ in failures)
        if len(where) > 1:
            for instance, how in failures:
                self._engine(instance).failed -= Counter([how])  # no fault of the engine
            self._failed_everywhere += 1
            if len(self._failed_everywhere_examples) < SHOWN_MAX:
                self._failed_everywhere_examples.append(f"{request}: at {', '.join(where)}")

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        for name, engine in sorted(self._engines.items(), key=lambda item: -item[1].failed.total()):
            if engine.failed or engine.ejected:
                yield self._of_engine(name, engine, state.fleet.get(name))
        if self._failed_everywhere:
            yield self.warning(
                f"{plural(self._failed_everywhere, 'request')} failed at every engine that tried: their own fault, by all signs",
                self._failed_everywhere_examples,
                "Look at what their clients ask; such requests can bring engines down one after the other. Where nothing "
                "else was served meanwhile, look for what all engines share: the model, the disk, a proxy.",
            )

    def _of_engine(self, name: InstanceId, engine: _Engine, instance: Instance | None) -> Finding:
        failed = engine.failed.total()
        out = instance is not None and (instance.ejected or instance.half_open)
        share = failed / max(1, self._granted)
        parts = [f"failed {plural(failed, 'request')}, {share:.1%} of all that were sent to engines"] * bool(failed)
        parts += [f"was ejected {times(engine.ejected.total())}"] * bool(engine.ejected)
        return self.finding(
            Severity.SERIOUS if out or share > TOUCHED_SHARE_MAX else Severity.WARNING,
            f"{name} {' and '.join(parts)}{self._end_of(instance)}",
            [*self._failures_of(engine, failed), *self._ejections_of(engine)],
            f"Look at the engine {name}: its /health does not show this. Drain it until its own log says why.",
        )

    def _end_of(self, instance: Instance | None) -> str:
        if instance is not None and instance.ejected:
            return "; at the end of the log it is still out"
        if instance is not None and instance.half_open:
            return "; at the end of the log it is tried again, one request at a time"
        return ""

    def _failures_of(self, engine: _Engine, failed: int) -> Iterator[str]:
        if failed:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in engine.failed.most_common(SHOWN_MAX))
            begun, ended = (wall_time(at, self.settings.speed) for at in (engine.first_at, engine.last_at))
            own = f"{failed:,} of {max(failed, engine.granted):,} requests sent there"
            yield f"{kinds}; {own}, {begun:%H:%M:%S} to {ended:%H:%M:%S}; the last {engine.example}"

    def _ejections_of(self, engine: _Engine) -> Iterator[str]:
        if engine.ejected:
            causes = ", ".join(f"{count:,} {cause}" for cause, count in engine.ejected.most_common())
            yield f"ejected for {engine.away:.0f} s in all ({causes}); the last time because {engine.why}"
        elif engine.was_alone:
            yield "never ejected: no other instance could replace it"
        else:
            yield "never ejected: it served others in between, or ejection is off (outlier.max_ejection_share=0)"
