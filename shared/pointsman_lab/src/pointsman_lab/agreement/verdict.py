"""Do two runs agree? Pure: figures in, a verdict with its reasons out."""

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

from pointsman.primitives import Seconds
from pointsman_lab.agreement.runner import Figures

JUDGED = ("ttft_p50_s", "ttft_p90_s", "hit_rate")
ALSO_SHOWN = ("ttft_p99_s", "tpot_p50_s", "effective_capacity", "completed", "rejected", "failed")

Verdict = Literal["agree", "differ", "not judged"]


class Number(msgspec.Struct, kw_only=True, frozen=True):
    """One figure of both worlds. `simulated` is the median of the simulated runs, which lie between `least` and
    `most`; `ratio` is live to simulated. None where there was nothing to measure."""

    name: str
    live: float | None
    simulated: float | None
    least: float | None
    most: float | None
    ratio: float | None
    judged: bool
    within: bool


class Agreement(msgspec.Struct, kw_only=True, frozen=True):
    """One run in both worlds. Times are engine seconds."""

    policy: str
    ordering: str
    admission: str
    qps: float
    engines: int
    speed: float
    requests: int
    verdict: Verdict
    waited_s: Seconds
    late_p90_s: Seconds
    stood_still_s: Seconds
    warned: dict[str, int]
    wall_s: float
    numbers: list[Number]


class AgreementReport(msgspec.Struct, kw_only=True):
    """What `--json` writes."""

    tolerance: float
    workload: str
    runs: list[Agreement]


def number(name: str, live: Figures, simulated: Sequence[Figures], tolerance: float) -> Number:
    """One figure compared. Where neither world has it, or both have none of it, they agree."""
    ours: float | None = getattr(live, name)
    theirs = [value for figures in simulated if (value := getattr(figures, name)) is not None]
    middle = median(theirs) if theirs else None
    return Number(
        name=name,
        live=ours,
        simulated=middle,
        least=min(theirs, default=None),
        most=max(theirs, default=None),
        ratio=ours / middle if ours is not None and middle else None,
        judged=name in JUDGED,
        within=_within(ours, middle, tolerance),
    )


def numbers(live: Figures, simulated: Sequence[Figures], tolerance: float) -> list[Number]:
    """All of them, those that are judged first."""
    return [number(name, live, simulated, tolerance) for name in (*JUDGED, *ALSO_SHOWN)]


def verdict(compared: Sequence[Number], *, disturbed: bool) -> Verdict:
    """Whether the judged ones are within the tolerance. If not, a disturbed machine is a reason not to say."""
    if all(one.within for one in compared if one.judged):
        return "agree"
    return "not judged" if disturbed else "differ"


def _within(live: float | None, simulated: float | None, tolerance: float) -> bool:
    if live is None or simulated is None:
        return live is simulated
    return abs(live - simulated) <= tolerance * simulated
