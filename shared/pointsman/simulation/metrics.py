"""Figures of a run: SLO attainment, latency, cache hits, load balance and fairness. The first `warmup` requests are
excluded. Load and service count while the counted requests arrive. Latencies are of served requests only, so a policy
that rejects looks fast; in effective request capacity rejected, failed and unfinished requests count as missed."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation.outcome import LoadSample, Outcome, RequestRow

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""Service weights of a computed prompt token and an output token, as in VTC and DLPM."""

LENGTH_BANDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    requests: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBand:
    """`prediction_error_*`: of the TTFT predicted at the placement, over the actual one."""

    tokens_min: Tokens
    tokens_max: Tokens
    attainment: Attainment
    prediction_error_p50: float | None = None
    prediction_error_p90: float | None = None
    upper_coverage: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    p50_s: EngineSeconds | None
    p90_s: EngineSeconds | None
    p99_s: EngineSeconds | None
    mean_s: EngineSeconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """None: nothing to measure."""

    requests: int
    finished: int
    rejections: int
    failures: int
    unfinished: int
    effective_capacity: float | None
    """Share of requests with their TTFT within its objective."""
    effective_capacity_with_tbt: float | None
    """Both TTFT and TBT within their objectives (Mooncake, FAST'25, 2.1)."""
    ttft: Latency
    tpot: Latency
    tbt: Latency
    """Over requests, of each one's 90th percentile of the gaps between tokens."""
    e2e: Latency
    well_behaved_ttft: Latency
    late_ttft_s: EngineSeconds | None = None
    """Mean TTFT of the served requests that missed their SLO."""
    hit_rate: float | None
    loaded_share: float | None
    """Of the prompt tokens, those loaded back from a host tier; part of `hit_rate`."""
    fetched_share: float | None = None
    """Of the prompt tokens, those fetched from another instance; part of `hit_rate`."""
    hit_share_of_bound: float | None
    """`hit_rate` over that of one infinite cache."""
    load_cv: float | None
    """Coefficient of variation of pending tokens across instances, mean over time."""
    migrations: int
    copies: int = 0
    """Prefixes copied ahead of need."""
    jain: float | None
    """Jain's index over the clients' service within the `Window`, each over its max-min fair share."""
    jain_of_amounts: float | None
    service_per_s: float | None
    tokens_per_s: float | None
    """Prompt tokens, cached ones included, and output tokens of the requests served within the `Window`: throughput as
    engines report it."""
    prediction_error_p50_s: EngineSeconds | None
    prediction_error_p90_s: EngineSeconds | None
    prediction_bias_s: EngineSeconds | None
    upper_coverage: float | None
    """Share of first tokens within the upper value of their predicted TTFT."""
    decision_us: float | None
    by_length: tuple[LengthBand, ...]
    by_tenant: Mapping[str, Attainment]


def summarise(
    outcome: Outcome,
    *,
    warmup: int = 0,
    hit_bound: float | None = None,
    misbehaving: Collection[str] = frozenset(),
) -> Report:
    """`hit_bound`: hit share of one infinite cache. `misbehaving`: clients that take more than their share."""
    rows = outcome.rows[warmup:]
    served = [row for row in rows if row.first_token_at is not None]
    errors = [
        row.ttft - row.predicted_ttft for row in served if row.ttft is not None and row.predicted_ttft is not None
    ]
    hits = hit_rate(served)
    window = Window(rows[0].arrived_at, rows[-1].arrived_at) if rows else Window(0.0, 0.0)
    service = service_by_tenant(outcome.rows, window)
    return Report(
        requests=len(rows),
        finished=sum(row.end == "finished" for row in rows),
        rejections=sum(row.end == "rejected" for row in rows),
        failures=sum(row.end == "failed" for row in rows),
        unfinished=sum(row.end == "unfinished" for row in rows),
        effective_capacity=effective_capacity(rows),
        effective_capacity_with_tbt=sum(row.on_time and row.in_pace for row in rows) / len(rows) if rows else None,
        ttft=_latency(row.ttft for row in served),
        tpot=_latency(tpot(row) for row in served),
        tbt=_latency(row.tbt_p90 for row in served),
        e2e=_latency(e2e(row) for row in served),
        well_behaved_ttft=_latency(row.ttft for row in served if row.tenant not in misbehaving),
        late_ttft_s=mean_known(row.ttft for row in served if not row.on_time),
        hit_rate=hits,
        loaded_share=_share_of_prompts(served, (row.loaded_tokens for row in served)),
        fetched_share=_share_of_prompts(served, (row.fetched_tokens for row in served)),
        hit_share_of_bound=hits / hit_bound if hits is not None and hit_bound else None,
        load_cv=load_cv(_within(outcome.samples, rows)),
        migrations=sum(row.migrations for row in rows),
        copies=outcome.copies - outcome.copies_failed,
        jain=jain_index(service_against_fair_share(service, demand_by_tenant(outcome.rows, window))),
        jain_of_amounts=jain_index(service.values()),
        service_per_s=sum(service.values()) / window.seconds if window.seconds else None,
        tokens_per_s=sum(_tokens(row, window) for row in outcome.rows) / window.seconds if window.seconds else None,
        prediction_error_p50_s=percentile([abs(error) for error in errors], 50),
        prediction_error_p90_s=percentile([abs(error) for error in errors], 90),
        prediction_bias_s=fmean(errors) if errors else None,
        upper_coverage=upper_coverage(rows),
        decision_us=outcome.decision_seconds / outcome.decisions * 1e6 if outcome.decisions else None,
        by_length=length_bands(rows),
        by_tenant=attainment_by_tenant(rows),
    )


