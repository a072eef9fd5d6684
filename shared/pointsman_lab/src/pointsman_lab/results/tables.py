"""Markdown tables of the results."""

from collections.abc import Sequence

from pointsman_lab.results.numbers import Numbers, Point
from pointsman_lab.results.study import OURS, Metric, Study

HEADINGS: dict[Metric, tuple[str, str]] = {
    "hit_rate": ("hit rate", "{:.3f}"),
    "loaded_share": ("of it loaded", "{:.3f}"),
    "fetched_share": ("fetched", "{:.3f}"),
    "copies": ("copies", "{:.0f}"),
    "hit_share_of_bound": ("share of the bound", "{:.1%}"),
    "load_cv": ("load CV", "{:.2f}"),
    "busiest_share": ("at the busiest", "{:.0%}"),
    "ttft_mean_s": ("mean TTFT", "{:.2f} s"),
    "ttft_p50_s": ("TTFT P50", "{:.2f} s"),
    "ttft_p90_s": ("P90", "{:.2f} s"),
    "ttft_p99_s": ("P99", "{:.1f} s"),
    "late_wait_s": ("late ones wait", "{:.1f} s"),
    "e2e_p50_s": ("E2E P50", "{:.2f} s"),
    "e2e_p90_s": ("E2E P90", "{:.2f} s"),
    "tpot_p90_s": ("TPOT P90", "{:.3f} s"),
    "capacity_with_tbt": ("with TBT", "{:.3f}"),
    "tbt_p90_s": ("TBT P90", "{:.3f} s"),
    "worst_length": ("worst tenth", "{:.2f}"),
    "migrations": ("moved", "{:.0f}"),
    "rejected_share": ("rejected", "{:.1%}"),
    "jain": ("Jain", "{:.3f}"),
    "jain_of_amounts": ("Jain of amounts", "{:.3f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "service_per_s": ("service, tokens/s", "{:,.0f}"),
    "well_behaved_p50_s": ("well-behaved P50", "{:.2f} s"),
    "well_behaved_p90_s": ("well-behaved P90", "{:.2f} s"),
    "prediction_error_p50_s": ("error P50", "{:.2f} s"),
    "prediction_error_p90_s": ("error P90", "{:.2f} s"),
    "error_shortest_p50": ("shortest tenth P50", "{:.0%}"),
    "error_shortest_p90": ("P90", "{:.0%}"),
    "error_longest_p50": ("longest tenth P50", "{:.0%}"),
    "error_longest_p90": ("P90", "{:.0%}"),
    "upper_coverage": ("within upper value", "{:.1%}"),
}


FORMS = {"capacity": "{:.3f}", "goodput": "{:.2f}"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(row: str) -> str:
    return f"**`{row}`**" if row.startswith(OURS) else f"`{row}`"


def cell(numbers: Numbers, study: str, row: str, what: str, rate: float | None = None) -> str:
    """`what`: a metric, `capacity`, or `goodput`; a dash where not measured. Without a rate: mean over rates."""
    form = FORMS.get(what) or HEADINGS[what][1]  # type: ignore[index]  # a KeyError names what is no metric
    try:
        return form.format(numbers.mean(study, row, what, rate))
    except KeyError:
        return "-"


def study_section(study: Study, every: Numbers) -> str:
    numbers = every.studies[study.key]
    rates = numbers.rates()
    shown = study.telling_rate if study.telling_rate in rates else rates[len(rates) // 2]
    head = ["policy", *(f"{rate:g}/s" for rate in rates), *(["goodput"] if numbers.goodput else [])]
    head += [f"{HEADINGS[name][0]} at {shown:g}/s" for name in study.metrics] + [name for name, _, _ in study.windows]
    rows = []
    for row in numbers.rows():
        cells = [code(row), *(cell(every, study.key, row, "capacity", rate) for rate in rates)]
        cells += [cell(every, study.key, row, "goodput")] if numbers.goodput else []
        cells += [cell(every, study.key, row, name, shown) for name in study.metrics]
        rows.append([*cells, *window_cells(numbers.point(row, shown))])
    for bound, by_rate in numbers.bounds.items():
        cells = [f"*central queue, {bound}*", *(f"{share:.3f}" for share in by_rate)]
        rows.append(cells + [""] * (len(head) - len(cells)))
    return f"### {study.title}\n\n{study.about} {len(numbers.seeds)} seeds.\n\n{table(head, rows)}\n"


def window_cells(point: Point) -> list[str]:
    return ["" if share is None else f"{share:.2f}" for share in point.windows]
