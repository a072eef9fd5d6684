"""Compares the figures of two runs. Returns a verdict with reasons."""

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

from pointsman.primitives import EngineSeconds
from pointsman_lab.agreement.runner import Figures

JUDGED = ("ttft_p50_s", "ttft_p90_s", "hit_rate")
ALSO_SHOWN = ("ttft_p99_s", "tpot_p50_s", "effective_capacity", "completed", "rejected", "failed")

Verdict = Literal["agree", "differ", "not judged"]


class Number(msgspec.Struct, kw_only=True, frozen=True):
    """`simulated`: median of the runs, which lie between `least` and `most`; `ratio`: live to simulated. None where
    nothing was measured."""

    name: str
    live: float | None
    simulated: float | None
    least: float | None
    most: float | None
    ratio: float | None
    judged: bool
    within: bool


class Agreement(msgspec.Struct, kw_only=True, frozen=True):
    policy: str
    ordering: str
    admission: str
    qps: float
    engines: int
    speed: float
    requests: int
    verdict: Verdict
    waited_s: EngineSeconds
    late_p90_s: EngineSeconds
    stood_still_s: EngineSeconds
    warned: dict[str, int]
    wall_s: float
    numbers: list[Number]


class AgreementReport(msgspec.Struct, kw_only=True):
    tolerance: float
    workload: str
    runs: list[Agreement]


def number(name: str, live: Figures, simulated: Sequence[Figures], tolerance: float) -> Number:
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
    return [number(name, live, simulated, tolerance) for name in (*JUDGED, *ALSO_SHOWN)]


def verdict(compared: Sequence[Number], *, disturbed: bool) -> Verdict:
    """Whether the judged numbers are within the tolerance. If not, a disturbed machine makes the verdict uncertain."""
    if all(one.within for one in compared if one.judged):
        return "agree"
    return "not judged" if disturbed else "differ"


def _within(live: float | None, simulated: float | None, tolerance: float) -> bool:
    if live is None or simulated is None:
        return live is simulated
    return abs(live - simulated) <= tolerance * simulated
