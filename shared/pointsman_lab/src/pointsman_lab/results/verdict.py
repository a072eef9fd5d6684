"""`pointsman` against the best other policy, rate by rate: rows of one study with the same ordering and admission."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import stdev

from pointsman_lab.results.numbers import Numbers, StudyNumbers
from pointsman_lab.results.studies.rows import PAPER_CONDITIONS
from pointsman_lab.results.study import OURS, Row, Study

LEVEL_POINTS = 0.05
NEAR_POINTS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    study: str
    policies: str
    rate: float
    ours: float
    best: str
    our_row: str
    best_row: str
    theirs: float
    error: float | None
    """Standard error of `points`, paired by seed; None with one seed."""

    @property
    def points(self) -> float:
        return 100 * (self.ours - self.theirs)

    @property
    def text(self) -> str:
        return f"{self.points:+.1f}" + ("" if self.error is None else f" ± {self.error:.1f}")

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
        for duel in _duels(study, numbers.studies[study.key])
    ]


def _duels(study: Study, numbers: StudyNumbers) -> Iterator[Duel]:
    for ours in study.rows:
        others = {study.name(row): row.variant.called for row in study.rows if _is_rival(row, ours)}
        if ours.variant.routing != OURS or not others:
            continue
        for rate in numbers.rates():
            mine = numbers.point(study.name(ours), rate)
            theirs = max((numbers.point(row, rate) for row in others), key=lambda point: point.mean)
            yield Duel(
                study=study.key,
                policies=f"{ours.variant.ordering} + {ours.variant.admission}",
                rate=rate,
                ours=mine.mean,
                best=others[theirs.row],
                our_row=mine.row,
                best_row=theirs.row,
                theirs=theirs.mean,
                error=_error([own - other for own, other in zip(mine.capacity, theirs.capacity, strict=True)]),
            )


def _error(differences: Sequence[float]) -> float | None:
    return 100 * stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else None


def _is_rival(row: Row, ours: Row) -> bool:
    theirs, own = row.variant, ours.variant
    same = (theirs.ordering, theirs.admission) == (own.ordering, own.admission)
    return same and theirs.routing != OURS and row.conditions.keys() <= {*ours.conditions, *PAPER_CONDITIONS}
