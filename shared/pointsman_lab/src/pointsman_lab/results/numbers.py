"""The numbers of results.json. Shares are rounded to four places, other values to four digits."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from pointsman.simulation.goodput import Goodput
from pointsman.simulation.outcome import LoadSample
from pointsman_cli.simulate.experiment import CellResult
from pointsman_cli.simulate.report import worst_length
from pointsman_lab.results.study import Study

Goodputs = Mapping[tuple[str, int], Goodput]


class Point(msgspec.Struct, kw_only=True):
    """One row of a study at one rate. `capacity`: a value for each seed of the study; the others are means over them."""

    row: str
    rate: float
    capacity: list[float]
    metrics: dict[str, float]
    windows: list[float | None] = []

    @property
    def mean(self) -> float:
        return fmean(self.capacity)


class StudyNumbers(msgspec.Struct, kw_only=True):
    seeds: list[int]
    points: list[Point]
    goodput: dict[str, list[float]] = {}
    bounds: dict[str, list[float]] = {}
    bound_hits: dict[str, list[float]] = {}

    def point(self, row: str, rate: float) -> Point:
        """Raises KeyError without that run."""
        found = next((p for p in self.points if p.row == row and p.rate == rate), None)
        if found is None:
            raise KeyError(row, rate)
        return found

    def rows(self) -> list[str]:
        return list(dict.fromkeys(point.row for point in self.points))

    def rates(self) -> list[float]:
        return sorted({point.rate for point in self.points})

    def capacity(self, row: str, rate: float) -> float:
        return self.point(row, rate).mean


class Numbers(msgspec.Struct, kw_only=True):
    """`measurements`: named numbers that come from no study. `core_minutes`: CPU time of the whole run; 0: not known."""

    taste: bool
    studies: dict[str, StudyNumbers]
    measurements: dict[str, dict[str, float]] = {}
    core_minutes: float = 0.0

    def overlaid(self, found: "Numbers") -> "Numbers":
        """These numbers, and over them those found."""
        return Numbers(
            taste=self.taste or found.taste,
            studies=self.studies | found.studies,
            measurements=self.measurements | found.measurements,
            core_minutes=self.core_minutes or found.core_minutes,
        )

    def mean(self, study: str, row: str, what: str, rate: float | None = None) -> float:
        """A metric, `capacity` or `goodput`; without a rate the mean over rates. Raises KeyError if not measured."""
        found = self.studies[study]
        if what == "goodput":
            return fmean(found.goodput[row])
        points = [found.point(row, each) for each in (found.rates() if rate is None else (rate,))]
        return fmean(point.mean if what == "capacity" else point.metrics[what] for point in points)


def study_numbers(study: Study, results: Sequence[CellResult], goodputs: Goodputs) -> StudyNumbers:
    groups: dict[tuple[str, float], list[CellResult]] = {}
    names = {row.variant.key: study.name(row) for row in study.rows}
    for result in results:
        groups.setdefault((names[result.cell.variant.key], result.cell.qps), []).append(result)
    by_row: dict[str, list[float]] = {}
    for (key, _), goodput in sorted(goodputs.items()):
        by_row.setdefault(names[key], []).append(round(goodput.qps, 3))
    return StudyNumbers(
        seeds=list(study.seeds),
        points=[_point(study, row, rate, group) for (row, rate), group in groups.items()],
        goodput=by_row,
    )


def _point(study: Study, row: str, rate: float, group: Sequence[CellResult]) -> Point:
    found = {name: _mean(group, column.value_of) for name, column in METRICS.items()}
    return Point(
        row=row,
        rate=rate,
        capacity=[round(result.report.effective_capacity or 0.0, 4) for result in group],
        metrics={name: _rounded(value) for name, value in found.items() if value is not None},
        windows=[_attainment(group, start, end) for _, start, end in study.windows],
    )


class MetricColumn(NamedTuple):
    heading: str
    form: str
    value_of: Callable[[CellResult], float | None]


METRICS: Mapping[str, MetricColumn] = {
    "hit_rate": MetricColumn("hit rate", "{:.3f}", lambda c: c.report.hit_rate),
    "loaded_share": MetricColumn("of it loaded", "{:.3f}", lambda c: c.report.loaded_share),
    "fetched_share": MetricColumn("fetched", "{:.3f}", lambda c: c.report.fetched_share),
    "copies": MetricColumn("copies", "{:.0f}", lambda c: c.report.copies),
    "load_cv": MetricColumn("load CV", "{:.2f}", lambda c: c.report.load_cv),
    "hit_share_of_bound": MetricColumn("share of the bound", "{:.1%}", lambda c: c.report.hit_share_of_bound),
    "busiest_share": MetricColumn("at the busiest", "{:.0%}", lambda c: _busiest_share(c.series.samples)),
    "ttft_mean_s": MetricColumn("mean TTFT", "{:.2f} s", lambda c: c.report.ttft.mean_s),
    "ttft_p50_s": MetricColumn("TTFT P50", "{:.2f} s", lambda c: c.report.ttft.p50_s),
    "ttft_p90_s": MetricColumn("P90", "{:.2f} s", lambda c: c.report.ttft.p90_s),
    "ttft_p99_s": MetricColumn("P99", "{:.1f} s", lambda c: c.report.ttft.p99_s),
    "late_wait_s": MetricColumn("late ones wait", "{:.1f} s", lambda c: c.report.late_ttft_s),
    "e2e_p50_s": MetricColumn("E2E P50", "{:.2f} s", lambda c: c.report.e2e.p50_s),
    "e2e_p90_s": MetricColumn("E2E P90", "{:.2f} s", lambda c: c.report.e2e.p90_s),
    "tpot_p90_s": MetricColumn("TPOT P90", "{:.3f} s", lambda c: c.report.tpot.p90_s),
    "capacity_with_tbt": MetricColumn("with TBT", "{:.3f}", lambda c: c.report.effective_capacity_with_tbt),
    "tbt_p90_s": MetricColumn("TBT P90", "{:.3f} s", lambda c: c.report.tbt.p90_s),
    "worst_length": MetricColumn("worst tenth", "{:.2f}", lambda c: worst_length(c.report)),
    "migrations": MetricColumn(
        "moved", "{:.0f}", lambda c: 1000 * c.report.migrations / c.report.requests if c.report.requests else None
    ),
    "rejected_share": MetricColumn(
        "rejected", "{:.1%}", lambda c: c.report.rejections / c.report.requests if c.report.requests else None
    ),
    "jain": MetricColumn("Jain", "{:.3f}", lambda c: c.report.jain),
    "jain_of_amounts": MetricColumn("Jain of amounts", "{:.3f}", lambda c: c.report.jain_of_amounts),
    "service_per_s": MetricColumn("service, tokens/s", "{:,.0f}", lambda c: c.report.service_per_s),
    "tokens_per_s": MetricColumn("tokens/s", "{:,.0f}", lambda c: c.report.tokens_per_s),
    "well_behaved_p50_s": MetricColumn("well-behaved P50", "{:.2f} s", lambda c: c.report.well_behaved_ttft.p50_s),
    "well_behaved_p90_s": MetricColumn("well-behaved P90", "{:.2f} s", lambda c: c.report.well_behaved_ttft.p90_s),
    "prediction_error_p50_s": MetricColumn("error P50", "{:.2f} s", lambda c: c.report.prediction_error_p50_s),
    "prediction_error_p90_s": MetricColumn("error P90", "{:.2f} s", lambda c: c.report.prediction_error_p90_s),
    "error_shortest_p50": MetricColumn(
        "shortest tenth P50",
        "{:.0%}",
        lambda c: c.report.by_length[0].prediction_error_p50 if c.report.by_length else None,
    ),
    "error_shortest_p90": MetricColumn(
        "P90", "{:.0%}", lambda c: c.report.by_length[0].prediction_error_p90 if c.report.by_length else None
    ),
    "error_longest_p50": MetricColumn(
        "longest tenth P50",
        "{:.0%}",
        lambda c: c.report.by_length[-1].prediction_error_p50 if c.report.by_length else None,
    ),
    "error_longest_p90": MetricColumn(
        "P90", "{:.0%}", lambda c: c.report.by_length[-1].prediction_error_p90 if c.report.by_length else None
    ),
    "upper_coverage": MetricColumn("within upper value", "{:.1%}", lambda c: c.report.upper_coverage),
}


def _busiest_share(samples: Sequence[LoadSample]) -> float | None:
    shares = [max(s.pending_tokens) / sum(s.pending_tokens) for s in samples if any(s.pending_tokens)]
    return fmean(shares) if shares else None


def _attainment(group: Sequence[CellResult], start: float, end: float) -> float | None:
    inside = [arrival.on_time for result in group for arrival in result.series.arrivals if start <= arrival.at < end]
    return round(fmean(inside), 4) if inside else None


def _mean(group: Sequence[CellResult], value_of: Callable[[CellResult], float | None]) -> float | None:
    values = [value for result in group if (value := value_of(result)) is not None]
    return fmean(values) if values else None


def _rounded(value: float) -> float:
    return round(value, 4) if abs(value) < 1 else float(f"{value:.4g}")
