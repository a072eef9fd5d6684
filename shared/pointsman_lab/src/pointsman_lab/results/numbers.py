"""The numbers of results.json. Shares are rounded to four places, other values to four digits."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from pointsman.simulation.goodput import Goodput
from pointsman.simulation.metrics import Report
from pointsman.simulation.outcome import LoadSample
from pointsman_cli.simulate.experiment import CellResult
from pointsman_cli.simulate.report import worst_length
from pointsman_lab.results.study import Metric, Study

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
    found = {name: _mean(group, value_of) for name, value_of in METRICS.items()}
    return Point(
        row=row,
        rate=rate,
        capacity=[round(result.report.effective_capacity or 0.0, 4) for result in group],
        metrics={name: _rounded(value) for name, value in found.items() if value is not None},
        windows=[_attainment(group, start, end) for _, start, end in study.windows],
    )


def _of_report(value_of: Callable[[Report], float | None]) -> Callable[[CellResult], float | None]:
    return lambda result: value_of(result.report)


METRICS: Mapping[Metric, Callable[[CellResult], float | None]] = {
    "hit_rate": _of_report(lambda r: r.hit_rate),
    "loaded_share": _of_report(lambda r: r.loaded_share),
    "fetched_share": _of_report(lambda r: r.fetched_share),
    "copies": _of_report(lambda r: r.copies),
    "load_cv": _of_report(lambda r: r.load_cv),
    "hit_share_of_bound": _of_report(lambda r: r.hit_share_of_bound),
    "busiest_share": lambda result: _busiest_share(result.series.samples),
    "ttft_mean_s": _of_report(lambda r: r.ttft.mean_s),
    "ttft_p50_s": _of_report(lambda r: r.ttft.p50_s),
    "ttft_p90_s": _of_report(lambda r: r.ttft.p90_s),
    "ttft_p99_s": _of_report(lambda r: r.ttft.p99_s),
    "late_wait_s": _of_report(lambda r: r.late_ttft_s),
    "e2e_p50_s": _of_report(lambda r: r.e2e.p50_s),
    "e2e_p90_s": _of_report(lambda r: r.e2e.p90_s),
    "tpot_p90_s": _of_report(lambda r: r.tpot.p90_s),
    "capacity_with_tbt": _of_report(lambda r: r.effective_capacity_with_tbt),
    "tbt_p90_s": _of_report(lambda r: r.tbt.p90_s),
    "worst_length": _of_report(worst_length),
    "migrations": _of_report(lambda r: 1000 * r.migrations / r.requests if r.requests else None),
    "rejected_share": _of_report(lambda r: r.rejections / r.requests if r.requests else None),
    "jain": _of_report(lambda r: r.jain),
    "jain_of_amounts": _of_report(lambda r: r.jain_of_amounts),
    "service_per_s": _of_report(lambda r: r.service_per_s),
    "tokens_per_s": _of_report(lambda r: r.tokens_per_s),
    "well_behaved_p50_s": _of_report(lambda r: r.well_behaved_ttft.p50_s),
    "well_behaved_p90_s": _of_report(lambda r: r.well_behaved_ttft.p90_s),
    "prediction_error_p50_s": _of_report(lambda r: r.prediction_error_p50_s),
    "prediction_error_p90_s": _of_report(lambda r: r.prediction_error_p90_s),
    "error_shortest_p50": _of_report(lambda r: r.by_length[0].prediction_error_p50 if r.by_length else None),
    "error_shortest_p90": _of_report(lambda r: r.by_length[0].prediction_error_p90 if r.by_length else None),
    "error_longest_p50": _of_report(lambda r: r.by_length[-1].prediction_error_p50 if r.by_length else None),
    "error_longest_p90": _of_report(lambda r: r.by_length[-1].prediction_error_p90 if r.by_length else None),
    "upper_coverage": _of_report(lambda r: r.upper_coverage),
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
