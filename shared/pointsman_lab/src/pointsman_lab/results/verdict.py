"""`pointsman` against the best other policy, point by point, and against what was asked of it.

Compared are rows of the same study with the same ordering and admission. Every word of judgement here follows from a
number: whoever reads the page sees first where our policy loses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from pointsman_lab.results.markdown import code, has, table
from pointsman_lab.results.numbers import Numbers, StudyNumbers
from pointsman_lab.results.studies import BOUND, BOUND_WITH_FLOOR, OURS, PAPER, Judged, Row, Study

LEVEL_POINTS = 0.05
"""Differences below this are none: what three places cannot show."""

NEAR_POINTS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Ours against the best other at one rate of one study. Points are hundredths of effective capacity."""

    study: str
    judged: Judged
    policies: str
    rate: float
    ours: float
    best: str
    best_others: int
    """How many more are as good as the best other."""
    theirs: float
    seeds_won: int
    seeds: int

    @property
    def points(self) -> float:
        return 100 * (self.ours - self.theirs)

    @property
    def passed(self) -> bool:
        return self.points > (-LEVEL_POINTS if self.judged == "best" else -NEAR_POINTS)

    @property
    def verdict(self) -> str:
        if self.points >= LEVEL_POINTS:
            return "best"
        if self.points > -LEVEL_POINTS:
            return "level"
        if self.points > -NEAR_POINTS:
            return "within a point"
        return "**behind**"


def duels(studies: Sequence[Study], numbers: Numbers) -> list[Duel]:
    """All of them, in the order of the studies."""
    return [
        duel
        for study in studies
        if study.judged and study.key in numbers.studies
        for duel in _duels(study, study.judged, numbers.studies[study.key])
    ]


def _duels(study: Study, judged: Judged, numbers: StudyNumbers) -> Iterator[Duel]:
    for ours in study.rows:
        others = {study.name(row): row.variant.called for row in study.rows if _is_rival(row, ours)}
        if ours.variant.routing != OURS or not others:
            continue
        for rate in numbers.rates():
            mine = numbers.point(study.name(ours), rate)
            theirs = sorted((numbers.point(row, rate) for row in others), key=lambda p: -p.mean)
            strongest = [max(by_seed) for by_seed in zip(*(point.capacity for point in theirs), strict=True)]
            yield Duel(
                study=study.key,
                judged=judged,
                policies=f"{ours.variant.ordering} + {ours.variant.admission}",
                rate=rate,
                ours=mine.mean,
                best=others[theirs[0].row],
                best_others=sum(round(point.mean, 4) == round(theirs[0].mean, 4) for point in theirs) - 1,
                theirs=theirs[0].mean,
                seeds_won=sum(own >= other for own, other in zip(mine.capacity, strongest, strict=True)),
                seeds=len(mine.capacity),
            )


def _is_rival(row: Row, ours: Row) -> bool:
    theirs, own = row.variant, ours.variant
    same = (theirs.ordering, theirs.admission) == (own.ordering, own.admission)
    return same and theirs.routing != OURS and row.conditions.keys() <= {*ours.conditions, "hot_share", "cold_share"}


def verdict_section(studies: Sequence[Study], numbers: Numbers) -> str:
    """Whether `pointsman` wins, first in a sentence, then where it does not, then point by point."""
    found = duels(studies, numbers)
    if not found:
        return ""
    lost = [duel for duel in found if not duel.passed]
    parts = ["## Does `pointsman` win?", "", _summary(found, lost), ""]
    if lost:
        parts += ["Where it does not:", "", _table(sorted(lost, key=lambda duel: duel.points)), ""]
    asked = asked_of_us(numbers)
    if asked:
        parts += ["What was asked of it in numbers:", "", asked, ""]
    parts += ["Every point, and the seeds in which no other was better:", "", _table(found), ""]
    return "\n".join(parts)


