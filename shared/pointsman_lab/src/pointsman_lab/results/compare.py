"""Tables of `pointsman` against the best other policy and against the central queue, over all workloads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pointsman_lab.results.numbers import METRICS, Numbers
from pointsman_lab.results.studies.rows import LIVE_DEFAULT
from pointsman_lab.results.study import OURS, Metric
from pointsman_lab.results.tables import code, table
from pointsman_lab.results.verdict import NEAR_POINTS, Duel

DEFAULT = " + ".join(LIVE_DEFAULT)
ALONE = "fcfs + none"
NO_ADMISSION = ("placement-", "generated-")
WITH_ADMISSION = ("admission-", "default-")


def duels_of(duels: Sequence[Duel], *, admission: bool) -> list[Duel]:
    """Under the live default, or without admission: undisturbed conditions only."""
    prefixes, policies = (WITH_ADMISSION, DEFAULT) if admission else (NO_ADMISSION, ALONE)
    return [duel for duel in duels if duel.study.startswith(prefixes) and duel.policies == policies]


def workload_of(study: str) -> str:
    kind, _, workload = study.partition("-")
    return f"{workload} (trace)" if kind in ("placement", "admission") else workload


@dataclass(frozen=True, slots=True)
class Tally:
    """Of duels: how many are won or level, how many within a point, how many are behind by more than that and by more
    than twice the standard error, and the worst."""

    level: int
    near: int
    behind: int
    duels: int
    worst: Duel

    def text(self) -> str:
        worst = self.worst
        return (
            f"best or level at {self.level} of {self.duels} points, within a point at {self.near}; "
            f"behind by more than a point and twice the standard error at {self.behind}; "
            f"the worst is {worst.text} ({workload_of(worst.study)} at {worst.rate:g}/s, `{worst.best}`)"
        )


def tally(duels: Sequence[Duel]) -> Tally:
    """Raises ValueError without a duel."""
    return Tally(
        level=sum(duel.verdict in ("best", "level") for duel in duels),
        near=sum(duel.points > -NEAR_POINTS for duel in duels),
        behind=sum(duel.points < -max(NEAR_POINTS, 2 * (duel.error or 0.0)) for duel in duels),
        duels=len(duels),
        worst=min(duels, key=lambda duel: duel.points),
    )


def comparison_table(duels: Sequence[Duel], numbers: Numbers) -> str:
    """One line for each workload and rate. P99, what late requests wait, the worst tenth, and Jain's
    index where there are tenants: ours / the best other's."""
    head = [
        "workload",
        "rate",
        OURS,
        "best other",
        "its capacity",
        "points",
        "P99",
        "late ones wait",
        "worst tenth",
        "Jain",
    ]
    return table(head, list(_lines(duels, numbers)))


def _lines(duels: Sequence[Duel], numbers: Numbers) -> Iterator[list[str]]:
    for duel in duels:
        yield [
            workload_of(duel.study),
            f"{duel.rate:g}/s",
            f"{duel.ours:.3f}",
            code(duel.best),
            f"{duel.theirs:.3f}",
            duel.text,
            _both(duel, numbers, "ttft_p99_s", "{:.1f}"),
            _both(duel, numbers, "late_wait_s", "{:.1f}"),
            _both(duel, numbers, "worst_length", "{:.2f}"),
            _both(duel, numbers, "jain", "{:.3f}") if _has_tenants(duel, numbers) else "",
        ]


def _has_tenants(duel: Duel, numbers: Numbers) -> bool:
    """Jain's index of one tenant is 1, whoever serves it."""
    return any(point.metrics.get("jain", 1.0) != 1.0 for point in numbers.studies[duel.study].points)


def _both(duel: Duel, numbers: Numbers, what: str, form: str) -> str:
    points = [numbers.studies[duel.study].point(row, duel.rate) for row in (duel.our_row, duel.best_row)]
    return " / ".join(form.format(point.metrics[what]) if what in point.metrics else "-" for point in points)


# --- The rules of our own policy ---


JUDGED_BY = {
    "-answers": "capacity_with_tbt",
    "-small-kv": "capacity_with_tbt",
    "-one-floods": "jain",
    "-equal-tenants": "jain",
}


def ablation_table(numbers: Numbers) -> str:
    """One line for each study: the whole policy, and the hundredths that each row has over it."""
    keys = [key for key in numbers.studies if key.startswith("ablation-")]
    without = numbers.studies[keys[0]].rows()[1:]
    lines = []
    for key in keys:
        what = next((what for ending, what in JUDGED_BY.items() if key.endswith(ending)), "capacity")
        whole = numbers.mean(key, OURS, what)
        gained = [100 * (numbers.mean(key, row, what) - whole) for row in without]
        rate = numbers.studies[key].rates()[0]
        called = key.removeprefix("ablation-")
        lines.append([called, f"{rate:g}/s", f"{whole:.3f}", *(f"{points:+.1f}" for points in gained)])
    return table(["study", "rate", OURS, *(row.removeprefix(f"{OURS}, ") for row in without)], lines)


# --- Predictions ---

ERRORS: tuple[Metric, ...] = (
    "prediction_error_p50_s", "prediction_error_p90_s", "error_shortest_p50", "error_shortest_p90", "error_longest_p50",
    "error_longest_p90", "upper_coverage",
)  # fmt: skip
PREDICTED = ("placement-", "condition-", "generated-", "answers-alone-")


def prediction_table(numbers: Numbers) -> str:
    """How far predicted TTFT is from measured, of `pointsman` without admission, at each study's highest rate."""
    lines = []
    for key, study in numbers.studies.items():
        if key.startswith(PREDICTED):
            metrics = study.point(OURS, study.rates()[-1]).metrics
            shown = [(what, METRICS[what].form) for what in ("ttft_p50_s", *ERRORS)]
            cells = [form.format(metrics[what]) if what in metrics else "-" for what, form in shown]
            lines.append([key.removeprefix("answers-").removeprefix("condition-"), f"{study.rates()[-1]:g}/s", *cells])
    return table(["study", "rate", *(METRICS[what].heading for what in ("ttft_p50_s", *ERRORS))], lines)
