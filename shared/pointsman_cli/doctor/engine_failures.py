"""Engines: failed requests, ejections and recovery, prefills without a KV cache, by engine."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from typing_extensions import override

from pointsman.analysis.placed_alone import is_placed_alone
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.fleet import EjectionCause, InstanceEjected, InstanceReported
from pointsman.contracts.requests import RequestAttemptFailed, RequestFailed, RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.state.fleet import Instance
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity, times
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.doctor.samples import keep
from pointsman_cli.formatting import plural
from pointsman_cli.terminal import wall_span

TOUCHED_SHARE_MAX = 0.02
DOWN_WALL_SECONDS = 10.0
"""From a failure to its worker's report that the engine does not answer: one has to do with the other."""
REQUESTS_MAX = 10_000
SHOWN_MAX = 8
BY_FAILURES: frozenset[EjectionCause] = frozenset({"consecutive_failures", "failure_share", "success_rate"})


@dataclass(slots=True)
class _Engine:
    granted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    without_cache_of: Counter[InstanceId] = field(default_factory=Counter)
    """Failed requests by the engine that had prefilled them."""
    first_at: EngineSeconds = 0.0
    last_at: EngineSeconds = 0.0
    example: str = ""
    ejected: Counter[str] = field(default_factory=Counter)
    away: EngineSeconds = 0.0
    why: str = ""
    went_down: bool = False
    """It no longer answered its worker at a failure, or soon after."""
    was_alone: bool = False
    """At its last failure."""
    by_hung: Counter[str] = field(default_factory=Counter)
    """Attempts that broke off while their ingress hung, by ingress."""


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
            case RequestGranted() if event.stamp is not None or is_placed_alone(event, state):
                self._granted += 1
                self._engine(event.instance).granted += 1
            case RequestAttemptFailed() if not event.status and (hang := self.hangs.of_attempt(event)):
                self._engine(event.instance).by_hung[hang.ingress] += 1
            case RequestAttemptFailed():
                self._note_failure(event)
                engine, instance = self._engine(event.instance), state.fleet.get(event.instance)
                engine.was_alone = len(state.fleet.instances) < 2
                engine.went_down |= instance is not None and not instance.serving
            case InstanceReported() if not event.serving and (failed := self._engines.get(event.instance)):
                failed.went_down |= bool(failed.failed) and self.wall(event.at - failed.last_at) < DOWN_WALL_SECONDS
            case InstanceEjected():
                engine = self._engine(event.instance)
                engine.ejected[event.cause] += 1
                engine.away += self.wall(event.seconds)
                engine.why = event.detail
            case _:
                pass

    @override
    def ended(self, end: Ended, state: State) -> None:
        failures = self._failed_at.pop(end.event.request, [])
        if isinstance(end.event, RequestFailed):
            self._note_failed(end.event.request, failures)

    def _engine(self, name: InstanceId) -> _Engine:
        return self._engines.setdefault(name, _Engine())

    def _note_failure(self, event: RequestAttemptFailed) -> None:
        engine = self._engine(event.instance)
        how = f"{event.failure} {event.status}" if event.status else event.failure
        engine.failed[how] += 1
        if event.prefilled_by:
            engine.without_cache_of[event.prefilled_by] += 1
        engine.first_at, engine.last_at = engine.first_at or event.at, event.at
        engine.example = f"{event.request}: {event.detail}" if event.detail else event.request
        failures = self._failed_at.get(event.request, [])
        keep(self._failed_at, event.request, [*failures, (event.instance, how)], REQUESTS_MAX)

    def _note_failed(self, request: RequestId, failures: list[tuple[InstanceId, str]]) -> None:
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
        yield from self._broken_off()
        if self._failed_everywhere:
            yield self.warning(
                f"{plural(self._failed_everywhere, 'request')} failed at every engine that tried: their own fault, by all signs",
                self._failed_everywhere_examples,
                "Look at what their clients ask; such requests can bring engines down one after the other. Where nothing "
                "else was served meanwhile, look for what all engines share: the model, the disk, a proxy.",
            )

    def _broken_off(self) -> Iterator[Finding]:
        """By ingresses that hung: an engine that they cannot wait for has not failed."""
        engines = {name: engine.by_hung for name, engine in sorted(self._engines.items()) if engine.by_hung}
        if not engines:
            return
        hung_ingresses = {ingress for hung in engines.values() for ingress in hung}
        hangs = [hang for hang in self.hangs.seen if hang.ingress in hung_ingresses]
        ingresses = ", ".join(sorted(hung_ingresses))
        count = sum(hung.total() for hung in engines.values())
        yield self.warning(
            f"{plural(count, 'attempt')} at {', '.join(engines)} broke off while {ingresses} hung: no fault of the engines",
            [
                *(f"{name}: {plural(hung.total(), 'attempt')}" for name, hung in list(engines.items())[:SHOWN_MAX]),
                *(hang.line(self.settings.speed) for hang in hangs[:SHOWN_MAX]),
            ],
            f"Look at {ingresses}: its log, or its machine's, says why it hung. Drain no engine for this.",
        )

    def _of_engine(self, name: InstanceId, engine: _Engine, instance: Instance | None) -> Finding:
        failed = engine.failed.total()
        out = instance is not None and (instance.ejected or instance.half_open)
        share = failed / max(1, self._granted)
        parts = [f"failed {plural(failed, 'request')}, {share:.1%} of all that were sent to engines"] * bool(failed)
        parts += [f"was ejected {times(engine.ejected.total())}"] * bool(engine.ejected)
        found = self.finding(
            Severity.SERIOUS if out or share > TOUCHED_SHARE_MAX else Severity.WARNING,
            f"{name} {' and '.join(parts)}{self._end_of(instance)}",
            [*self._failures_of(engine, failed), *self._ejections_of(engine)],
            self._advice_on(name, engine),
        )
        return replace(found, ongoing=out)

    def _advice_on(self, name: InstanceId, engine: _Engine) -> str:
        if engine.went_down:
            return f"{name} stopped answering its worker, too: its own log, or its machine's, says why."
        if engine.failed or not engine.by_hung or engine.ejected.keys() - BY_FAILURES:
            return f"Look at the engine {name}: its /health does not show this. Drain it until its own log says why."
        return "It was ejected for what an ingress saw that hung: look at the ingress, not at the engine."

    def _end_of(self, instance: Instance | None) -> str:
        if instance is not None and instance.ejected:
            return "; at the end of the log it is still out"
        if instance is not None and instance.half_open:
            return "; at the end of the log it is tried again, one request at a time"
        return ""

    def _failures_of(self, engine: _Engine, failed: int) -> Iterator[str]:
        if failed:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in engine.failed.most_common(SHOWN_MAX))
            span = wall_span(engine.first_at, engine.last_at, self.settings.speed)
            own = f"{failed:,} of {max(failed, engine.granted):,} requests sent there"
            yield f"{kinds}; {own}, {span}; the last {engine.example}"
        if failed and engine.without_cache_of:
            sources = ", ".join(
                f"{count:,} of {name}" for name, count in engine.without_cache_of.most_common(SHOWN_MAX)
            )
            yield f"of those it was to fetch KV caches: {sources}; the engine that prefilled may be to blame instead"

    def _ejections_of(self, engine: _Engine) -> Iterator[str]:
        if engine.ejected:
            causes = ", ".join(f"{count:,} {cause}" for cause, count in engine.ejected.most_common())
            yield f"ejected for {engine.away:.0f} s in all ({causes}); the last time because {engine.why}"
        elif engine.went_down:
            yield "never ejected: it was down, as its worker reported"
        elif engine.was_alone:
            yield "never ejected: no other instance could replace it"
        else:
            yield "never ejected: it served others in between, or ejection is off (outlier.max_ejection_share=0)"


class MissingTransfers(Examiner):
    """Engines that name no KV cache after a prefill, so that the decode engine computes the prompt again."""

    area = "engines"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._requests: Counter[InstanceId] = Counter()
        self._examples: dict[InstanceId, RequestId] = {}

    @override
    def ended(self, end: Ended, state: State) -> None:
        event, request = end.event, end.request
        if (
            isinstance(event, RequestFinished)
            and event.without_transfer
            and request is not None
            and request.prefilled_by
        ):
            self._requests[request.prefilled_by] += 1
            self._examples.setdefault(request.prefilled_by, event.request)

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        for name, count in sorted(self._requests.items()):
            yield self.warning(
                f"{name} named no KV cache after the prefills of {plural(count, 'request')}: the engines that "
                "decoded them computed the prompts again",
                [f"for example {self._examples[name]}"],
                f"Give {name} a connector (--kv-transfer-config, docs/engines.md). Connectors that hand over without "
                "kv_transfer_params, as vLLM's ExampleConnector, work all the same.",
            )
