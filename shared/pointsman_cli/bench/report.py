"""Outcomes of requests in; tables and JSON out. Latencies are engine time. Effective request capacity: share of all
requests whose TTFT met the SLO; rejected and failed requests count as missed. Hit rate: the engines' cached over prompt
tokens."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation.metrics import percentile
from pointsman_cli.bench.moves import Moves
from pointsman_cli.formatting import count, milliseconds, seconds, share
from pointsman_cli.terminal import table

LATENESS_SHARE_MAX = 0.05
UNKNOWN = "unknown"
"""Fleets with keys do not tell clients which instance answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended. Latencies in engine seconds since it was sent, or None. `late_s`: engine seconds between
    its due time and sending."""

    ending: Literal["completed", "rejected", "failed"]
    late_s: EngineSeconds
    problem: str = ""
    ttft_s: EngineSeconds | None = None
    e2e_s: EngineSeconds | None = None
    prompt_tokens: Tokens = 0
    cached_tokens: Tokens | None = None
    output_tokens: Tokens = 0
    predicted_ttft_s: EngineSeconds | None = None
    predicted_ttft_upper_s: EngineSeconds | None = None
    instance: str = ""

    @property
    def tpot_s(self) -> EngineSeconds | None:
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    def met(self, slo_ttft: EngineSeconds) -> bool:
        return self.ending == "completed" and self.ttft_s is not None and self.ttft_s <= slo_ttft


class InstanceShare(msgspec.Struct, kw_only=True):
    requests: int
    share: float
    hit_rate: float | None
    ttft_p50_s: EngineSeconds | None


class RunFacts(msgspec.Struct, kw_only=True):
    """`offered_rate`: mean arrivals per engine second."""

    policy: str
    slo_ttft_s: EngineSeconds
    speed: float
    offered_rate: float
    workload: str
    trace: str | None
    seed: int


class RunReport(RunFacts, kw_only=True):
    """One run; null where nothing was measured."""

    requests: int
    completed: int
    rejected: int
    failed: int
    ttft_p50_s: EngineSeconds | None
    ttft_p90_s: EngineSeconds | None
    ttft_p99_s: EngineSeconds | None
    tpot_p50_s: EngineSeconds | None
    e2e_p50_s: EngineSeconds | None
    effective_capacity: float | None
    hit_rate: float | None
    per_instance: dict[str, InstanceShare]
    tpot_p90_s: EngineSeconds | None
    tpot_p99_s: EngineSeconds | None
    e2e_p90_s: EngineSeconds | None
    e2e_p99_s: EngineSeconds | None
    ttft_prediction_error_p50_s: EngineSeconds | None
    ttft_prediction_error_p90_s: EngineSeconds | None
    ttft_upper_coverage: float | None
    errors: dict[str, int]
    prompt_tokens: Tokens
    output_tokens: Tokens
    late_p50_s: EngineSeconds | None
    late_p99_s: EngineSeconds | None
    late_max_s: EngineSeconds | None
    wall_s: float
    interrupted: bool
    rebalancing: str | None = None
    moves: Moves | None = None
    prompt_share_by_tier: dict[str, float] | None = None
    """Which tier the prompt tokens came from; `computed`: none. Null without a log, or if nothing was loaded back."""


class BenchReport(msgspec.Struct, kw_only=True):
    runs: list[RunReport]


def summarise(outcomes: Sequence[Outcome], facts: RunFacts, *, wall_s: float, interrupted: bool) -> RunReport:
    completed = [o for o in outcomes if o.ending == "completed"]
    ttft = _values(completed, lambda o: o.ttft_s)
    tpot = _values(completed, lambda o: o.tpot_s)
    e2e = _values(completed, lambda o: o.e2e_s)
    late = [o.late_s for o in outcomes]
    off = [abs(o.ttft_s - o.predicted_ttft_s) for o in completed if o.ttft_s is not None and o.predicted_ttft_s]
    within = [
        o.ttft_s <= o.predicted_ttft_upper_s for o in completed if o.ttft_s is not None and o.predicted_ttft_upper_s
    ]
    endings = Counter(o.ending for o in outcomes)
    return RunReport(
        **msgspec.structs.asdict(facts),
        requests=len(outcomes),
        completed=len(completed),
        rejected=endings["rejected"],
        failed=endings["failed"],
        ttft_p50_s=percentile(ttft, 50),
        ttft_p90_s=percentile(ttft, 90),
        ttft_p99_s=percentile(ttft, 99),
        tpot_p50_s=percentile(tpot, 50),
        tpot_p90_s=percentile(tpot, 90),
        tpot_p99_s=percentile(tpot, 99),
        e2e_p50_s=percentile(e2e, 50),
        e2e_p90_s=percentile(e2e, 90),
        e2e_p99_s=percentile(e2e, 99),
        effective_capacity=attainment(outcomes, facts.slo_ttft_s),
        hit_rate=hit_rate(completed),
        per_instance=_per_instance(completed),
        ttft_prediction_error_p50_s=percentile(off, 50),
        ttft_prediction_error_p90_s=percentile(off, 90),
        ttft_upper_coverage=sum(within) / len(within) if within else None,
        errors=dict(Counter(o.problem for o in outcomes if o.problem).most_common()),
        prompt_tokens=sum(o.prompt_tokens for o in completed),
        output_tokens=sum(o.output_tokens for o in completed),
        late_p50_s=percentile(late, 50),
        late_p99_s=percentile(late, 99),
        late_max_s=max(late, default=None),
        wall_s=wall_s,
        interrupted=interrupted,
    )


def attainment(outcomes: Sequence[Outcome], slo_ttft: EngineSeconds) -> float | None:
    return sum(o.met(slo_ttft) for o in outcomes) / len(outcomes) if outcomes else None


def hit_rate(outcomes: Iterable[Outcome]) -> float | None:
    counted = [(o.cached_tokens, o.prompt_tokens) for o in outcomes if o.cached_tokens is not None]
    prompt = sum(tokens for _, tokens in counted)
    return sum(cached for cached, _ in counted) / prompt if prompt else None


def lateness_warning(report: RunReport) -> str | None:
    late = report.late_p99_s or 0.0
    if late <= LATENESS_SHARE_MAX * report.slo_ttft_s:
        return None
    return (
        f"the bench itself was late: P99 {late:.2f} s of engine time ({late / report.speed * 1000:.0f} ms on the wall), "
        f"at worst {report.late_max_s or 0.0:.2f} s. Latencies count from when a request was really sent; for exact "
        "arrivals use a lower --speed or --rate."
    )


def _values(outcomes: Iterable[Outcome], of: Callable[[Outcome], float | None]) -> list[float]:
    return [value for outcome in outcomes if (value := of(outcome)) is not None]


def _per_instance(completed: Sequence[Outcome]) -> dict[str, InstanceShare]:
    shares = {}
    for instance in sorted({o.instance for o in completed}, key=_natural):
        own = [o for o in completed if o.instance == instance]
        shares[instance or UNKNOWN] = InstanceShare(
            requests=len(own),
            share=len(own) / len(completed),
            hit_rate=hit_rate(own),
            ttft_p50_s=percentile(_values(own, lambda o: o.ttft_s), 50),
        )
    return shares


def _natural(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


# --- Tables ---

Row = tuple[str, Callable[[RunReport], float | None], Callable[[float], str]]


def _tier(run: RunReport, tier: str) -> float | None:
    return run.prompt_share_by_tier.get(tier, 0.0) if run.prompt_share_by_tier else None


ROWS: Sequence[Row] = (
    ("requests", lambda r: r.requests, count),
    ("completed", lambda r: r.completed, count),
    ("rejected", lambda r: r.rejected, count),
    ("failed", lambda r: r.failed, count),
    ("TTFT P50", lambda r: r.ttft_p50_s, seconds),
    ("TTFT P90", lambda r: r.ttft_p90_s, seconds),
    ("TTFT P99", lambda r: r.ttft_p99_s, seconds),
    ("TPOT P50", lambda r: r.tpot_p50_s, milliseconds),
    ("TPOT P99", lambda r: r.tpot_p99_s, milliseconds),
    ("end-to-end P50", lambda r: r.e2e_p50_s, seconds),
    ("end-to-end P99", lambda r: r.e2e_p99_s, seconds),
    ("effective capacity", lambda r: r.effective_capacity, share),
    ("hit rate (engines)", lambda r: r.hit_rate, share),
    ("of prompts, on the device", lambda r: _tier(r, "device"), share),
    ("loaded from host memory", lambda r: _tier(r, "host"), share),
    ("loaded from storage", lambda r: _tier(r, "storage"), share),
    ("loaded from a shared store", lambda r: _tier(r, "external"), share),
    ("computed", lambda r: _tier(r, "computed"), share),
    ("moved by rebalancing", lambda r: r.moves.moved if r.moves else None, count),
    ("their hit rate where placed", lambda r: r.moves.hit_rate_placed if r.moves else None, share),
    ("their hit rate where moved to", lambda r: r.moves.hit_rate_moved if r.moves else None, share),
    ("their hit rate as found", lambda r: r.moves.hit_rate_found if r.moves else None, share),
    (
        "busiest instance's share",
        lambda r: max((s.share for name, s in r.per_instance.items() if name != UNKNOWN), default=None),
        share,
    ),
)


TIERS = {label for label, _, _ in ROWS if label.startswith(("of prompts", "loaded from", "computed"))}
WHERE_MOVED = {label for label, _, _ in ROWS if label.startswith(("moved", "their"))}


def runs_table(runs: Sequence[RunReport]) -> Table:
    made = table("")
    for number, run in enumerate(runs):
        made.add_column(run.policy + (" (interrupted)" if run.interrupted else ""), justify="right")
        if number:
            made.add_column("ratio", justify="right", style="dim")
    for label, value_of, shown in ROWS:
        if label in WHERE_MOVED and not any(run.moves and run.moves.moved for run in runs):
            continue
        if label in TIERS and not any(value_of(run) for run in runs):
            continue
        first = value_of(runs[0])
        cells = []
        for number, run in enumerate(runs):
            value = value_of(run)
            cells.append("-" if value is None else shown(value))
            if number:
                cells.append(f"{value / first:.2f}x" if first and value is not None else "")
        made.add_row(label, *cells, end_section=label in {"failed", "end-to-end P99"})
    return made


def instances_table(run: RunReport) -> Table:
    shown = table(f"instance, {run.policy}", ">requests", ">share", ">hit rate", ">TTFT P50")
    for name, part in run.per_instance.items():
        shown.add_row(
            name,
            count(part.requests),
            share(part.share),
            "-" if part.hit_rate is None else share(part.hit_rate),
            "-" if part.ttft_p50_s is None else seconds(part.ttft_p50_s),
        )
    return shown


def errors_text(errors: Mapping[str, int]) -> Group:
    return Group(*(Text(f"{number:>6}  {kind}", style="yellow") for kind, number in errors.items()))


def headline(run: RunReport) -> Text:
    return Text(
        f"{run.workload}, {run.offered_rate:.2f} requests/s, TTFT SLO {run.slo_ttft_s:g} s, "
        f"times are engine time (speed {run.speed:g})",
        style="bold",
    )
