"""The studies, as plain data. Rows name their policies in full; no setting is tuned per trace or workload."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pointsman.policies.routing import ROUTING_POLICIES
from pointsman_cli.simulate.experiment import Source
from pointsman_cli.simulate.variants import variants
from pointsman_lab.results.study import BOUND, BOUND_FCFS, BOUND_WITH_FLOOR, OURS, USUAL, Conditions, Row, Study

CONVERSATION = "mooncake_conversation.jsonl"
TOOL_AGENT = "toolagent_reconstructed.jsonl"
INPUT_CAP = 20_480
DOCUMENT_CAP = 40_960
PAPER = "as written"
PAPER_SETTINGS = ("dualmap.both_over=least_loaded",)
PAPER_CONDITIONS: Conditions = {"hot_share": 2.0, "cold_share": 1.0}
"""DualMap as in its paper: hot above 2/n, cold below 1/n, and the less loaded when both are over."""
UNMOVED, MOVED, MOVED_ANYWHERE = "no rebalancing", "rebalancing", "rebalancing anywhere"
CACHE_AWARE = ("sticky_least_loaded.imbalance_tokens_max=147456", "sticky_least_loaded.hit_share_min=0.5")
"""After SGLang's cache-aware router: longest match of at least half of a prompt, until one instance has 32 requests
more than another (here 32 mean prompts of shared prefixes)."""


def studies(traces: Path) -> list[Study]:
    conversation = _trace(traces / CONVERSATION, 4000)
    fewer = replace(conversation, requests=3000)
    tools = _trace(traces / TOOL_AGENT, 5000)
    fewer_tools = replace(tools, requests=4000)
    return [
        *_placement(conversation, tools),
        *_admission(conversation, fewer_tools),
        *_ordering(fewer, fewer_tools),
        *_lag(conversation, fewer_tools),
        *_conditions(fewer),
        *_generated(),
        *_parts(conversation, tools),
        *_rebalancing(conversation),
        *_elasticity(tools),
        *_eviction(),
        *_fairness(),
    ]


def _rows(
    policies: Sequence[str],
    ordering: str = "fcfs",
    admission: str = "none",
    note: str = "",
    settings: Sequence[str] = (),
    **conditions: Any,
) -> list[Row]:
    return [
        Row(variant=replace(variant, note=note), conditions=conditions)
        for variant in variants(policies, (ordering,), (admission,), settings)
    ]


def _as_written(
    note: str = PAPER,
    settings: Sequence[str] = PAPER_SETTINGS,
    ordering: str = "fcfs",
    admission: str = "none",
    **conditions: Any,
) -> Row:
    (row,) = _rows(("dualmap",), ordering, admission, note, settings, **{**PAPER_CONDITIONS, **conditions})
    return row


def _everyone(ordering: str = "fcfs", admission: str = "none") -> list[Row]:
    return [*_rows(sorted(ROUTING_POLICIES), ordering, admission), _as_written(ordering=ordering, admission=admission)]


def _placement(conversation: Source, tools: Source) -> Iterable[Study]:
    everyone = _everyone()
    for source, rates, telling in (
        (conversation, (6.0, 6.5, 7.0, 7.5, 8.0), 7.0),
        (tools, (12.0, 13.0, 14.0, 16.0, 20.0), 14.0),
    ):
        yield Study(
            key=f"placement-{_short(source)}",
            title=f"Placement alone, {_called(source)}",
            about="First come, first served, no admission.",
            source=source,
            rows=everyone,
            rates=rates,
            telling=telling,
            judged="best",
            goodput=[row.variant.called for row in everyone],
            bounds=(BOUND_FCFS, BOUND),
            drawn=True,
            metrics=(*USUAL, "busiest_share"),
        )


def _admission(conversation: Source, tools: Source) -> Iterable[Study]:
    rows = [
        *_everyone(admission="predicted_ttft"),
        *_rows((OURS, "dualmap"), admission="predicted_ttft_global"),
        *_rows((OURS, "dualmap"), admission="predicted_ttft_fair"),
        *_rows((OURS,), "fair_edf", "predicted_ttft_fair"),
    ]
    for source, rates in ((conversation, (8.0, 9.5, 11.0)), (tools, (16.0, 22.0, 28.0))):
        yield Study(
            key=f"admission-{_short(source)}",
            title=f"With admission, {_called(source)}",
            about="What is predicted to be late is refused, and counts as missed.",
            source=source,
            rows=rows,
            rates=rates,
            judged="best",
            goodput=(OURS, "dualmap", f"dualmap, {PAPER}"),
            bounds=(BOUND, BOUND_WITH_FLOOR),
            metrics=(*USUAL, "rejected_share"),
        )


def _ordering(conversation: Source, tools: Source) -> Iterable[Study]:
    for source, rates in ((conversation, (8.0,)), (tools, (20.0,))):
        for admission in ("none", "predicted_ttft"):
            yield Study(
                key=f"fair-edf-{admission.replace('_', '-')}-{_short(source)}",
                title=f"Ordering fair_edf, admission {admission}, {_called(source)}",
                about="The same comparison with deadlines first. One tenant, so that fairness has no say.",
                source=source,
                rows=_everyone("fair_edf", admission),
                rates=rates,
                judged="best",
            )


def _lag(conversation: Source, tools: Source) -> Iterable[Study]:
    for source, rates in ((conversation, (5.0, 6.5)), (tools, (10.0, 13.0))):
        yield Study(
            key=f"lag-{_short(source)}",
            title=f"Knowledge half a second old, {_called(source)}",
            about="Policies see nothing of the last 0.5 s, their own dispatches included.",
            source=source,
            rows=_everyone(),
            rates=rates,
            conditions={"load_lag_s": 0.5},
            judged="near",
            goodput=(OURS, "dualmap", f"dualmap, {PAPER}"),
        )


def _conditions(conversation: Source) -> Iterable[Study]:
    for key, title, rates, conditions in (
        ("decode", "decoding shares the engine", (6.5,), {"prefill_only": False}),
        ("small-cache", "caches of 250k tokens", (6.5,), {"kv_capacity_tokens": 250_000}),
        ("wrong-estimates", "half of the estimates wrong by 50%", (7.0,), {"estimate_error": (0.5, 0.5)}),
        ("slow-instance", "one instance at half speed", (6.5,), {"slow_instances": {0: 0.5}}),
        ("late-events", "cache events 0.5 s late, 1% of them lost", (7.0,),
         {"event_delay_s": 0.5, "event_loss": 0.01}),
        ("4-instances", "4 instances", (3.0,), {"instances": 4}),
        ("16-instances", "16 instances", (15.5,), {"instances": 16}),
        ("64-instances", "64 instances", (66.0,), {"instances": 64}),
    ):  # fmt: skip
        yield Study(
            key=f"condition-{key}",
            title=f"Conversation, {title}",
            about="First come, first served, no admission.",
            source=conversation,
            rows=_everyone(),
            rates=rates,
            conditions=conditions,
            judged="near",
        )


def _generated() -> Iterable[Study]:
    for name, requests, rates in (
        ("chat", 3000, (60.0, 70.0, 80.0)),
        ("tools", 3000, (55.0, 60.0, 64.0)),
        ("gsp_half_shared", 3000, (21.0, 25.0, 28.0)),
        ("gsp_half_shared_round_robin", 3000, (21.0, 25.0, 29.0)),
        ("long_document_qa", 3000, (7.0, 11.0, 16.0)),
        ("tree_of_thoughts", 4000, (100.0, 120.0, 135.0)),
        ("llm_as_judge", 4000, (120.0, 140.0, 160.0)),
        ("two_hot_prefixes", 3000, (50.0, 60.0, 80.0)),
    ):
        yield Study(
            key=f"generated-{name.replace('_', '-')}",
            title=f"Generated workload {name}",
            about="First come, first served, no admission. The rates lead from where the best is on time to where it no longer is.",
            source=_generator(name, requests),
            rows=_everyone(),
            rates=rates,
            judged="best",
        )


def _parts(conversation: Source, tools: Source) -> Iterable[Study]:
    paired = {"rebalancing": "dualmap_pair"}
    rows = [
        *_everyone(),
        _as_written(f"{PAPER}, {MOVED}", **paired),
        *(
            _as_written(f"{PAPER}, {ablation}", (f"dualmap.ablation={ablation}",), **paired)
            for ablation in ("cache-affinity", "least-loaded", "min-ttft")
        ),
        _as_written(f"{PAPER}, hot above 1/n", hot_share=1.0, cold_share=0.5),
        *_rows(("dualmap",), note="hot above 2/n", hot_share=2.0, cold_share=1.0),
        *_rows(("dualmap",), note=MOVED, **paired),
        *_rows(("dualmap",), note=MOVED_ANYWHERE, rebalancing="global"),
    ]
    for source, rates in ((conversation, (6.0, 7.0)), (tools, (12.0, 14.0))):
        yield Study(
            key=f"dualmap-{_short(source)}",
            title=f"DualMap, its baselines and its parts, {_called(source)}",
            about=f"*{PAPER}*: to the letter of the paper. An ablation decides within the pair by one thing only.",
            source=source,
            rows=rows,
            rates=rates,
            metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s", "migrations"),
        )


def _rebalancing(conversation: Source) -> Iterable[Study]:
    rows = [
        row
        for rebalancing, note in (("off", UNMOVED), ("dualmap_pair", MOVED), ("global", MOVED_ANYWHERE))
        for row in (
            _as_written(f"{PAPER}, {note}", rebalancing=rebalancing),
            *_rows(("dualmap",), note=note, rebalancing=rebalancing),
        )
    ]
    for key, title, source, rate, conditions in (
        ("fresh", "fresh knowledge", conversation, 6.5, {}),
        ("lag", "knowledge half a second old", conversation, 6.5, {"load_lag_s": 0.5}),
        ("slow", "one instance at half speed", conversation, 6.5, {"slow_instances": {0: 0.5}}),
        ("hot", "two hot prefixes", _generator("two_hot_prefixes", 4000), 55.0, {}),
    ):
        yield Study(
            key=f"rebalancing-{key}",
            title=f"Rebalancing, {title}",
            about="Whether moving requests that wait makes up for where they were placed.",
            source=source,
            rows=rows,
            rates=(rate,),
            conditions=conditions,
            metrics=("hit_rate", "load_cv", "ttft_p90_s", "migrations"),
        )


def _elasticity(tools: Source) -> Iterable[Study]:
    yield Study(
        key="elasticity",
        title=f"A fleet that grows and shrinks, {_called(tools)}",
        about="4 instances are too few for 9/s; 2 more come after 120 s and 2 more after 180 s. After 333 s the load halves, and at 450 s and 600 s two instances leave.",
        source=replace(tools, halved_after=0.5),
        rows=[
            *_rows((OURS, "dualmap")),
            _as_written(),
            *_rows(("min_ttft", "preble", "cache_affinity", "least_loaded")),
        ],
        rates=(9.0,),
        conditions={"instances": 4, "scale_at": ((120.0, 6), (180.0, 8), (450.0, 6), (600.0, 4))},
        windows=(
            ("too few", 0.0, 120.0),
            ("growing", 120.0, 240.0),
            ("8 instances", 240.0, 333.0),
            ("half the load", 333.0, 450.0),
            ("6 instances", 450.0, 600.0),
            ("4 again", 600.0, 1000.0),
        ),
        metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s"),
        drawn=True,
    )


def _eviction() -> Iterable[Study]:
    for name, short, order in (
        ("gsp_half_shared", "random", "in random order"),
        ("gsp_half_shared_round_robin", "round-robin", "round robin"),
    ):
        for capacity in (120_000, 180_000):
            yield Study(
                key=f"eviction-{short}-{capacity // 1000}k",
                title=f"Eviction and learned routing, groups {order}, caches of {capacity // 1000}k tokens",
                about="4 instances, as in the paper; half of each prompt is shared by its group, and 128 groups take turns.",
                source=_generator(name, 3000),
                rows=[
                    row
                    for eviction in ("lru", "rlt")
                    for row in (
                        *_rows(("cache_affinity",), note=eviction, eviction=eviction),
                        *_rows(
                            ("sticky_least_loaded",),
                            note=f"cache-aware, {eviction}",
                            settings=CACHE_AWARE,
                            eviction=eviction,
                        ),
                        *_rows(("lbgr",), note=eviction, eviction=eviction),
                        *_rows((OURS,), note=eviction, eviction=eviction),
                    )
                ],
                rates=(7.5,),
                conditions={"instances": 4, "kv_capacity_tokens": capacity},
                metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
            )


def _fairness() -> Iterable[Study]:
    rows = [
        *(row for ordering in ("dlpm", "vtc", "lpm", "fcfs", "fair_edf") for row in _rows(("d2lpm",), ordering)),
        *(row for ordering in ("fair_edf", "vtc", "fcfs") for row in _rows((OURS,), ordering)),
    ]
    for name in ("llm_as_judge", "tree_of_thoughts"):
        for kind, what in (("s1", "sends eight times as many requests"), ("s2", "has prefixes four times as long")):
            yield Study(
                key=f"fairness-{name.replace('_', '-')}-{kind}",
                title=f"Fairness, {name}, {kind.upper()}",
                about=f"One of eight clients {what}; 4 instances, more load than they can serve.",
                source=_generator(f"{name}_{kind}", 3000),
                rows=rows,
                rates=(90.0,),
                conditions={"instances": 4},
                metrics=("jain", "service_per_s", "well_behaved_p90_s", "ttft_p90_s", "hit_rate"),
            )


def _trace(path: Path, requests: int) -> Source:
    return Source(trace=path, generator="", requests=requests, input_tokens_max=INPUT_CAP)


def _generator(name: str, requests: int) -> Source:
    return Source(trace=None, generator=name, requests=requests, input_tokens_max=DOCUMENT_CAP, arrivals="poisson")


def _short(source: Source) -> str:
    return "tools" if source.is_reconstruction else "conversation"


def _called(source: Source) -> str:
    return "tool-and-agent (a reconstruction)" if source.is_reconstruction else "conversation"
