"""From the central queue to `pointsman`, one change at a time: every workload at the rate of the comparison under the
live default."""

from collections.abc import Iterable

from pointsman_lab.results.studies.defaults import RATES, generated
from pointsman_lab.results.studies.rows import AS_LIVE, LIVE_DEFAULT, Workloads, called, rows, short
from pointsman_lab.results.study import BOUND, BOUND_WITH_FLOOR, NO_FORESIGHT, OURS, Study

PREFIX, TRACE = "gap-", "-trace"
GLOBAL = (LIVE_DEFAULT[0], "predicted_ttft_global")
ONE_CACHE = "one cache"
INSTANT_TOKENS_PER_S = 1e9
"""Fetched from another instance at once."""
DEFAULT_ROW = f"{OURS} + {LIVE_DEFAULT[1]}"
GLOBAL_ROW = f"{OURS} + {GLOBAL[1]}"
ONE_CACHE_ROW = f"{OURS}, {ONE_CACHE} + {GLOBAL[1]}"


def studies(workloads: Workloads) -> Iterable[Study]:
    for source, rate in (
        (workloads.conversation(), 9.5),
        (workloads.tools(), 22.0),
        *((generated(workloads, name), rates[-1]) for name, rates in RATES.items()),
    ):
        yield Study(
            key=f"{PREFIX}{short(source)}{TRACE if source.trace else ''}",
            title=f"Distance from a central queue, {called(source)}",
            about="Under the live default, without floors for prompt lengths, and with one cache for all instances.",
            source=source,
            rows=[
                *rows((OURS,), *LIVE_DEFAULT),
                *rows((OURS,), *GLOBAL),
                *rows(
                    (OURS,),
                    *GLOBAL,
                    ONE_CACHE,
                    transfer_tokens_per_s=INSTANT_TOKENS_PER_S,
                    fetch_path="direct",
                    copies=False,
                ),
            ],
            rates=(rate,),
            conditions=AS_LIVE,
            bounds=(BOUND, NO_FORESIGHT, BOUND_WITH_FLOOR),
            metrics=("hit_rate", "rejected_share", "fetched_share", "ttft_p99_s", "late_wait_s"),
        )
