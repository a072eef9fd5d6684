"""Predictions: TTFT and cache hits, predicted and measured. Slow engines are in `slow_engines`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from typing_extensions import override

from pointsman.analysis.lateness_rules import STALL_FACTOR
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.requests import PrefillFinished, RequestFinished, cached_of_keys
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.doctor.samples import Sample
from pointsman_cli.explain.prefills import prefilled

ANSWERS_MIN = 20
BIAS_SHARE_MAX = 0.3
BIAS_WALL_SECONDS_MIN = 0.05
MODEL_FITS_FACTOR = 1.5
"""Where prefills take at most this times what the cost model says, or at least its inverse, calibrating changes little."""
MISPREDICTED_SHARE_MAX = 0.1


@dataclass(slots=True)
class _Record:
    real_ttft: Sample[EngineSeconds] = field(default_factory=Sample)
    errors: Sample[EngineSeconds] = field(default_factory=Sample)
    paces: Sample[float] = field(default_factory=Sample)
    answers: int = 0
    prompt_tokens: Tokens = 0
    missing_tokens: Tokens = 0
    unexpected_tokens: Tokens = 0


class Predictions(Examiner):
    area = "predictions"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._records: dict[InstanceId, _Record] = {}

    @override
    def before(self, event: LogEvent, state: State) -> None:
        if isinstance(event, PrefillFinished) and (found := prefilled(event, state)) is not None:
            self._first_token(event.instance, *found)

    @override
    def ended(self, end: Ended, state: State) -> None:
        if isinstance(end.event, RequestFinished) and end.request is not None:
            self._answer(end.event, end.request)

    def _first_token(self, instance: InstanceId, request: Request, at: EngineSeconds) -> None:
        record, took = self._record(instance), at - request.granted_at
        if request.engine_seconds > 0:
            record.paces.add(took / request.engine_seconds)
            if took > STALL_FACTOR * request.engine_seconds:
                return
        real = at - request.placed_at
        record.real_ttft.add(real)
        record.errors.add(real - request.predicted_ttft)

    def _answer(self, event: RequestFinished, request: Request) -> None:
        if cached_of_keys(event, request.answers) < 0 or request.instance != event.instance:
            return
        record = self._record(event.instance)
        missing = request.prompt_tokens - request.uncached_tokens - event.cached_tokens
        record.answers += 1
        record.prompt_tokens += request.prompt_tokens
        record.missing_tokens += max(0, missing)
        record.unexpected_tokens += max(0, -missing)

    def _record(self, instance: InstanceId) -> _Record:
        return self._records.setdefault(instance, _Record())

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        yield from self._biased(state)
        yield from self._missed()

    def _biased(self, state: State) -> Iterator[Finding]:
        """Medians: a few requests behind a long prompt say nothing of the cost model."""
        calibrate: dict[InstanceId, str] = {}
        otherwise: dict[InstanceId, str] = {}
        for name, record in sorted(self._records.items()):
            if record.errors.seen < ANSWERS_MIN:
                continue
            bias, real = median(record.errors.values), median(record.real_ttft.values)
            if abs(bias) <= BIAS_SHARE_MAX * real or self.wall(abs(bias)) <= BIAS_WALL_SECONDS_MIN:
                continue
            how = "hopeful" if bias > 0 else "gloomy"
            text = f"{name}: {abs(bias):.2f} s too {how} at the median, real median {real:.2f} s, {record.errors.seen:,} answers"
            off = state.latency.prediction_error(name)
            text += f"; the newest prefills alone off by {off:.0%} (median)" if off is not None else ""
            pace = median(record.paces.values) if record.paces.values else 1.0
            fits = 1 / MODEL_FITS_FACTOR <= pace <= MODEL_FITS_FACTOR
            (otherwise if fits else calibrate)[name] = text
        if calibrate:
            yield self.warning(
                f"TTFT is predicted wrongly on {', '.join(calibrate)}",
                list(calibrate.values()),
                "The engines' cost model or the machine's load does not fit: measure it (pointsman calibrate URL), and give it to the workers (--engine-calibration).",
            )
        if otherwise:
            yield self.note(
                f"TTFT is predicted wrongly on {', '.join(otherwise)}, although the cost model fits",
                list(otherwise.values()),
                "What is off is the waiting, not the prefill: other orders of the queue, missed hits, or time between the processes.",
            )

    def _missed(self) -> Iterator[Finding]:
        wrong = {}
        for name, record in sorted(self._records.items()):
            tokens = max(1, record.prompt_tokens)
            missing, unexpected = record.missing_tokens / tokens, record.unexpected_tokens / tokens
            if record.answers >= ANSWERS_MIN and max(missing, unexpected) > MISPREDICTED_SHARE_MAX:
                wrong[name] = (
                    f"{name}: {missing:.1%} of the prompt tokens were predicted to be cached and were not, "
                    f"{unexpected:.1%} were cached unexpectedly"
                )
        if wrong:
            yield self.warning(
                f"cache hits are predicted wrongly on {', '.join(wrong)}",
                list(wrong.values()),
                "Missing: blocks are evicted while requests wait (more KV cache, shorter queues), or events are lost. "
                "Unexpected: events come late, or the contents were unknown.",
            )
