"""The types of a study: a table of rows (policies and conditions) against request rates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pointsman.primitives import EngineSeconds
from pointsman.simulation.simulator import Scenario
from pointsman_cli.simulate.experiment import Cell, Source
from pointsman_cli.simulate.variants import Variant
from pointsman_lab.results.central_queue import CentralOrder, Late

WARMUP = 500
SEEDS = (0, 1)
OURS = "pointsman"

Conditions = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CentralQueue:
    """`floor`: attainment of each tenth of the prompts by length."""

    order: CentralOrder
    late: Late = "dropped"
    floor: float = 0.0
    foresight: bool = True


BOUND, BOUND_WITH_FLOOR = "most on time", "most on time, floor 0.6"
NO_FORESIGHT = "most on time, no foresight"

BOUNDS: Mapping[str, Sequence[CentralQueue]] = {
    BOUND: (CentralQueue("most_on_time"), CentralQueue("most_on_time", late="served last"), CentralQueue("fcfs")),
    NO_FORESIGHT: (
        CentralQueue("most_on_time", foresight=False),
        CentralQueue("most_on_time", late="served last", foresight=False),
        CentralQueue("fcfs"),
    ),
    BOUND_WITH_FLOOR: (CentralQueue("most_on_time", floor=0.6),),
}
"""Central queues with one shared cache. Of several, the best at each rate and seed counts."""

Judged = Literal["best", "near"]
"""Expectation of `pointsman`: the best at every rate, or never more than a point behind it."""

Metric = Literal[
    "hit_rate", "loaded_share", "fetched_share", "copies", "hit_share_of_bound", "load_cv", "busiest_share",
    "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "late_wait_s", "e2e_p50_s", "e2e_p90_s",
    "tpot_p90_s", "capacity_with_tbt", "tbt_p90_s",
    "worst_length", "migrations", "rejected_share", "jain", "jain_of_amounts", "service_per_s", "tokens_per_s",
    "well_behaved_p50_s", "well_behaved_p90_s", "prediction_error_p50_s", "prediction_error_p90_s",
    "error_shortest_p50", "error_shortest_p90", "error_longest_p50", "error_longest_p90", "upper_coverage",
]  # fmt: skip
"""`capacity_with_tbt`: both TTFT and TBT within their SLOs. `late_wait_s`: mean TTFT of the served requests that missed
their SLO. `upper_coverage`: share of requests whose TTFT was at most the upper value that was predicted for nine in ten."""

USUAL: tuple[Metric, ...] = ("hit_rate", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "late_wait_s", "worst_length")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination of policies, and its own conditions."""

    variant: Variant
    conditions: Conditions = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Study:
    """`about`: its description; `telling`: rate of the columns behind the rates, by default the middle one."""

    key: str
    title: str
    about: str
    source: Source
    rows: Sequence[Row]
    rates: Sequence[float]
    telling: float | None = None
    seeds: Sequence[int] = SEEDS[:1]
    conditions: Conditions = field(default_factory=dict)
    metrics: Sequence[Metric] = USUAL
    judged: Judged | None = None
    goodput: Sequence[str] = ()
    bounds: Sequence[str] = ()
    windows: Sequence[tuple[str, EngineSeconds, EngineSeconds]] = ()
    warmup: int = WARMUP

    def is_searched(self, cell: Cell) -> bool:
        """For its goodput: with the first seed, as seeds differ by a hundredth."""
        return cell.variant.called in self.goodput and cell.scenario.seed == self.seeds[0]

    @property
    def telling_rate(self) -> float:
        return self.rates[len(self.rates) // 2] if self.telling is None else self.telling

    def name(self, row: Row) -> str:
        return row.variant.label(other.variant for other in self.rows)

    def cells(self) -> list[Cell]:
        return [
            Cell(
                source=self.source, variant=row.variant, scenario=self.scenario(row, seed), qps=qps, warmup=self.warmup
            )
            for row in self.rows
            for qps in self.rates
            for seed in self.seeds
        ]

    def scenario(self, row: Row, seed: int) -> Scenario:
        return row.variant.applied_to(Scenario(seed=seed, **{**self.conditions, **row.conditions}))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Named numbers that no simulation of a fleet gives. `measure`: a module's function of the traces' directory."""

    key: str
    measure: Callable[[Path], Mapping[str, float]]


SHORT_REQUESTS, SHORT_WARMUP = 120, 30


def shortened(study: Study) -> Study:
    """One seed, few requests."""
    return replace(
        study,
        source=replace(study.source, requests=min(study.source.requests, SHORT_REQUESTS)),
        seeds=study.seeds[:1],
        warmup=SHORT_WARMUP,
    )
