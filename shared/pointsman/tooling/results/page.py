"""The page: each study as a Markdown table, with the numbers of the runs and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from pointsman.simulation.goodput import Goodput
from pointsman.simulation.metrics import Report
from pointsman.tooling.results.studies import Study
from pointsman.tooling.simulate.experiment import CellResult
from pointsman.tooling.simulate.report import worst_length
from pointsman.tooling.simulate.variants import Variant

Goodputs = Mapping[tuple[str, int], Goodput]
"""By `row_name` and seed."""

Bounds = Mapping[str, Mapping[float, float]]
"""Effective capacity of the central queue, by its order and rate."""


def row_name(variant: Variant) -> str:
    parts = [variant.policy]
    if variant.ordering != "fcfs":
        parts.append(variant.ordering)
    if variant.admission != "none":
        parts.append(variant.admission)
    return " + ".join(parts)


def study_section(study: Study, results: Sequence[CellResult], goodputs: Goodputs, bounds: Bounds) -> str:
    """Heading, text and table of one study."""
    rates = list(study.rates)
    telling = rates[len(rates) // 2]
    fairness = bool(study.source.misbehaving)
    head = ["policy", *(f"{rate:g}/s" for rate in rates)]
    head += ["goodput at 90%"] if study.goodput else []
    head += ["hit rate", "load CV", "TTFT P50", "TTFT P90", "worst length decile"]
    head += ["Jain", "well-behaved P90"] if fairness else []
    rows = []
    for variant in study.variants:
        reports = {rate: _reports(results, variant, rate) for rate in rates}
        cells = [_code(row_name(variant)), *(_mean(reports[rate], _capacity, "{:.3f}") for rate in rates)]
        if study.goodput:
            found = [g.qps for (name, _), g in goodputs.items() if name == row_name(variant)]
            cells.append(f"{fmean(found):.2f}" if found else "")
        cells += [
            _mean(reports[telling], lambda r: r.hit_rate, "{:.3f}"),
            _mean(reports[telling], lambda r: r.load_cv, "{:.2f}"),
            _mean(reports[telling], lambda r: r.ttft.p50_s, "{:.2f} s"),
            _mean(reports[telling], lambda r: r.ttft.p90_s, "{:.2f} s"),
            _mean(reports[telling], worst_length, "{:.2f}"),
        ]
        if fairness:
            cells += [
                _mean(reports[telling], lambda r: r.jain, "{:.3f}"),
                _mean(reports[telling], lambda r: r.well_behaved_ttft.p90_s, "{:.2f} s"),
            ]
        rows.append(cells)
    for order, by_rate in bounds.items():
        blank = [""] * (len(head) - 1 - len(rates))
        rows.append([f"*central queue, {order}*", *(f"{by_rate[rate]:.3f}" for rate in rates), *blank])
    after = f"Columns after the rates are at {telling:g}/s."
    return "\n".join((f"## {study.title}", "", f"{study.text} {after}", "", *_table(head, rows), ""))


def margins(results: Mapping[str, Sequence[CellResult]], studies: Sequence[Study]) -> str:
    """`pointsman` against the best other policy, study by study and rate by rate: the difference in points."""
    rows = []
    for study in studies:
        variants = [v for v in study.variants if v.ordering == "fcfs" and v.admission == "none"]
        ours = next((v for v in variants if v.policy == "pointsman"), None)
        if ours is None or len(variants) < len(study.variants) or study.source.misbehaving:
            continue
        for rate in study.rates:
            mine = _mean_value(_reports(results[study.key], ours, rate), _capacity)
            others = {
                v.policy: _mean_value(_reports(results[study.key], v, rate), _capacity)
                for v in variants
                if v is not ours
            }
            if mine is None or not others:
                continue
            best = max(others, key=lambda name: others[name] or 0.0)
            difference = 100 * (mine - (others[best] or 0.0))
            rows.append(
                [study.key, f"{rate:g}/s", f"{mine:.3f}", _code(best), f"{others[best]:.3f}", f"{difference:+.1f}"]
            )
    return "\n".join(_table(["study", "rate", "pointsman", "best other", "its capacity", "points"], rows))


def _reports(results: Sequence[CellResult], variant: Variant, rate: float) -> list[Report]:
    return [r.report for r in results if r.cell.variant == variant and r.cell.qps == rate]


def _capacity(report: Report) -> float | None:
    return report.effective_capacity


def _mean_value(reports: Sequence[Report], value_of: Callable[[Report], float | None]) -> float | None:
    values = [value for report in reports if (value := value_of(report)) is not None]
    return fmean(values) if values else None


def _mean(reports: Sequence[Report], value_of: Callable[[Report], float | None], shown: str) -> str:
    value = _mean_value(reports, value_of)
    return "" if value is None else shown.format(value)


def _code(text: str) -> str:
    return f"**`{text}`**" if text.startswith("pointsman") else f"`{text}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
