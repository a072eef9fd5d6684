"""A small grid for each rival, on both traces at one rate each. `rows.TUNED` holds what it found."""

from collections.abc import Iterable, Mapping

from pointsman_lab.results.studies.rows import Workloads, called, rows, short
from pointsman_lab.results.study import Study

GRID: Mapping[str, tuple[str, ...]] = {
    "d2lpm": ("d2lpm.quantum_tokens=4096,16384,65536,262144",),
}
SEEDS = (0,)


def studies(workloads: Workloads) -> Iterable[Study]:
    for source, rate in ((workloads.conversation(), 7.0), (workloads.tools(), 14.0)):
        yield Study(
            key=f"tuning-{short(source)}",
            title=f"Settings of the rivals, {called(source)}",
            about="First come, first served, no admission.",
            source=source,
            rows=[row for policy, settings in GRID.items() for row in rows((policy,), settings=settings)],
            rates=(rate,),
            seeds=SEEDS,
        )
