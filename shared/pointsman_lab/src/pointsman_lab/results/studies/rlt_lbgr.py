"""RLT and LBGR (Randomization Boosts KV Caching): randomised eviction, and routing that learns."""

from collections.abc import Iterable

from pointsman_lab.results.claims import Claim
from pointsman_lab.results.studies.rows import Workloads, rows
from pointsman_lab.results.study import OURS, Study

PAPER = "RLT and LBGR"
CACHE_AWARE = ("sticky_least_loaded.imbalance_tokens_max=147456", "sticky_least_loaded.hit_share_min=0.5")
"""After SGLang's cache-aware router: longest match of at least half of a prompt, until one instance has 32 requests
more than another (here 32 mean prompts of shared prefixes)."""


def studies(workloads: Workloads) -> Iterable[Study]:
    for name, short, order in (
        ("gsp_half_shared", "random", "in random order"),
        ("gsp_half_shared_round_robin", "round-robin", "round robin"),
    ):
        for capacity in (120_000, 180_000):
            yield Study(
                key=f"eviction-{short}-{capacity // 1000}k",
                title=f"Eviction and learned routing, groups {order}, caches of {capacity // 1000}k tokens",
                about="4 instances, as in the paper; half of each prompt is shared by its group, and 128 groups take turns.",
                source=workloads.generated(name),
                rows=[
                    row
                    for eviction in ("lru", "rlt")
                    for row in (
                        *rows(("cache_affinity",), note=eviction, eviction=eviction),
                        *rows(
                            ("sticky_least_loaded",),
                            note=f"cache-aware, {eviction}",
                            settings=CACHE_AWARE,
                            eviction=eviction,
                        ),
                        *rows(("lbgr",), note=eviction, eviction=eviction),
                        *rows((OURS,), note=eviction, eviction=eviction),
                    )
                ],
                rates=(7.5,),
                conditions={"instances": 4, "kv_capacity_tokens": capacity},
                metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
            )


CLAIMS: tuple[Claim, ...] = ()
