"""Renders `docs/results.md` from the template `page.md.j2` and the numbers of results.json.
tests/unit/lab/test_results.py checks its judgements."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, StrictUndefined

from pointsman_lab.results import tables
from pointsman_lab.results.numbers import Numbers, StudyNumbers
from pointsman_lab.results.studies import MOVED, MOVED_ANYWHERE, PAPER, UNMOVED
from pointsman_lab.results.study import BOUND, OURS, WARMUP, Judged, Study
from pointsman_lab.results.verdict import Duel, duel_table, duels

TEMPLATE = Path(__file__).with_name("page.md.j2")
AS_WRITTEN = f"dualmap, {PAPER}"
COOLER = f"{AS_WRITTEN}, hot above 1/n"
COMPARED = ("cache_affinity", "least_loaded", "min_ttft", "preble")
"""The policies of DualMap's repository, by our names."""
LOADED_MIN = 0.5
CLAIMS_NOT_SHOWN = 5
HOPELESS = ("power_of_two", "random", "round_robin")
ADMISSION_ROWS = (
    "pointsman + fcfs + predicted_ttft",
    "pointsman + fcfs + predicted_ttft_global",
    "pointsman + fcfs + predicted_ttft_fair",
    "pointsman + fair_edf + predicted_ttft_fair",
    "dualmap + fcfs + predicted_ttft_global",
    "dualmap + fcfs + predicted_ttft_fair",
    "min_ttft + fcfs + predicted_ttft",
    "preble + fcfs + predicted_ttft",
    "least_loaded + fcfs + predicted_ttft",
)
Column = tuple[str, str, float, str]


def page(studies: Sequence[Study], numbers: Numbers) -> str:
    """The page as Markdown. Raises KeyError for a missing study."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(TEMPLATE.read_text()).render(Figures(studies, numbers).names())


class Figures:
    def __init__(self, studies: Sequence[Study], numbers: Numbers) -> None:
        self._studies = {study.key: study for study in studies}
        self._numbers = numbers.studies
        self.duels = duels(studies, numbers)
        self.lost = sorted((duel for duel in self.duels if not duel.passed), key=lambda duel: duel.points)

    def names(self) -> dict[str, object]:
        functions: list[Callable[..., object]] = [self.value, self.ratio, self.bound_ratio, self.best_ratio, self.gap]
        functions += [self.fair_floor, self.service_range, self.about, self.window, self.best_window]
        functions += [self.passed, self.count, self.passed_of, self.of, self.pivot]
        return {function.__name__: function for function in functions} | {
            "columns": columns,
            "duel_table": duel_table,
            "worst": min(self.duels, key=lambda duel: duel.points),
            "lost": self.lost,
            "ours": OURS,
            "as_written": AS_WRITTEN,
            "cooler": COOLER,
            "unmoved": f"{AS_WRITTEN}, {UNMOVED}",
            "moved": f"{AS_WRITTEN}, {MOVED}",
            "anywhere": f"{AS_WRITTEN}, {MOVED_ANYWHERE}",
            "cache_aware": "sticky_least_loaded, cache-aware",
            "bound": BOUND,
            "warmup": WARMUP,
            "claims_differ": CLAIMS_NOT_SHOWN,
            "admission_rows": ADMISSION_ROWS,
            "placement_rows": [name for name in self._numbers["placement-tools"].rows() if name not in HOPELESS],
        }

    # Numbers within sentences

    def value(self, study: str, row: str, what: str, rate: float | None = None) -> str:
        return tables.cell(self._numbers[study], row, what, rate)

    def ratio(self, study: str, row: str, other: str) -> str:
        goodput = self._numbers[study].goodput
        return f"{fmean(goodput[row]) / fmean(goodput[other]):.2f}"

    def bound_ratio(self, workload: str, policies: str, bound: str) -> str:
        study = self._numbers[f"admission-{workload}"]
        return f"{fmean(study.goodput[f'{OURS} + {policies}']) / fmean(study.bound_goodput[bound]):.2f}"

    def best_ratio(self, study: str) -> str:
        return f"{best_ratio(self._numbers[study], AS_WRITTEN):.2f}"

    def gap(self, study: str, row: str, other: str) -> str:
        return f"{100 * gap(self._numbers[study], row, other):+.1f}"

    def fair_floor(self, workload: str) -> str:
        return f"{fair_floor(self._numbers[f'admission-{workload}']):.2f}"

    def service_range(self) -> str:
        services = [
            point.metrics["service_per_s"]
            for key, study in self._numbers.items()
            if key.startswith("fairness-")
            for point in study.points
        ]
        return f"{min(services):,.0f} to {max(services):,.0f}"

    def about(self, study: str) -> str:
        return self._studies[study].about

    def window(self, study: str, row: str, number: int) -> str:
        points = self._numbers[study].points
        return tables.window_cells(next(point for point in points if point.row == row))[number]

    def best_window(self, study: str, number: int) -> str:
        return max(tables.window_cells(point)[number] for point in self._numbers[study].points if point.row != OURS)

    # Duels

    def count(self, judged: Judged) -> int:
        return sum(duel.judged == judged for duel in self.duels)

    def passed(self, judged: Judged) -> int:
        return sum(duel.passed for duel in self.duels if duel.judged == judged)

    def of(self, *prefixes: str) -> list[Duel]:
        return [duel for duel in self.duels if duel.study.startswith(prefixes)]

    def passed_of(self, prefix: str) -> int:
        return sum(duel.passed for duel in self.of(prefix))

    # Tables

    def pivot(self, columns: Sequence[Column], rows: Sequence[str] | None = None) -> str:
        shown = self._numbers[columns[0][1]].rows() if rows is None else rows
        head = ["policy", *(heading for heading, *_ in columns)]
        return tables.table(
            head,
            [
                [tables.code(row), *(self.value(study, row, what, rate) for _, study, rate, what in columns)]
                for row in shown
            ],
        )


def columns(study: str, rate: float, called: str, *shown: str) -> list[Column]:
    headings = [tables.HEADINGS[what][0] if what in tables.HEADINGS else what for what in shown]
    headings[0] = f"{called}: {headings[0]}"
    return [(heading, study, rate, what) for heading, what in zip(headings, shown, strict=True)]


def best_ratio(study: StudyNumbers, row: str) -> float:
    """The highest capacity over the strongest of COMPARED, at rates where one is at least LOADED_MIN."""
    found = [0.0]
    for rate in study.rates():
        ours, theirs = study.capacity(row, rate), max(study.capacity(name, rate) for name in COMPARED)
        if theirs and max(ours, theirs) >= LOADED_MIN:
            found.append(ours / theirs)
    return max(found)


def gap(study: StudyNumbers, row: str, other: str) -> float:
    return fmean(study.capacity(row, rate) - study.capacity(other, rate) for rate in study.rates())


def fair_floor(study: StudyNumbers) -> float:
    fair = [point for point in study.points if point.row.startswith(OURS) and point.row.endswith("fair")]
    return min(point.metrics["worst_length"] / point.mean for point in fair)