def _summary(found: Sequence[Duel], lost: Sequence[Duel]) -> str:
    best, near = ([duel for duel in found if duel.judged == judged] for judged in ("best", "near"))
    sentences = []
    for asked, group in (
        ("where it is to be the best at every rate, it is best or level", best),
        ("in the conditions, where it is to be at most a point behind the best, it is so", near),
    ):
        if group:
            sentences.append(f"{asked} at {sum(duel.passed for duel in group)} of {len(group)} points")
    just_behind = sum(duel.points > -NEAR_POINTS for duel in best if not duel.passed)
    if just_behind:
        sentences[0] += f" and less than a point behind at {just_behind} more"
    text = "; ".join(sentences)
    worst = min(found, key=lambda duel: duel.points)
    if not lost:
        return f"{text[0].upper()}{text[1:]}. Nowhere is it behind."
    return (
        f"{text[0].upper()}{text[1:]}. It is furthest behind on {worst.study} at {worst.rate:g}/s, "
        f"{-worst.points:.1f} points below `{worst.best}`."
    )


def _table(rows: Sequence[Duel]) -> str:
    head = [
        "study",
        "order + admission",
        "rate",
        "pointsman",
        "best other",
        "its capacity",
        "points",
        "seeds",
        "verdict",
    ]
    return table(
        head,
        [
            [
                duel.study,
                duel.policies,
                f"{duel.rate:g}/s",
                f"{duel.ours:.3f}",
                code(duel.best) + (f" and {duel.best_others} more" if duel.best_others else ""),
                f"{duel.theirs:.3f}",
                f"{duel.points:+.1f}",
                f"{duel.seeds_won} of {duel.seeds}",
                duel.verdict,
            ]
            for duel in rows
        ],
    )


# --- What was asked in numbers ---


def asked_of_us(numbers: Numbers) -> str:
    """Ratios of goodput, and what those pay who are served worst."""
    rows = []
    for workload, with_admission in (("conversation", 1.4), ("tools", 1.9)):
        rows += _placed_alone(numbers, workload) if has(numbers, f"placement-{workload}") else []
        if has(numbers, f"placement-{workload}", f"admission-{workload}"):
            rows += _with_admission(numbers, workload, with_admission)
    return table(["asked", "workload", "at least", "is", "met"], rows) if rows else ""


def _placed_alone(numbers: Numbers, workload: str) -> list[list[str]]:
    rows = []
    for asked, key, least in (("fresh load", f"placement-{workload}", 1.1), ("load 0.5 s old", f"lag-{workload}", 1.0)):
        if has(numbers, key):
            goodput = numbers.studies[key].goodput
            ratio = _ratio(goodput.get(OURS), goodput.get(f"dualmap, {PAPER}"))
            rows.append(_asked(f"goodput over DualMap's as written, {asked}", workload, least, ratio))
    return rows


def _with_admission(numbers: Numbers, workload: str, least: float) -> list[list[str]]:
    alone, admitted = numbers.studies[f"placement-{workload}"], numbers.studies[f"admission-{workload}"]
    rows = []
    for row in (row for row in admitted.rows() if row.startswith(OURS)):
        goodput = admitted.goodput.get(row)
        policies = row.removeprefix(f"{OURS} + ")
        as_written = alone.goodput.get(f"dualmap, {PAPER}")
        rows.append(
            _asked(f"{policies}: goodput over DualMap's as written alone", workload, least, _ratio(goodput, as_written))
        )
        bound = BOUND_WITH_FLOOR if row.endswith("fair") else BOUND
        rows.append(
            _asked(
                f"{policies}: goodput over the central queue's ({bound})",
                workload,
                0.97,
                _ratio(goodput, admitted.bound_goodput.get(bound)),
            )
        )
        held = [
            point.metrics["worst_length"] / point.mean
            for point in admitted.points
            if point.row == row and "worst_length" in point.metrics and point.mean
        ]
        if row.endswith("fair"):
            rows.append(
                _asked(
                    f"{policies}: worst length tenth over all, at the worst rate",
                    workload,
                    0.6,
                    min(held, default=None),
                )
            )
    return rows


def _asked(what: str, workload: str, least: float, value: float | None) -> list[str]:
    """`value` is compared as it is shown."""
    if value is None:
        return [what, workload, f"{least:.2f}", "not run", ""]
    return [what, workload, f"{least:.2f}", f"{value:.2f}", "yes" if round(value, 2) >= least else "**no**"]


def _ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> float | None:
    if not ours or not theirs or not fmean(theirs):
        return None
    return fmean(ours) / fmean(theirs)
