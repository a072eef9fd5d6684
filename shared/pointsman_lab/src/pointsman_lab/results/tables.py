"""Markdown tables of the results."""

from collections.abc import Sequence

from pointsman_lab.results.numbers import METRICS, Numbers, Point
from pointsman_lab.results.study import OURS, Study

FORMS = {"capacity": "{:.3f}", "goodput": "{:.2f}"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(row: str) -> str:
    return f"**`{row}`**" if row.startswith(OURS) else f"`{row}`"


def cell(numbers: Numbers, study: str, row: str, what: str, rate: float | None = None) -> str:
    """`what`: a metric, `capacity`, or `goodput`; a dash where not measured. Without a rate: mean over rates."""
    form = FORMS.get(what) or METRICS[what].form
    try:
        return form.format(numbers.mean(study, row, what, rate))
    except KeyError:
        return "-"


def study_section(study: Study, every: Numbers) -> str:
    numbers = every.studies[study.key]
    rates = numbers.rates()
    shown = study.telling_rate if study.telling_rate in rates else rates[len(rates) // 2]
    head = ["policy", *(f"{rate:g}/s" for rate in rates), *(["goodput"] if numbers.goodput else [])]
    head += [f"{METRICS[name].heading} at {shown:g}/s" for name in study.metrics]
    head += [name for name, _, _ in study.windows]
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