def effective_capacity(rows: Sequence[RequestRow]) -> float | None:
    return sum(row.on_time for row in rows) / len(rows) if rows else None


def upper_coverage(rows: Sequence[RequestRow]) -> float | None:
    within = [
        row.ttft <= row.predicted_ttft_upper
        for row in rows
        if row.ttft is not None and row.predicted_ttft_upper is not None and not row.migrations
    ]
    return fmean(within) if within else None


def _relative_errors(rows: Sequence[RequestRow]) -> list[float]:
    return [
        abs(row.predicted_ttft - row.ttft) / row.ttft for row in rows if row.ttft and row.predicted_ttft is not None
    ]


def tpot(row: RequestRow) -> EngineSeconds | None:
    """Mean time per output token after the first; None with fewer than two, or unfinished."""
    if row.end != "finished" or row.first_token_at is None or row.ended_at is None or answer_tokens(row) < 2:
        return None
    return (row.ended_at - row.first_token_at) / (row.output_tokens - 1)


def e2e(row: RequestRow) -> EngineSeconds | None:
    return row.ended_at - row.arrived_at if row.end == "finished" and row.ended_at is not None else None


def answer_tokens(row: RequestRow) -> Tokens:
    if row.end != "finished":
        return 0
    return 1 if row.ended_at == row.first_token_at else row.output_tokens


def hit_rate(served: Sequence[RequestRow]) -> float | None:
    return _share_of_prompts(served, (row.cached_tokens for row in served))


def _share_of_prompts(served: Sequence[RequestRow], tokens: Iterable[Tokens]) -> float | None:
    prompt = sum(row.prompt_tokens for row in served)
    return sum(tokens) / prompt if prompt else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks."""
    return _of_ordered(sorted(values), percent)


def mean_known(values: Iterable[float | None]) -> float | None:
    """Of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def load_cv(samples: Sequence[LoadSample]) -> float | None:
    """Samples without pending work do not count."""
    weighted = seconds = 0.0
    for sample, following in pairwise(samples):
        if any(sample.pending_tokens):
            held = following.at - sample.at
            weighted += held * pstdev(sample.pending_tokens) / fmean(sample.pending_tokens)
            seconds += held
    return weighted / seconds if seconds else None


def _within(samples: Sequence[LoadSample], rows: Sequence[RequestRow]) -> list[LoadSample]:
    if not rows:
        return []
    return [sample for sample in samples if rows[0].arrived_at <= sample.at <= rows[-1].arrived_at]


@dataclass(frozen=True, slots=True)
class Window:
    """The time over which service is compared: between the first and last counted arrival. Before, caches are cold;
    afterwards every demand is met. Includes service of warm-up requests."""

    since: EngineSeconds
    until: EngineSeconds

    @property
    def seconds(self) -> EngineSeconds:
        return self.until - self.since

    def holds(self, moment: EngineSeconds) -> bool:
        return self.since < moment <= self.until

    def share_of(self, begin: EngineSeconds, end: EngineSeconds) -> float:
        if begin >= end:
            return float(self.holds(end))
        return max(0.0, min(end, self.until) - max(begin, self.since)) / (end - begin)


def service_by_tenant(rows: Sequence[RequestRow], window: Window) -> dict[str, float]:
    """Weighted computed prompt tokens and output tokens of each client, without cached ones (as in DLPM). A prompt
    counts at its first token, an answer evenly from first to last."""
    service = dict.fromkeys(sorted({row.tenant for row in rows}), 0.0)
    for row in rows:
        service[row.tenant] += _service(row, window)
    return service


