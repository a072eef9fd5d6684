"""How far `pointsman` is from the central queue, and why: one thing is changed at a time, from the bound to ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.studies.gap import DEFAULT_ROW, GLOBAL_ROW, ONE_CACHE_ROW, PREFIX, TRACE
from pointsman_lab.results.study import BOUND, BOUND_WITH_FLOOR, NO_FORESIGHT
from pointsman_lab.results.tables import table

GOAL = 0.97
OF_TRACES, OF_GENERATORS = ("placement-", "admission-"), ("generated-", "default-")


@dataclass(frozen=True, slots=True)
class Gap:
    """Capacities; hit rates of served requests, by tokens. `late`: share of the requests that were admitted and late."""

    workload: str
    rate: float
    bound: float
    no_foresight: float
    with_floor: float
    one_cache: float
    global_floor: float
    ours: float
    bound_hits: float
    hits: float
    refused: float
    late: float
    best_of_all: float
    """The highest capacity of any row of any policy, with the same seeds."""

    @property
    def share_of_floors(self) -> float:
        """Of a central queue with the same floors."""
        return self.ours / self.with_floor

    @property
    def share(self) -> float:
        return self.ours / self.bound

    @property
    def steps(self) -> dict[str, float]:
        """What each change costs, in hundredths of capacity. Their sum is the gap."""
        ladder = (self.bound, self.no_foresight, self.one_cache, self.global_floor, self.ours)
        return {name: 100 * (ladder[at] - ladder[at + 1]) for at, name in enumerate(STEPS)}

    @property
    def dearest(self) -> str:
        """What floors gain is taken off the eight queues, which have the other admission until then."""
        steps = self.steps
        return max(steps, key=lambda name: steps[name] + (min(0.0, steps["floors"]) if name == "eight queues" else 0.0))


STEPS = ("the future", "eight queues", "eight caches", "floors")


def gaps(numbers: Numbers) -> list[Gap]:
    found = []
    for key, study in numbers.studies.items():
        if not key.startswith(PREFIX):
            continue
        workload = key.removeprefix(PREFIX)
        is_trace = workload.endswith(TRACE)
        workload = workload.removesuffix(TRACE)
        elsewhere = [key, *(f"{kind}{workload}" for kind in (OF_TRACES if is_trace else OF_GENERATORS))]
        for at, rate in enumerate(study.rates()):
            ours, hits = study.point(DEFAULT_ROW, rate), study.point(GLOBAL_ROW, rate).metrics["hit_rate"]
            refused = ours.metrics["rejected_share"]
            found.append(
                Gap(
                    workload=f"{workload} (trace)" if is_trace else workload,
                    rate=rate,
                    bound=study.bounds[BOUND][at],
                    no_foresight=study.bounds[NO_FORESIGHT][at],
                    with_floor=study.bounds[BOUND_WITH_FLOOR][at],
                    one_cache=study.capacity(ONE_CACHE_ROW, rate),
                    global_floor=study.capacity(GLOBAL_ROW, rate),
                    ours=ours.mean,
                    bound_hits=study.bound_hits[BOUND][at],
                    hits=hits,
                    refused=refused,
                    late=max(0.0, 1 - ours.mean - refused),
                    best_of_all=max(
                        fmean(point.capacity[: len(study.seeds)])
                        for each in elsewhere
                        if each in numbers.studies
                        for point in numbers.studies[each].points
                        if point.rate == rate
                    ),
                )
            )
    return found


def gap_table(rows: Sequence[Gap]) -> str:
    head = ["workload", "rate", "central queue", "`pointsman`", "of it", "of one with floors", *STEPS]
    head += ["hit rate, queue / ours", "refused", "admitted and late"]
    return table(
        head,
        [
            [
                gap.workload,
                f"{gap.rate:g}/s",
                f"{gap.bound:.3f}",
                f"{gap.ours:.3f}",
                f"{gap.share:.2f}" if gap.share >= GOAL else f"**{gap.share:.2f}**",
                f"{gap.share_of_floors:.2f}",
                *(f"{points:+.1f}" for points in gap.steps.values()),
                f"{gap.bound_hits:.2f} / {gap.hits:.2f}",
                f"{gap.refused:.1%}",
                f"{gap.late:.1%}",
            ]
            for gap in rows
        ],
    )


def gap_summary(rows: Sequence[Gap]) -> str:
    """Where the goal is met, and which change costs most where it is not."""
    short = [gap for gap in rows if gap.share < GOAL]
    text = f"{len(rows) - len(short)} of {len(rows)} workloads reach {GOAL} of the central queue"
    if not short:
        return f"{text}."
    worst = min(short, key=lambda gap: gap.share)
    causes = {name: sum(gap.dearest == name for gap in short) for name in STEPS}
    told = ", ".join(f"{name} ({count})" for name, count in sorted(causes.items(), key=lambda one: -one[1]) if count)
    return f"{text}; least {worst.share:.2f} ({worst.workload}). What costs most where it is missed: {told}."


def is_bound(rows: Sequence[Gap]) -> tuple[int, int]:
    """At how many points no policy at all is above it, and of how many."""
    return sum(gap.best_of_all <= gap.bound + 0.0005 for gap in rows), len(rows)
