"""What is studied: each study is a table of variants against rates (or conditions), as plain data.

Nothing is tuned per trace or workload: a variant has the same settings wherever it stands.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.simulation.simulator import Scenario
from pointsman.tooling.simulate.experiment import Cell, Source
from pointsman.tooling.simulate.variants import Variant, variants

CONVERSATION = "mooncake_conversation.jsonl"
TOOL_AGENT = "toolagent_reconstructed.jsonl"
WARMUP = 500
INPUT_CAP = 20_480

AS_WRITTEN = "dualmap:both_over=least_loaded"
"""DualMap as the paper writes it; its cells also get the paper's hotness thresholds, 2/n and 1/n."""

ROUTING = (*sorted(ROUTING_POLICIES), AS_WRITTEN)
RIVALS = (
    "pointsman",
    "dualmap",
    AS_WRITTEN,
    "min_ttft",
    "sticky_least_loaded",
    "approximate_token_load",
    "preble",
    "lbgr",
)
GENERATED_REQUESTS = 3000


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table. `columns` are its cells' headings and what they change; a column is a rate under conditions."""

    key: str
    title: str
    text: str
    source: Source
    variants: Sequence[Variant]
    rates: Sequence[float]
    seeds: Sequence[int] = (0,)
    conditions: dict[str, Any] = field(default_factory=dict)
    goodput: bool = False
    bound: bool = False
    """Whether the central queue with one shared cache stands below the table."""

    pictures: bool = False

    def cells(self) -> list[Cell]:
        return [
            Cell(source=self.source, variant=variant, scenario=self.scenario(variant, seed), qps=qps, warmup=WARMUP)
            for variant in self.variants
            for qps in self.rates
            for seed in self.seeds
        ]

    def scenario(self, variant: Variant, seed: int) -> Scenario:
        scenario = Scenario(
            routing=variant.routing,
            routing_settings=variant.settings,
            ordering=variant.ordering,
            admission=variant.admission,
            seed=seed,
            **self.conditions,
        )
        return replace(scenario, hot_share=2.0, cold_share=1.0) if variant.policy == AS_WRITTEN else scenario


def studies(traces: Path) -> list[Study]:
    """All of them, in the order in which they are told."""
    conversation = _trace(traces / CONVERSATION, 4000)
    tools = _trace(traces / TOOL_AGENT, 8000)
    return [
        *_placement(conversation, tools),
        *_ablations(conversation, tools),
        *_admission(conversation, tools),
        *_lag(conversation, tools),
        *_conditions(conversation),
        *_generated(),
        *_eviction(),
        *_fairness(),
    ]


def _placement(conversation: Source, tools: Source) -> Iterable[Study]:
    text = (
        "First come, first served, no admission, prefill-bound engines, 8 instances, TTFT objective 5 s, three seeds."
    )
    for source, rates in (
        (conversation, (5.0, 6.0, 6.5, 7.0, 7.5, 8.0)),
        (tools, (11.0, 12.0, 13.0, 14.0, 16.0, 20.0)),
    ):
        yield Study(
            key=f"placement-{_short(source)}",
            title=f"Placement alone, {_called(source)}",
            text=text,
            source=source,
            variants=variants(ROUTING, ("fcfs",), ("none",)),
            rates=rates,
            seeds=(0, 1, 2),
            goodput=True,
            bound=True,
            pictures=True,
        )


def _ablations(conversation: Source, tools: Source) -> Iterable[Study]:
    policies = (
        "dualmap",
        AS_WRITTEN,
        "dualmap:ablation=cache-affinity",
        "dualmap:ablation=least-loaded",
        "dualmap:ablation=min-ttft",
    )
    for source, rates in ((conversation, (5.0, 6.0, 6.5, 7.0)), (tools, (11.0, 12.0, 13.0, 14.0))):
        for rebalancing in ("off", "dualmap_pair", "global"):
            yield Study(
                key=f"ablation-{_short(source)}-{rebalancing}",
                title=f"DualMap's parts, {_called(source)}, rebalancing {rebalancing}",
                text="What the choice within the pair is made by, and what rebalancing adds.",
                source=source,
                variants=variants(policies, ("fcfs",), ("none",)),
                rates=rates,
                conditions={"rebalancing": rebalancing},
            )


def _admission(conversation: Source, tools: Source) -> Iterable[Study]:
    chosen = [
        *variants(("dualmap", "min_ttft", "pointsman"), ("fcfs",), ("predicted_ttft", "predicted_ttft_global")),
        *variants(("pointsman",), ("fcfs", "fair_edf"), ("predicted_ttft_fair",)),
    ]
    for source, rates in ((conversation, (8.0, 9.0, 10.0, 11.0)), (tools, (16.0, 20.0, 24.0, 28.0))):
        yield Study(
            key=f"admission-{_short(source)}",
            title=f"With admission, {_called(source)}",
            text="Refusing what is predicted late. Refused requests count as missed. Three seeds.",
            source=source,
            variants=chosen,
            rates=rates,
            seeds=(0, 1, 2),
            goodput=True,
            bound=True,
        )


