"""Several gateways in front of one engine. In: a setup for each. Out: of each its quietest figures over rounds in which all
take turns, and whether ours cost no more than the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pointsman_lab.gateway.measurements import Figures, Setup, Work, measure

OURS = "pointsman"


@dataclass(frozen=True)
class Goal:
    """Figures of ours and of `other`; it is met if ours is not larger."""

    name: str
    other: str
    ours_us: float
    others_us: float

    @property
    def met(self) -> bool:
        return self.ours_us <= self.others_us


async def compare(setups: Mapping[str, Setup], rounds: int) -> dict[str, Figures]:
    """The order changes with each round. Raises BenchError."""
    found: dict[str, Figures] = {}
    for number in range(rounds):
        for name in sorted(setups, reverse=number % 2 == 1):
            figures = await measure(setups[name])
            found[name] = quieter(found[name], figures) if name in found else figures
    return found


def quieter(one: Figures, other: Figures) -> Figures:
    """Noise only adds: the lower latency and work, the higher rate. Each median with its own percentiles."""
    return Figures(
        added={
            name: min(added, other.added[name], key=lambda each: each.added_p50_ms) for name, added in one.added.items()
        },
        requests_per_s={name: max(rate, other.requests_per_s[name]) for name, rate in one.requests_per_s.items()},
        concurrency=one.concurrency,
        work={name: _less(work, other.work[name]) for name, work in one.work.items()},
        not_measured=one.not_measured,
        refused=one.refused,
    )


def goals(found: Mapping[str, Figures]) -> list[Goal]:
    """Of issue 18; only against what was measured."""
    wanted = [
        ("CPU a request", "smg", "cpu_us_per_request"),
        ("CPU a streamed chunk", "vllm-router", "cpu_us_per_chunk"),
    ]
    return [
        Goal(name, other, total(found[OURS], attribute), total(found[other], attribute))
        for name, other, attribute in wanted
        if other in found
    ]


def total(figures: Figures, attribute: str) -> float:
    """Of all its processes together."""
    return float(sum(getattr(work, attribute) for work in figures.work.values()))


def as_json(found: Mapping[str, Figures], rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "gateways": found,
        "goals": [vars(goal) | {"met": goal.met} for goal in goals(found)],
    }


def _less(one: Work, other: Work) -> Work:
    return Work(
        min(one.cpu_us_per_request, other.cpu_us_per_request), min(one.cpu_us_per_chunk, other.cpu_us_per_chunk)
    )
