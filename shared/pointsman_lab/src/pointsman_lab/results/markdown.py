"""How numbers look on the page: tables, and the words that depend on which of two is greater."""

from collections.abc import Sequence
from statistics import fmean

from pointsman_lab.results.numbers import Numbers, Point, StudyNumbers
from pointsman_lab.results.studies import OURS, Metric, Study

HEADINGS: dict[Metric, tuple[str, str]] = {
    "hit_rate": ("hit rate", "{:.3f}"),
    "load_cv": ("load CV", "{:.2f}"),
    "busiest_share": ("at the busiest", "{:.0%}"),
    "ttft_p50_s": ("TTFT P50", "{:.2f} s"),
    "ttft_p90_s": ("P90", "{:.2f} s"),
    "ttft_p99_s": ("P99", "{:.1f} s"),
    "worst_length": ("worst length tenth", "{:.2f}"),
    "migrations": ("moved of 1,000", "{:.1f}"),
    "rejected_share": ("refused", "{:.1%}"),
    "jain": ("Jain", "{:.3f}"),
    "service_per_s": ("service, tokens/s", "{:,.0f}"),
    "well_behaved_p90_s": ("well-behaved P90", "{:.2f} s"),
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(row: str) -> str:
    """A row's name; ours is bold."""
    return f"**`{row}`**" if row.startswith(OURS) else f"`{row}`"


def metric(point: Point, name: Metric) -> str:
    value = point.metrics.get(name)
    return "" if value is None else HEADINGS[name][1].format(value)


def window(share: float | None) -> str:
    """Attainment in a stretch of time in which perhaps nothing arrived."""
    return "" if share is None else f"{share:.2f}"


def study_section(study: Study, numbers: StudyNumbers) -> str:
    """Heading, text and table of one study."""
    rates, telling = numbers.rates(), _telling(study, numbers)
    head = ["policy", *(f"{rate:g}/s" for rate in rates)]
    head += ["goodput at 90%"] if numbers.goodput else []
    head += [HEADINGS[name][0] for name in study.metrics] + [name for name, _, _ in study.windows]
    rows = []
    for row in numbers.rows():
        cells = [code(row), *(f"{numbers.capacity(row, rate):.3f}" for rate in rates)]
        if numbers.goodput:
            cells.append(_goodput(study, numbers, row))
        point = numbers.point(row, telling)
        rows.append([*cells, *(metric(point, m) for m in study.metrics), *map(window, point.windows)])
    for bound, by_rate in numbers.bounds.items():
        cells = [f"*central queue, {bound}*", *(f"{share:.3f}" for share in by_rate)]
        if numbers.goodput:
            found = numbers.bound_goodput.get(bound)
            cells.append(f"{fmean(found):.2f}/s" if found else "")
        rows.append(cells + [""] * (len(head) - len(cells)))
    seeds = f"{len(numbers.seeds)} seeds." if len(numbers.seeds) > 1 else "One seed."
    after = "" if len(rates) == 1 else f" Columns after the rates are at {telling:g}/s."
    return f"### {study.title}\n\n{study.about} {seeds}{after}\n\n{table(head, rows)}\n"


def _goodput(study: Study, numbers: StudyNumbers, row: str) -> str:
    """Mean over seeds. Not searched is what came nowhere near the target in the sweep: then it is below."""
    found = numbers.goodput.get(row, [])
    called = {study.name(each): each.variant.called for each in study.rows}
    if called[row] not in study.goodput:
        return ""
    below = f"{numbers.rates()[0]:g}/s"
    if not found:
        return f"< {below}"
    missing = len(numbers.seeds) - len(found)
    return f"{fmean(found):.2f}/s" + (f" ({missing} of {len(numbers.seeds)} seeds < {below})" if missing else "")


def _telling(study: Study, numbers: StudyNumbers) -> float:
    rates = numbers.rates()
    return study.telling_rate if study.telling_rate in rates else rates[len(rates) // 2]


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def has(numbers: Numbers, *keys: str) -> bool:
    return all(key in numbers.studies for key in keys)
