"""`pointsman` against the best other policy, rate by rate: rows of one study with the same ordering and admission."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import stdev

from pointsman_lab.results.numbers import Numbers, StudyNumbers
from pointsman_lab.results.studies.rows import PAPER_CONDITIONS
from pointsman_lab.results.study import OURS, Judged, Row, Study
from pointsman_lab.results.tables import code, table

LEVEL_POINTS = 0.05
NEAR_POINTS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    study: str
    judged: Judged
    policies: str
    rate: float
    ours: float
    best: str
    our_row: str
    best_row: str
    ties: int
    theirs: float
    seeds_won: int
    seeds: int
    error: float | None
    """Standard error of `points`, paired by seed; None with one seed."""

    @property
    def points(self) -> float:
        return 100 * (self.ours - self.theirs)

    @property
    def text(self) -> str:
        return f"{self.points:+.1f}" + ("" if self.error is None else f" ± {self.error:.1f}")

    @property
    def passed(self) -> bool:
        return self.points > (-LEVEL_POINTS if self.judged == "best" else -NEAR_POINTS)

    @property
    def verdict(self) -> str:
        if self.points >= LEVEL_POINTS:
            return "best"
        if self.points > -LEVEL_POINTS:
            return "level"
        return "within a point" if self.points > -NEAR_POINTS else "**behind**"


def duels(studies: Sequence[Study], numbers: Numbers) -> list[Duel]:
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
                our_row=mine.row,
                best_row=theirs[0].row,
                ties=sum(round(point.mean, 4) == round(theirs[0].mean, 4) for point in theirs) - 1,
                theirs=theirs[0].mean,
                seeds_won=sum(own >= other for own, other in zip(mine.capacity, strongest, strict=True)),
                seeds=len(mine.capacity),
                error=_error([own - other for own, other in zip(mine.capacity, theirs[0].capacity, strict=True)]),
            )


def _error(differences: Sequence[float]) -> float | None:
    return 100 * stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else None


def _is_rival(row: Row, ours: Row) -> bool:
    theirs, own = row.variant, ours.variant
    same = (theirs.ordering, theirs.admission) == (own.ordering, own.admission)
    return same and theirs.routing != OURS and row.conditions.keys() <= {*ours.conditions, *PAPER_CONDITIONS}


def duel_table(rows: Sequence[Duel]) -> str:
    head = ["study", "rate", OURS, "best other", "its capacity", "points", "seeds won"]
    cells = [
        [
            duel.study,
            f"{duel.rate:g}/s",
            f"{duel.ours:.3f}",
            code(duel.best) + (f" and {duel.ties} more" if duel.ties else ""),
            f"{duel.theirs:.3f}",
            duel.text,
            f"{duel.seeds_won}/{duel.seeds}",
        ]
        for duel in rows
    ]
    return table(head, cells)
