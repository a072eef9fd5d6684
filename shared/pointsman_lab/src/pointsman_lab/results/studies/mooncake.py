"""Mooncake: the order of schedulers, hits against cache capacity, and capacity within SLOs."""

from collections.abc import Iterable

from pointsman_lab.results.claims import Claim
from pointsman_lab.results.studies.rows import Workloads
from pointsman_lab.results.study import Study

CLAIMS: tuple[Claim, ...] = ()


def studies(workloads: Workloads) -> Iterable[Study]:
    del workloads
    yield from ()