def demand_by_tenant(rows: Sequence[RequestRow], window: Window) -> dict[str, float]:
    """Service of each client, and uncached tokens of its requests that waited at the end or were rejected."""
    demand = service_by_tenant(rows, window)
    for row in rows:
        begun = row.first_token_at is not None and row.first_token_at <= window.until
        if row.arrived_at <= window.until and not begun and not _given_up(row, window.since):
            demand[row.tenant] += _work(row)
    return demand


def _given_up(row: RequestRow, moment: EngineSeconds) -> bool:
    return row.end in ("rejected", "failed") and row.ended_at is not None and row.ended_at <= moment


def _service(row: RequestRow, window: Window) -> float:
    if row.first_token_at is None:
        return 0.0
    prompt = INPUT_WEIGHT * (row.prompt_tokens - row.cached_tokens) * window.holds(row.first_token_at)
    if row.ended_at is None:
        return prompt
    return prompt + OUTPUT_WEIGHT * answer_tokens(row) * window.share_of(row.first_token_at, row.ended_at)


def _tokens(row: RequestRow, window: Window) -> float:
    if row.first_token_at is None:
        return 0.0
    prompt = row.prompt_tokens * window.holds(row.first_token_at)
    return prompt + (answer_tokens(row) * window.share_of(row.first_token_at, row.ended_at) if row.ended_at else 0.0)


def _work(row: RequestRow) -> float:
    cached = row.predicted_cached_tokens if row.first_token_at is None else row.cached_tokens
    output = answer_tokens(row) if row.end == "finished" else row.output_tokens
    return INPUT_WEIGHT * (row.prompt_tokens - cached) + OUTPUT_WEIGHT * output


def service_against_fair_share(service: Mapping[str, float], demand: Mapping[str, float]) -> list[float]:
    """Clients that are due nothing are left out."""
    left = sum(service.values())
    ratios = []
    for served, tenant in enumerate(sorted(demand, key=lambda tenant: (demand[tenant], tenant))):
        due = min(demand[tenant], left / (len(demand) - served))
        left -= due
        if due > 0:
            ratios.append(service[tenant] / due)
    return ratios


def jain_index(service: Collection[float]) -> float | None:
    """(sum x)^2 / (n * sum x^2); None if all are 0."""
    squares = sum(one * one for one in service)
    return sum(service) ** 2 / (len(service) * squares) if squares else None


def attainment_by_tenant(rows: Sequence[RequestRow]) -> dict[str, Attainment]:
    groups: dict[str, list[RequestRow]] = {}
    for row in rows:
        groups.setdefault(row.tenant, []).append(row)
    return {tenant: _attainment(groups[tenant]) for tenant in sorted(groups)}


def length_bands(rows: Sequence[RequestRow]) -> tuple[LengthBand, ...]:
    """Ten groups of equal size, shortest prompts first. Equal lengths are shuffled, so that time has no effect."""
    ordered = sorted(rows, key=lambda row: (row.prompt_tokens, _shuffled(row.number)))
    edges = [len(ordered) * band // LENGTH_BANDS for band in range(LENGTH_BANDS + 1)]
    return tuple(
        LengthBand(
            tokens_min=ordered[start].prompt_tokens,
            tokens_max=ordered[end - 1].prompt_tokens,
            attainment=_attainment(ordered[start:end]),
            prediction_error_p50=percentile(_relative_errors(ordered[start:end]), 50),
            prediction_error_p90=percentile(_relative_errors(ordered[start:end]), 90),
            upper_coverage=upper_coverage(ordered[start:end]),
        )
        for start, end in pairwise(edges)
        if end > start
    )


def _attainment(rows: Sequence[RequestRow]) -> Attainment:
    return Attainment(requests=len(rows), share=sum(row.on_time for row in rows) / len(rows))


def _shuffled(number: int) -> int:
    return number * 0x9E3779B1 % 2**32


def _latency(values: Iterable[EngineSeconds | None]) -> Latency:
    ordered = sorted(value for value in values if value is not None)
    return Latency(
        p50_s=_of_ordered(ordered, 50),
        p90_s=_of_ordered(ordered, 90),
        p99_s=_of_ordered(ordered, 99),
        mean_s=mean_known(ordered),
    )


def _of_ordered(ordered: Sequence[float], percent: float) -> float | None:
    if not ordered:
        return None
    rank = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return below + (above - below) * (rank - math.floor(rank))
