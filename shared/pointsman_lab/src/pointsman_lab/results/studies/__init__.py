"""The studies as plain data: a module for each paper, for our own policy, for the defaults, and for what a cache beyond
one instance gives. A module has `studies(workloads)` and, if a paper's, `CLAIMS`; optionally `MEASUREMENTS`."""

from itertools import chain
from pathlib import Path

from pointsman_lab.results.claims import Claim
from pointsman_lab.results.studies import (
    d2lpm,
    defaults,
    dualmap,
    gap,
    mooncake,
    ours,
    rlt_lbgr,
    sticky,
    tiers_transfers,
    tuning,
)
from pointsman_lab.results.studies.rows import Workloads
from pointsman_lab.results.study import Measurement, Study

MODULES = (ours, defaults, gap, tuning, dualmap, mooncake, sticky, d2lpm, rlt_lbgr, tiers_transfers)
PAPERS = (dualmap, mooncake, sticky, d2lpm, rlt_lbgr, tiers_transfers)

CLAIMS: tuple[Claim, ...] = tuple(chain.from_iterable(module.CLAIMS for module in PAPERS))


def studies(traces: Path) -> list[Study]:
    workloads = Workloads(traces)
    return [study for module in MODULES for study in module.studies(workloads)]


def measurements() -> list[Measurement]:
    return [one for module in MODULES for one in getattr(module, "MEASUREMENTS", ())]
