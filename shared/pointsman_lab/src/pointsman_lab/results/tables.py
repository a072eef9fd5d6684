"""Markdown tables of the results."""

from collections.abc import Sequence
from statistics import fmean

from pointsman_lab.results.numbers import Point, StudyNumbers
from pointsman_lab.results.study import OURS, Metric, Study

HEADINGS: dict[Metric, tuple[str, str]] = {
    "hit_rate": ("hit rate", "{:.3f}"),
    "load_cv": ("load CV", "{:.2f}"),
    "busiest_share": ("at the busiest", "{:.0%}"),
    "ttft_p50_s": ("TTFT P50", "{:.2f} s"),
    "ttft_p90_s": ("P90", "{:.2f} s"),
    "ttft_p99_s": ("P99", "{:.1f} s"),
    "worst_length": ("worst tenth", "{:.2f}"),
    "migrations": ("moved", "{:.0f}"),
    "rejected_share": ("rejected", "{:.1%}"),
    "jain": ("Jain", "{:.3f}"),
    "service_per_s": ("service, tokens/s", "{:,.0f}"),
    "well_behaved_p90_s": ("well-behaved P90", "{:.2f} s"),
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(row: str) -> str:
    return f"**`{row}`**" if row.startswith(OURS) else f"`{row}`"


def cell(numbers: StudyNumbers, row: str, what: str, rate: float | None = None) -> str:
    """`what`: a metric, `capacity`, or `goodput`; empty where not measured. Without a rate: mean over rates."""
    if what == "goodput":
        found = numbers.goodput.get(row)
        return f"{fmean(found):.2f}" if found else ""
    if what == "capacity":
        return f"{mean(numbers, row, what, rate):.3f}"
    name, form = HEADINGS[what]  # type: ignore[index]  # a KeyError names what is no metric
    del name
    points = [point for point in numbers.points if point.row == row and rate in (None, point.rate)]
    return form.format(mean(numbers, row, what, rate)) if any(what in point.metrics for point in points) else ""


def mean(numbers: StudyNumbers, row: str, what: str, rate: float | None = None) -> float:
    """At a rate, or over all of them. Raises KeyError for a missing run."""
    points = [numbers.point(row, each) for each in (numbers.rates() if rate is None else [rate])]
    return fmean(point.mean if what == "capacity" else dict(point.metrics)[what] for point in points)


def study_section(study: Study, numbers: StudyNumbers) -> str:
    rates = numbers.rates()
    shown = study.telling_rate if study.telling_rate in rates else rates[len(rates) // 2]
    head = ["policy", *(f"{rate:g}/s" for rate in rates), *(["goodput"] if numbers.goodput else [])]
    head += [f"{HEADINGS[name][0]} at {shown:g}/s" for name in study.metrics] + [name for name, _, _ in study.windows]
    rows = []
    for row in numbers.rows():
        cells = [code(row), *(cell(numbers, row, "capacity", rate) for rate in rates)]
        cells += [cell(numbers, row, "goodput")] if numbers.goodput else []
        cells += [cell(numbers, row, name, shown) for name in study.metrics]
        rows.append([*cells, *window_cells(numbers.point(row, shown))])
    for bound, by_rate in numbers.bounds.items():
        cells = [f"*central queue, {bound}*", *(f"{share:.3f}" for share in by_rate)]
        rows.append(cells + [""] * (len(head) - len(cells)))
    return f"### {study.title}\n\n{study.about} {len(numbers.seeds)} seeds.\n\n{table(head, rows)}\n"


def window_cells(point: Point) -> list[str]:
    return ["" if share is None else f"{share:.2f}" for share in point.windows]
