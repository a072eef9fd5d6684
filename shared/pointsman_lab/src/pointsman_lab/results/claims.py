"""Headlines of the papers as data: what was reported, a function of our numbers, and a rule that gives the verdict. No
verdict is written by hand. A claim that this simulator cannot test has no measure, and says why in `why`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.tables import table

Verdict = Literal["reproduced", "direction only", "not reproduced", "not testable here"]

VERDICTS: tuple[Verdict, ...] = ("reproduced", "direction only", "not reproduced", "not testable here")

SHARE_OF_GAIN = 0.75
"""A gain counts as reproduced from this share of the reported one."""
MOSTLY = 2 / 3
"""A statement has the right direction if it is true under so many of the conditions; half of them is chance."""
NOISE = 0.02
"""Gains below this are none: other seeds may turn them round."""


@dataclass(frozen=True, slots=True)
class Measured:
    """`value`: what the rule judges. `text`: all that the page shows, with its units."""

    value: float
    text: str


Rule = Callable[[float], Verdict]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`place`: figure, table or section. `conditions`: the paper's, and where ours differ. `why`: shown unless the
    verdict is "reproduced"; None for `measure` and `rule`: not testable here."""

    paper: str
    place: str
    says: str
    reported: str
    conditions: str
    measure: Callable[[Numbers], Measured] | None = None
    rule: Rule | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    claim: Claim
    measured: str
    verdict: Verdict

    @property
    def why(self) -> str:
        return "" if self.verdict == "reproduced" else self.claim.why


def judged(claim: Claim, numbers: Numbers) -> Judged:
    """Raises KeyError without the study that the claim needs."""
    if claim.measure is None or claim.rule is None:
        return Judged(claim, "", "not testable here")
    measured = claim.measure(numbers)
    return Judged(claim, measured.text, claim.rule(measured.value))


# --- Rules ---


def gain(reported: float) -> Rule:
    """For a gain over a baseline: 0.4 is 40% more (or less, where less is better). Reproduced from
    SHARE_OF_GAIN of the reported one; direction only above NOISE."""

    def verdict(value: float) -> Verdict:
        if value >= SHARE_OF_GAIN * reported:
            return "reproduced"
        return "direction only" if value > NOISE else "not reproduced"

    return verdict


def times(reported: float) -> Rule:
    """For a ratio to a baseline: the gain is the ratio less one."""
    rule = gain(reported - 1)
    return lambda value: rule(value - 1)


def near(reported: float, *, within: float, direction: float) -> Rule:
    """For a value: reproduced `within` that distance, direction only within the other."""

    def verdict(value: float) -> Verdict:
        distance = abs(value - reported)
        if distance <= within:
            return "reproduced"
        return "direction only" if distance <= direction else "not reproduced"

    return verdict


def holds(value: float) -> Verdict:
    """For a statement: `value` is the share of the conditions under which it is true."""
    if value >= 1:
        return "reproduced"
    return "direction only" if value >= MOSTLY else "not reproduced"


def share_true(*groups: Sequence[bool]) -> float:
    """The smallest share of a group: a statement is not true in general if it fails at one of the rates."""
    return min(sum(statements) / len(statements) for statements in groups)


# --- Tables ---


def claim_table(rows: Sequence[Judged]) -> str:
    head = ["where", "says", "reported", "measured here", "verdict"]
    return table(
        head,
        [[one.claim.place, one.claim.says, one.claim.reported, one.measured or "-", bold(one.verdict)] for one in rows],
    )


def condition_list(rows: Sequence[Judged]) -> str:
    """Conditions and reasons, one line for each claim; a reason is told once."""
    told: dict[str, str] = {}
    lines = []
    for one in rows:
        reason = ""
        if one.why:
            before = told.get(one.why)
            again = "as above." if before == one.claim.place else f"as for {before}."
            told.setdefault(one.why, one.claim.place)
            reason = f" *{one.verdict.capitalize()}*: {again if before else one.why}"
        lines.append(f"- {one.claim.place}, {one.claim.says}: {one.claim.conditions}{reason}")
    return "\n".join(lines)


def bold(verdict: Verdict) -> str:
    return verdict if verdict == "reproduced" else f"**{verdict}**"
