"""Predictions: was the time to first token, and what the cache would have, what was predicted at placement?"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.primitives import InstanceId, Seconds, Tokens
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Stage
from pointsman.tooling.doctor.examination import Examiner
from pointsman.tooling.doctor.findings import Finding, Severity
from pointsman.tooling.doctor.samples import Sample

AREA = "predictions"
ANSWERS_MIN = 20
BIAS_SHARE_MAX = 0.3
"""Of the mean time to first token."""

BIAS_WALL_SECONDS_MIN = 0.05
SLOW_FACTOR = 1.5
"""An instance is slow whose prefills, over what its cost model says, take so many times what those of the others do."""

SLOW_SERIOUS_FACTOR = 2.5
MISPREDICTED_SHARE_MAX = 0.1
"""Of the prompt tokens."""


@dataclass(slots=True)
class _Record:
    """What one instance was predicted and what it did. Seconds are engine seconds."""

    real_ttft: Sample[Seconds] = field(default_factory=Sample)
    errors: Sample[Seconds] = field(default_factory=Sample)
    paces: Sample[float] = field(default_factory=Sample)
    answers: int = 0
    prompt_tokens: Tokens = 0
    missing_tokens: Tokens = 0
    unexpected_tokens: Tokens = 0


class Predictions(Examiner):
    """Bias of TTFT, pace of prefills, and hits that were not what was predicted, by instance."""

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._records: dict[InstanceId, _Record] = {}

    @override
    def before(self, event: LogEvent, state: State) -> None:
        match event:
            case PrefillFinished():
                self._first_token(event, state)
            case RequestFinished():
                self._answer(event, state)
            case _:
                pass

    def _first_token(self, event: PrefillFinished, state: State) -> None:
        request = state.workload.requests.get(event.request)
        if event.stamp is not None or request is None or request.stage is not Stage.PREFILL:
            return
        record = self._record(event.instance)
        record.real_ttft.add(event.at - request.placed_at)
        record.errors.add(event.at - request.placed_at - request.predicted_ttft)
        if request.engine_seconds > 0:
            record.paces.add((event.at - request.granted_at) / request.engine_seconds)

    def _answer(self, event: RequestFinished, state: State) -> None:
        request = state.workload.requests.get(event.request)
        if request is None or event.cached_tokens < 0 or request.instance != event.instance:
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
        yield from self._slow()
        yield from self._biased()
        yield from self._missed()

    def _slow(self) -> Iterator[Finding]:
        paces = {n: median(r.paces.values) for n, r in self._records.items() if r.paces.seen >= ANSWERS_MIN}
        for name, pace in sorted(paces.items()):
            others = [value for other, value in paces.items() if other != name]
            usual = median(others) if others else 1.0
            if pace < SLOW_FACTOR * max(1.0, usual):
                continue
            yield Finding(
                severity=Severity.SERIOUS if pace > SLOW_SERIOUS_FACTOR * max(1.0, usual) else Severity.WARNING,
                area=AREA,
                what=f"{name} is slow: its prefills take {pace:.1f} times what its cost model says, others {usual:.1f} times",
                evidence=[f"{other}: {value:.2f} times, median of {self._records[other].paces.seen:,}" for other, value in sorted(paces.items())],
                advice="Compare its machine with the others' (clock rate, neighbours, other tenants); drain it if need be.",
            )  # fmt: skip

    def _biased(self) -> Iterator[Finding]:
        biased = {}
        for name, record in sorted(self._records.items()):
            if record.errors.seen < ANSWERS_MIN:
                continue
            bias, real = fmean(record.errors.values), fmean(record.real_ttft.values)
            if abs(bias) > BIAS_SHARE_MAX * real and self.wall(abs(bias)) > BIAS_WALL_SECONDS_MIN:
                how = "hopeful" if bias > 0 else "gloomy"
                biased[name] = (
                    f"{name}: {abs(bias):.2f} s too {how} on average, real mean {real:.2f} s, {record.errors.seen:,} answers"
                )
        if biased:
            yield Finding(
                severity=Severity.WARNING,
                area=AREA,
                what=f"TTFT is predicted wrongly on {', '.join(biased)}",
                evidence=list(biased.values()),
                advice="The engines' cost model (--engine-model, the worker's prefill settings) or the machine's load does not fit.",
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
            yield Finding(
                severity=Severity.WARNING,
                area=AREA,
                what=f"cache hits are predicted wrongly on {', '.join(wrong)}",
                evidence=list(wrong.values()),
                advice="Missing: blocks are evicted while requests wait (more KV cache, shorter queues), or events are lost. "
                "Unexpected: events come late, or the contents were unknown.",
            )
