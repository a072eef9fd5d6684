"""Predictions: TTFT, prefill times and cache hits, predicted and measured."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request, Stage
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity
from pointsman_cli.doctor.samples import Sample
from pointsman_cli.terminal import wall_time

ANSWERS_MIN = 20
BIAS_SHARE_MAX = 0.3
BIAS_WALL_SECONDS_MIN = 0.05
SLOW_FACTOR = 1.5
"""Prefill time over that of the other instances."""
SLOW_SERIOUS_FACTOR = 2.5
SPELL_PREFILLS_MIN = 3
SPELL_FACTOR = 3.0
SPELL_SHARE_OF_OBJECTIVE = 0.1
"""A slow spell: SPELL_PREFILLS_MIN prefills in a row that exceed the cost model by SPELL_FACTOR and this share of the
SLO. The count is low because policies avoid a slow engine."""

SPELL_GAP_WALL_SECONDS = 5.0
SPELLS_MAX = 100
SPELL_PACES_MAX = 1000
SPELLS_SHOWN = 5
MISPREDICTED_SHARE_MAX = 0.1


@dataclass(frozen=True, slots=True)
class _Stall:
    at: EngineSeconds
    pace: float
    took: EngineSeconds
    request: RequestId


@dataclass(slots=True)
class _Spell:
    begun: EngineSeconds
    ended: EngineSeconds
    prefills: int
    paces: list[float]
    longest: tuple[EngineSeconds, RequestId]


@dataclass(slots=True)
class _Record:
    real_ttft: Sample[EngineSeconds] = field(default_factory=Sample)
    errors: Sample[EngineSeconds] = field(default_factory=Sample)
    paces: Sample[float] = field(default_factory=Sample)
    stalls: list[_Stall] = field(default_factory=list)
    spells: list[_Spell] = field(default_factory=list)
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
        stall = self._pace(record, request, event.at) if request.engine_seconds > 0 else None
        if stall is not None:
            record.stalls = [*record.stalls, stall][-SPELLS_MAX:]
            return
        self._end_spell(record)
        record.real_ttft.add(event.at - request.placed_at)
        record.errors.add(event.at - request.placed_at - request.predicted_ttft)

    def _pace(self, record: _Record, request: Request, at: EngineSeconds) -> _Stall | None:
        """The prefill, if it was stalled; stalls are not prediction errors."""
        took = at - request.granted_at
        pace = took / request.engine_seconds
        record.paces.add(pace)
        slow = pace >= SPELL_FACTOR and took - request.engine_seconds > SPELL_SHARE_OF_OBJECTIVE * request.slo_ttft
        return _Stall(at, pace, took, request.id) if slow else None

    def _end_spell(self, record: _Record) -> None:
        slow, record.stalls = record.stalls, []
        if len(slow) < SPELL_PREFILLS_MIN:
            return
        longest = max((stall.took, stall.request) for stall in slow)
        spell = _Spell(slow[0].at, slow[-1].at, len(slow), [stall.pace for stall in slow], longest)
        before = record.spells[-1] if record.spells else None
        if before and self.wall(spell.begun - before.ended) < SPELL_GAP_WALL_SECONDS:
            before.ended, before.prefills = spell.ended, before.prefills + spell.prefills
            before.paces = (before.paces + spell.paces)[:SPELL_PACES_MAX]
            before.longest = max(before.longest, spell.longest)
        elif len(record.spells) < SPELLS_MAX:
            record.spells.append(spell)

    def _spell_line(self, spell: _Spell) -> str:
        begun, ended = (wall_time(at, self.settings.speed) for at in (spell.begun, spell.ended))
        took, request = spell.longest
        return (
            f"{begun:%H:%M:%S} to {ended:%H:%M:%S}: {spell.prefills} slow prefills took {median(spell.paces):.1f} times what the cost model says, "
            f"the longest {took:.2f} s (request {request})"
        )

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
        yield from self._spells()
        yield from self._biased(state)
        yield from self._missed()

    def _slow(self) -> Iterator[Finding]:
        paces = {n: median(r.paces.values) for n, r in self._records.items() if r.paces.seen >= ANSWERS_MIN}
        for name, pace in sorted(paces.items()):
            others = [value for other, value in paces.items() if other != name]
            usual = median(others) if others else 1.0
            if pace < SLOW_FACTOR * max(1.0, usual):
                continue
            yield self.finding(
                Severity.SERIOUS if pace > SLOW_SERIOUS_FACTOR * max(1.0, usual) else Severity.WARNING,
                f"{name} is slow: its prefills take {pace:.1f} times what its cost model says, others {usual:.1f} times",
                [
                    f"{other}: {value:.2f} times, median of {self._records[other].paces.seen:,}"
                    for other, value in sorted(paces.items())
                ],
                "Compare its machine with the others' (clock rate, neighbours, other tenants); drain it if need be.",
            )

    def _spells(self) -> Iterator[Finding]:
        for record in self._records.values():
            self._end_spell(record)
        spells = {name: record.spells for name, record in sorted(self._records.items()) if record.spells}
        if spells:
            yield self.warning(
                f"slow for a while: {', '.join(spells)}",
                [f"{n}: {self._spell_line(spell)}" for n, found in spells.items() for spell in found[:SPELLS_SHOWN]],
                "Something held the engine or its machine up then: `pointsman explain` the request says whether others were slow, too.",
            )

    def _biased(self, state: State) -> Iterator[Finding]:
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
                off = state.latency.prediction_error(name)
                biased[name] += f"; the newest prefills alone off by {off:.0%} (median)" if off is not None else ""
        if biased:
            yield self.warning(
                f"TTFT is predicted wrongly on {', '.join(biased)}",
                list(biased.values()),
                "The engines' cost model or the machine's load does not fit: measure it (pointsman calibrate URL), and give it to the workers (--engine-calibration).",
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
