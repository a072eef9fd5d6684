"""D2LPM (Locality-aware Fair Scheduling): fairness between clients, and what it costs in locality."""

from collections.abc import Iterable

from pointsman_lab.results.claims import Claim, Measured, gain
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.studies.rows import Workloads, rows
from pointsman_lab.results.study import OURS, Study

PAPER = "D2LPM"
KINDS = (("s1", "sends eight times as many requests"), ("s2", "has prefixes four times as long"))


def studies(workloads: Workloads) -> Iterable[Study]:
    compared = [
        *(row for ordering in ("dlpm", "vtc", "lpm", "fcfs", "fair_edf") for row in rows(("d2lpm",), ordering)),
        *(row for ordering in ("fair_edf", "vtc", "fcfs") for row in rows((OURS,), ordering)),
    ]
    for name in ("llm_as_judge", "tree_of_thoughts"):
        for kind, what in KINDS:
            yield Study(
                key=f"fairness-{name.replace('_', '-')}-{kind}",
                title=f"Fairness, {name}, {kind.upper()}",
                about=f"One of eight clients {what}; 4 instances, more load than they can serve.",
                source=workloads.generated(f"{name}_{kind}"),
                rows=compared,
                rates=(90.0,),
                conditions={"instances": 4},
                metrics=("jain", "service_per_s", "well_behaved_p90_s", "ttft_p90_s", "hit_rate"),
            )


def _over_vtc(numbers: Numbers) -> Measured:
    ratios = [
        numbers.mean(key, "d2lpm + dlpm", "service_per_s") / numbers.mean(key, "d2lpm + vtc", "service_per_s")
        for key in (f"fairness-{name}-{kind}" for name in ("llm-as-judge", "tree-of-thoughts") for kind, _ in KINDS)
    ]
    return Measured(max(ratios) - 1, f"at most {max(ratios):.2f} times")


CLAIMS = (
    Claim(
        paper=PAPER,
        place="abstract",
        says="more throughput than VTC",
        reported="up to 2.87 times",
        conditions="Four engines, one client misbehaves.",
        measure=_over_vtc,
        rule=gain(1.87),
    ),
)
