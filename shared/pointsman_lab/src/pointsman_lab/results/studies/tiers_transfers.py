"""What a cache beyond one instance gives: slower tiers, prefixes fetched from other instances, and split pools."""

from collections.abc import Iterable

from pointsman_lab.results.studies.rows import Workloads
from pointsman_lab.results.study import Study


def studies(workloads: Workloads) -> Iterable[Study]:
    del workloads
    yield from ()
