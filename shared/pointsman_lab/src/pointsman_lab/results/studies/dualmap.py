"""DualMap: figures and tables of its paper, numbered as there."""

from collections.abc import Iterable

from pointsman_lab.results.claims import Claim
from pointsman_lab.results.studies.rows import Workloads, as_written, called, rows
from pointsman_lab.results.study import OURS, Study

CLAIMS: tuple[Claim, ...] = ()


def studies(workloads: Workloads) -> Iterable[Study]:
    yield from _elasticity(workloads)


def _elasticity(workloads: Workloads) -> Iterable[Study]:
    from dataclasses import replace

    tools = workloads.tools(5000)
    yield Study(
        key="elasticity",
        title=f"A fleet that grows and shrinks, {called(tools)}",
        about="4 instances are too few for 9/s; 2 more come after 120 s and 2 more after 180 s. After 333 s the load halves, and at 450 s and 600 s two instances leave.",
        source=replace(tools, halved_after=0.5),
        rows=[
            *rows((OURS,)),
            as_written(),
            *rows(("min_ttft", "preble", "cache_affinity", "least_loaded")),
        ],
        rates=(9.0,),
        conditions={"instances": 4, "scale_at": ((120.0, 6), (180.0, 8), (450.0, 6), (600.0, 4))},
        windows=(
            ("too few", 0.0, 120.0),
            ("growing", 120.0, 240.0),
            ("8 instances", 240.0, 333.0),
            ("half the load", 333.0, 450.0),
            ("6 instances", 450.0, 600.0),
            ("4 again", 600.0, 1000.0),
        ),
        metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s"),
        drawn=True,
    )
