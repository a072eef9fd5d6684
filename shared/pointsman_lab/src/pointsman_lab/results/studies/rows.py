"""Rows and workloads of the studies. A rival has one row at its defaults and, where the grid of `tuning` found a better
one, a row "tuned"; `dualmap, as written` is the paper's, with its rebalancing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pointsman.policies.rebalancing import DEFAULT_REBALANCING
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.primitives import Tokens
from pointsman_cli.simulate.experiment import Source
from pointsman_cli.simulate.variants import variants
from pointsman_lab.results.study import OURS, Conditions, Row

CONVERSATION = "mooncake_conversation.jsonl"
TOOL_AGENT = "toolagent_reconstructed.jsonl"
REQUESTS = 3000
INPUT_CAP = 20_480
DOCUMENT_CAP = 40_960

PAPER = "as written"
PAPER_SETTINGS = ("dualmap.both_over=least_loaded", "dualmap.stall_seconds=0")
PAPER_CONDITIONS: Conditions = {"hot_share": 2.0, "cold_share": 1.0, "rebalancing": "dualmap_pair"}
"""DualMap as in its paper: hot above 2/n, cold below 1/n, the less loaded when both are over, no stalls in its
prediction, and moves within the pair. It differs in three things, which the page lists."""
OWN_CONDITIONS: Mapping[str, Conditions] = {"dualmap": {"rebalancing": "dualmap_pair"}}
"""DualMap always has its rebalancing, also with our thresholds."""
AS_WRITTEN = f"dualmap, {PAPER}"

DUALMAP_BASELINES = ("cache_affinity", "least_loaded", "min_ttft", "preble")
"""The policies of DualMap's repository, by our names."""

LIVE_DEFAULT = ("fair_edf", "predicted_ttft_fair")
"""Ordering and admission of a scheduler that nobody configured."""
AS_LIVE: Conditions = {"rebalancing": DEFAULT_REBALANCING}
"""The rebalancing of the live default. In comparisons with `pointsman` every policy has it, but DualMap its own."""

LOAD_BLIND = ("random", "round_robin", "power_of_two", "least_loaded", "cache_affinity")
"""Policies without regard to load or to caches. They serve next to nothing where others still compete; shown where a
paper compares with them, and left out elsewhere."""

TUNED: Mapping[str, tuple[str, ...]] = {
    "approximate_token_load": ("approximate_token_load.hit_share_min=0.3",),
    "d2lpm": ("d2lpm.quantum_tokens=1048576",),
    "dualmap": ("dualmap.ttft_slo_threshold=0.5",),
    "dynamo_cost": ("dynamo_cost.overlap_weight=64",),
    "lbgr": ("lbgr.decay_s=40",),
    "preble": ("preble.exploit_share=0.15", "preble.window_s=540"),
    "sticky_least_loaded": ("sticky_least_loaded.imbalance_tokens_max=65536",),
}
"""The best of the grid of `tuning`, by policy, where it beats the defaults by more than a point."""
TUNED_NOTE = "tuned"

ONLY_TUNED = ("d2lpm", "dualmap", "dynamo_cost", "lbgr")
"""Only the grid shows their defaults: they serve next to nothing where others still compete, or, of `dualmap`, stand
beside the paper's own."""


@dataclass(frozen=True, slots=True)
class Workloads:
    """`traces`: directory of the two trace files."""

    traces: Path

    def conversation(self, requests: int = REQUESTS, *, cap: Tokens = INPUT_CAP) -> Source:
        return Source(trace=self.traces / CONVERSATION, generator="", requests=requests, input_tokens_max=cap)

    def tools(self, requests: int = REQUESTS, *, cap: Tokens = INPUT_CAP) -> Source:
        return Source(trace=self.traces / TOOL_AGENT, generator="", requests=requests, input_tokens_max=cap)

    def generated(self, name: str, requests: int = 3000, *, arrivals: str = "poisson") -> Source:
        return Source(trace=None, generator=name, requests=requests, input_tokens_max=DOCUMENT_CAP, arrivals=arrivals)


def short(source: Source) -> str:
    if source.trace is None:
        return source.generator.replace("_", "-")
    return "tools" if source.is_reconstruction else "conversation"


def called(source: Source) -> str:
    if source.trace is None:
        return source.generator
    return "tool-and-agent (a reconstruction)" if source.is_reconstruction else "conversation"


def rows(
    policies: Sequence[str],
    ordering: str = "fcfs",
    admission: str = "none",
    note: str = "",
    settings: Sequence[str] = (),
    **conditions: Any,
) -> list[Row]:
    """Under the live default with the rebalancing that goes with it."""
    live: Conditions = AS_LIVE if (ordering, admission) == LIVE_DEFAULT else {}
    return [
        Row(
            variant=replace(variant, note=note),
            conditions={**live, **(live and OWN_CONDITIONS.get(variant.routing, {})), **conditions},
        )
        for variant in variants(policies, (ordering,), (admission,), settings)
    ]


def as_written(
    note: str = PAPER,
    settings: Sequence[str] = PAPER_SETTINGS,
    ordering: str = "fcfs",
    admission: str = "none",
    **conditions: Any,
) -> Row:
    (row,) = rows(("dualmap",), ordering, admission, note, settings, **{**PAPER_CONDITIONS, **conditions})
    return row


def tuned(policy: str, ordering: str = "fcfs", admission: str = "none", note: str = "", **conditions: Any) -> Row:
    (row,) = rows(
        (policy,),
        ordering,
        admission,
        ", ".join(filter(None, (TUNED_NOTE, note))),
        TUNED[policy],
        **{**OWN_CONDITIONS.get(policy, {}), **conditions},
    )
    return row


def rivals(ordering: str = "fcfs", admission: str = "none") -> list[Row]:
    """Every registered policy outside LOAD_BLIND, the tuned rows, and DualMap as written."""
    names = sorted(set(ROUTING_POLICIES) - set(LOAD_BLIND) - {OURS})
    return [
        *(
            row
            for name in names
            if name not in ONLY_TUNED
            for row in rows((name,), ordering, admission, **OWN_CONDITIONS.get(name, {}))
        ),
        *(tuned(name, ordering, admission) for name in names if name in TUNED),
        as_written(ordering=ordering, admission=admission),
    ]


def everyone(ordering: str = "fcfs", admission: str = "none") -> list[Row]:
    return [*rows((OURS,), ordering, admission), *rivals(ordering, admission)]


def at_their_best(ordering: str = "fcfs", admission: str = "none") -> list[Row]:
    """Everyone at the better of the default and the tuned settings."""
    return [row for row in everyone(ordering, admission) if row.variant.called not in TUNED]
