"""What a cache beyond one instance gives: slower tiers, prefixes fetched from other instances, and split pools."""

from collections.abc import Iterable

from pointsman_lab.results.split_pools import split_pools
from pointsman_lab.results.studies.rows import LIVE_DEFAULT, Workloads, called, rows, short
from pointsman_lab.results.study import OURS, Measurement, Row, Study

DEVICE_TOKENS = 250_000
HOST_TOKENS = 1_500_000
"""196 GB for the 8-billion model."""
NO_HOST, UNSEEN, SEEN = "no host tier", "host tier, unseen", "host tier"

MEASUREMENTS = (Measurement(key="split-pools", measure=split_pools),)


def studies(workloads: Workloads) -> Iterable[Study]:
    yield from _host_tier(workloads)


def _host_tier(workloads: Workloads) -> Iterable[Study]:
    for source, rates in ((workloads.conversation(3000), (6.0, 7.0)), (workloads.tools(3000), (10.0, 12.0))):
        yield Study(
            key=f"host-tier-{short(source)}",
            title=f"A host tier behind caches of 250k tokens, {called(source)}",
            about=(
                "Each engine keeps 1.5 million tokens in host memory and loads them back at 20 GB/s. Unseen: the engine "
                "uses them, the scheduler does not know of them."
            ),
            source=source,
            rows=[
                *(row for policy in (OURS, "min_ttft", "dualmap") for row in _with_and_without(policy)),
                *_with_and_without(OURS, *LIVE_DEFAULT),
            ],
            rates=rates,
            seeds=(0, 1),
            conditions={"kv_capacity_tokens": DEVICE_TOKENS},
            metrics=("hit_rate", "loaded_share", "ttft_p50_s", "ttft_p90_s", "prediction_error_p50_s"),
        )


def _with_and_without(policy: str, ordering: str = "fcfs", admission: str = "none") -> list[Row]:
    return [
        *rows((policy,), ordering, admission, NO_HOST),
        *rows((policy,), ordering, admission, UNSEEN, host_cache_tokens=HOST_TOKENS, tiers_known=False),
        *rows((policy,), ordering, admission, SEEN, host_cache_tokens=HOST_TOKENS),
    ]