def _lag(conversation: Source, tools: Source) -> Iterable[Study]:
    for source, rates in ((conversation, (5.0, 6.0, 6.5)), (tools, (11.0, 12.0, 13.0))):
        yield Study(
            key=f"lag-{_short(source)}",
            title=f"Knowledge half a second old, {_called(source)}",
            text="Policies see nothing of the last 0.5 s, their own dispatches included.",
            source=source,
            variants=variants(RIVALS, ("fcfs",), ("none",)),
            rates=rates,
            conditions={"load_lag_s": 0.5},
            goodput=True,
        )


def _conditions(conversation: Source) -> Iterable[Study]:
    for key, title, rates, conditions in (
        ("decode", "decoding shares the engine", (4.5, 5.5, 6.5), {"prefill_only": False}),
        ("small-cache", "caches of 250k tokens", (5.0, 6.0, 7.0), {"kv_capacity_tokens": 250_000}),
        ("wrong-estimates", "half the estimates wrong by 50%", (5.5, 6.5, 7.0), {"estimate_error": (0.5, 0.5)}),
        ("slow-instance", "one instance at half speed", (5.0, 6.0, 7.0), {"slow_instances": {0: 0.5}}),
        ("late-events", "cache events 0.5 s late, 1% lost", (6.0, 7.0), {"event_delay_s": 0.5, "event_loss": 0.01}),
        ("4-instances", "4 instances", (2.5, 3.0, 3.5), {"instances": 4}),
        ("16-instances", "16 instances", (13.0, 14.0, 15.0), {"instances": 16}),
        ("64-instances", "64 instances", (52.0, 58.0, 64.0), {"instances": 64}),
    ):
        yield Study(
            key=f"condition-{key}",
            title=f"Conversation, {title}",
            text="First come, first served, no admission.",
            source=conversation,
            variants=variants(RIVALS, ("fcfs",), ("none",)),
            rates=rates,
            conditions=conditions,
        )


def _generated() -> Iterable[Study]:
    for name, rates in (
        ("chat", (30.0, 40.0, 50.0)),
        ("tools", (40.0, 60.0, 80.0)),
        ("gsp_mixed", (80.0, 120.0, 160.0)),
        ("gsp_round_robin", (80.0, 120.0, 160.0)),
        ("long_document_qa", (4.0, 8.0, 12.0)),
        ("tree_of_thoughts", (60.0, 90.0, 120.0)),
        ("llm_as_judge", (60.0, 90.0, 120.0)),
        ("two_hot_prefixes", (60.0, 90.0, 120.0)),
    ):
        yield Study(
            key=f"generated-{name}",
            title=f"Generated workload {name}",
            text="First come, first served, no admission. Rates chosen for what they load, not for who wins.",
            source=_generator(name),
            variants=variants(RIVALS, ("fcfs",), ("none",)),
            rates=rates,
        )


def _eviction() -> Iterable[Study]:
    for name in ("gsp_mixed", "gsp_round_robin"):
        for eviction in ("lru", "rlt"):
            yield Study(
                key=f"eviction-{name}-{eviction}",
                title=f"Eviction {eviction}, {name}, caches of 60k tokens",
                text="Learned routing (LBGR) and cache-aware routing, with least-recently-used and randomised eviction.",
                source=_generator(name),
                variants=variants(("lbgr", "cache_affinity", "pointsman"), ("fcfs",), ("none",)),
                rates=(6.0, 10.0),
                conditions={"kv_capacity_tokens": 60_000, "eviction": eviction},
            )


def _fairness() -> Iterable[Study]:
    chosen = [
        *variants(("d2lpm",), ("dlpm", "vtc", "lpm", "fcfs"), ("none",)),
        *variants(("pointsman",), ("fair_edf", "vtc", "fcfs"), ("none",)),
    ]
    for name in ("llm_as_judge_s1", "llm_as_judge_s2", "tree_of_thoughts_s1", "tree_of_thoughts_s2"):
        yield Study(
            key=f"fairness-{name}",
            title=f"Fairness, {name}",
            text="One of eight clients misbehaves: S1 sends eight times as many requests, S2 prefixes four times as long.",
            source=_generator(name),
            variants=chosen,
            rates=(20.0, 40.0),
        )


def _trace(path: Path, requests: int) -> Source:
    return Source(trace=path, generator="", requests=requests, input_tokens_max=INPUT_CAP)


def _generator(name: str) -> Source:
    return Source(
        trace=None, generator=name, requests=GENERATED_REQUESTS, input_tokens_max=INPUT_CAP * 2, arrivals="poisson"
    )


def _short(source: Source) -> str:
    return "tools" if source.is_reconstruction else "conversation"


def _called(source: Source) -> str:
    return "tool-and-agent (a reconstruction, not the published trace)" if source.is_reconstruction else "conversation"
