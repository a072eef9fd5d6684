"""A small grid for each rival, on both traces at one rate each: the defaults, what `rows.TUNED` holds, and a step beyond."""

from collections.abc import Iterable, Mapping

from pointsman_lab.results.studies.rows import AS_LIVE, OWN_CONDITIONS, Workloads, called, rows, short
from pointsman_lab.results.study import Study

GRID: Mapping[str, tuple[str, ...]] = {
    "approximate_token_load": ("approximate_token_load.hit_share_min=0.15,0.3,0.8",),
    "d2lpm": ("d2lpm.quantum_tokens=4096,16384,65536,262144,1048576,4194304",),
    "dualmap": ("dualmap.ttft_slo_threshold=0.25,0.5,1.0",),
    "dynamo_cost": ("dynamo_cost.overlap_weight=1,16,64,256",),
    "lbgr": ("lbgr.decay_s=10,40,80",),
    "preble": ("preble.exploit_share=0.15,0.3", "preble.window_s=180,540"),
    "sticky_least_loaded": ("sticky_least_loaded.imbalance_tokens_max=16384,65536,131072",),
}


def studies(workloads: Workloads) -> Iterable[Study]:
    for source, rate in ((workloads.conversation(), 7.0), (workloads.tools(), 14.0)):
        yield Study(
            key=f"tuning-{short(source)}",
            title=f"Settings of the rivals, {called(source)}",
            about="First come, first served, no admission, with the live rebalancing.",
            source=source,
            rows=[
                row
                for policy, settings in GRID.items()
                for row in rows((policy,), settings=settings, **OWN_CONDITIONS.get(policy, {}))
            ],
            rates=(rate,),
            conditions=AS_LIVE,
        )
