"""Renders `docs/results.md` from `page.md.j2`, which includes one part for each module of `studies`, and from the numbers
of results.json. Raises KeyError for a number that is not there: nothing is said without one."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pointsman.policies.rebalancing import DEFAULT_REBALANCING
from pointsman.simulation.workload import HELD_OUT
from pointsman_lab.results import claims, compare, tables
from pointsman_lab.results.gap import GOAL, Gap, gap_summary, gap_table, gaps, is_bound
from pointsman_lab.results.numbers import METRICS, Numbers
from pointsman_lab.results.studies import CLAIMS
from pointsman_lab.results.studies.rows import AS_WRITTEN, TUNED
from pointsman_lab.results.study import OURS, WARMUP, Study
from pointsman_lab.results.verdict import LEVEL_POINTS, Duel, duels

HERE = Path(__file__).parent
TEMPLATE = "page.md.j2"
Column = tuple[str, str, float | None, str]
"""Heading, study, rate (None: mean over rates), metric."""


def page(studies: Sequence[Study], numbers: Numbers) -> str:
    """The page as Markdown. Raises KeyError for a missing study."""
    environment = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.get_template(TEMPLATE).render(Figures(studies, numbers).names())


class Figures:
    def __init__(self, studies: Sequence[Study], numbers: Numbers) -> None:
        self._studies = {study.key: study for study in studies}
        self._numbers = numbers
        self.duels = duels(studies, numbers)

    def names(self) -> dict[str, object]:
        functions: list[Callable[..., object]] = [self.value, self.ratio, self.gap, self.about, self.ablation]
        functions += [self.predictions, self.tuned_short, self.measured, self.pivot, self.window, self.best_window]
        functions += [self.claims, self.verdicts, self.comparison, self.disturbed, self.tally, self.gaps, self.with_tbt]
        return {function.__name__: function for function in functions} | {
            "columns": columns,
            "gap_table": gap_table,
            "gap_summary": gap_summary,
            "goal": GOAL,
            "is_bound": is_bound,
            "held_out": HELD_OUT,
            "claim_table": claims.claim_table,
            "condition_list": claims.condition_list,
            "tuned": TUNED,
            "ours": OURS,
            "rebalancing": DEFAULT_REBALANCING,
            "as_written": AS_WRITTEN,
            "warmup": WARMUP,
            "core_minutes": self._numbers.core_minutes,
        }

    # Numbers within sentences

    def value(self, study: str, row: str, what: str, rate: float | None = None) -> str:
        """Raises KeyError if it was not measured. Without late requests nobody waits."""
        if what == "late_wait_s" and what not in self._numbers.studies[study].point(row, rate or 0.0).metrics:
            return "0 s (nobody)"
        self._numbers.mean(study, row, what, rate)
        return tables.cell(self._numbers, study, row, what, rate)

    def measured(self, key: str, name: str, form: str = "{:.3g}") -> str:
        return form.format(self._numbers.measurements[key][name])

    def ratio(self, study: str, row: str, other: str) -> str:
        """Of goodputs. Who serves too few at the lowest rate is not searched: the other's share of that rate is less."""
        found = self._numbers.studies[study]
        if row not in found.goodput:
            return "(none)"
        own = self._numbers.mean(study, row, "goodput")
        if other not in found.goodput:
            return f"more than {own / min(found.rates()):.2f}"
        return f"{own / self._numbers.mean(study, other, 'goodput'):.2f}"

    def gap(self, study: str, row: str, other: str, rate: float | None = None) -> str:
        """Hundredths of capacity."""
        mean = self._numbers.mean
        return f"{100 * (mean(study, row, 'capacity', rate) - mean(study, other, 'capacity', rate)):+.1f}"

    def about(self, study: str) -> str:
        return self._studies[study].about

    def window(self, study: str, row: str, number: int) -> str:
        points = self._numbers.studies[study].points
        return tables.window_cells(next(point for point in points if point.row == row))[number]

    def best_window(self, study: str, number: int) -> str:
        points = self._numbers.studies[study].points
        return max(tables.window_cells(point)[number] for point in points if point.row != OURS)

    def tuned_short(self) -> str:
        """How far the rows that are shown are at most from the best of their grids, in points of capacity over both
        traces."""
        keys = [key for key in self._numbers.studies if key.startswith("tuning-")]
        mean = {
            row: sum(self._numbers.mean(key, row, "capacity") for key in keys) / len(keys) for row in self.rows(keys[0])
        }
        short = [
            max(share for row, share in mean.items() if row.startswith(f"{policy}:")) - mean[_grid_row(shown)]
            for policy, shown in TUNED.items()
        ]
        return f"{100 * max(short):.1f}"

    # Duels and claims

    def of(self, *prefixes: str) -> list[Duel]:
        return [duel for duel in self.duels if duel.study.startswith(prefixes)]

    def claims(self, paper: str = "") -> list[claims.Judged]:
        return [claims.judged(claim, self._numbers) for claim in CLAIMS if paper in ("", claim.paper)]

    def verdicts(self) -> str:
        """How many claims have which verdict."""
        found = Counter(one.verdict for one in self.claims())
        return ", ".join(f"{found[verdict]} {verdict}" for verdict in claims.VERDICTS if found[verdict])

    # All workloads

    def comparison(self, *, admission: bool) -> str:
        return compare.comparison_table(compare.duels_of(self.duels, admission=admission), self._numbers)

    def disturbed(self) -> str:
        return compare.comparison_table(self.of("condition-"), self._numbers)

    def tally(self, *, admission: bool, held_out: bool | None = None) -> str:
        """`held_out`: only, or without; None: all workloads."""
        found = compare.duels_of(self.duels, admission=admission)
        chosen = [duel for duel in found if held_out in (None, _is_held_out(duel))]
        return compare.tally(chosen).text()

    def with_tbt(self) -> str:
        """Where answers are whole, and TBT counts too, which duels do not judge."""
        found = []
        for key in (key for key in self._numbers.studies if key.startswith("answers-")):
            share = {row: self._numbers.mean(key, row, "capacity_with_tbt") for row in self.rows(key)}
            best = max((row for row in share if row != OURS), key=lambda row: share[row])
            found.append((100 * (share[OURS] - share[best]), key.removeprefix("answers-"), best))
        points, worst, best = min(found)
        level = sum(points > -LEVEL_POINTS for points, *_ in found)
        return f"best or level at {level} of {len(found)} points; the worst is {points:+.1f} ({worst}, `{best}`)"

    def gaps(self) -> list[Gap]:
        return gaps(self._numbers)

    def predictions(self) -> str:
        return compare.prediction_table(self._numbers)

    def ablation(self) -> str:
        return compare.ablation_table(self._numbers)

    # Tables

    def rows(self, study: str) -> list[str]:
        return self._numbers.studies[study].rows()

    def pivot(self, columns: Sequence[Column], rows: Sequence[str] | None = None) -> str:
        shown = self.rows(columns[0][1]) if rows is None else rows
        head = ["policy", *(heading for heading, *_ in columns)]
        cells = [
            [
                tables.code(row),
                *(tables.cell(self._numbers, study, row, what, rate) for _, study, rate, what in columns),
            ]
            for row in shown
        ]
        return tables.table(head, cells)


def _grid_row(settings: Sequence[str]) -> str:
    policy = settings[0].partition(".")[0]
    return ":".join((policy, *(setting.removeprefix(f"{policy}.") for setting in settings)))


def _is_held_out(duel: Duel) -> bool:
    return duel.study.partition("-")[2].replace("-", "_") in HELD_OUT


def columns(study: str, rate: float | None, called: str, *shown: str) -> list[Column]:
    """With a capacity the P99 and how long late requests wait, named or not: capacity alone hides what a few pay for it."""
    shown += tuple(what for what in ("ttft_p99_s", "late_wait_s") if "capacity" in shown and what not in shown)
    headings = [METRICS[what].heading if what in METRICS else what for what in shown]
    if called:
        headings[0] = f"{called}: {headings[0]}"
    return [(heading, study, rate, what) for heading, what in zip(headings, shown, strict=True)]
