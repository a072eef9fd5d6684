"""Our own policy: placement alone, with admission, under disturbed conditions, and each of its rules left out."""

from collections.abc import Iterable
from typing import Any

from pointsman_cli.simulate.experiment import Source
from pointsman_lab.results.studies.output_length_measurement import output_lengths
from pointsman_lab.results.studies.rows import (
    AS_WRITTEN,
    LIVE_DEFAULT,
    Workloads,
    as_written,
    at_their_best,
    called,
    everyone,
    rows,
    searched,
    short,
)
from pointsman_lab.results.study import (
    BOUND,
    BOUND_FCFS,
    BOUND_WITH_FLOOR,
    NO_FORESIGHT,
    OURS,
    SEEDS,
    USUAL,
    Measurement,
    Row,
    Study,
)

MEASUREMENTS = (Measurement(key="output-lengths", measure=output_lengths),)

RULES = {
    "decode cost": "decode_seconds=0",
    "wait for KV blocks": "kv_turnover=0",
    "limit of detours": "displaced_max=1000000000",
    "copies on demand": "demand_max=1000000000",
    "queue of the late": "late_queue_max_s=0",
    "limit of a tenant": "tenant_excess_max=1",
    "detours of a tenant that lacks": "tenant_lack_max=1",
    "few candidates when stale": "stale_after_s=1000000000",
}
"""Each rule of `pointsman`, and the setting that turns it off."""


def studies(workloads: Workloads) -> Iterable[Study]:
    yield from _placement(workloads)
    yield from _admission(workloads)
    yield from _lag(workloads)
    yield from _conditions(workloads)
    yield from _tenants(workloads)
    yield from _ablation(workloads)


def _placement(workloads: Workloads) -> Iterable[Study]:
    alone = [*everyone(), *rows(("least_loaded", "cache_affinity"))]
    for source, rates, telling in (
        (workloads.conversation(), (6.0, 7.0, 8.0), 7.0),
        (workloads.tools(), (12.0, 14.0, 20.0), 14.0),
    ):
        yield Study(
            key=f"placement-{short(source)}",
            title=f"Placement alone, {called(source)}",
            about="First come, first served, no admission.",
            source=source,
            rows=alone,
            rates=rates,
            telling=telling,
            judged="best",
            goodput=searched(),
            bounds=(BOUND_FCFS, BOUND),
            drawn=True,
            metrics=(*USUAL, "load_cv", "busiest_share"),
        )


def _admission(workloads: Workloads) -> Iterable[Study]:
    for source, rates in (
        (workloads.conversation(), (8.0, 9.5, 11.0)),
        (workloads.tools(), (16.0, 22.0, 28.0)),
    ):
        yield Study(
            key=f"admission-{short(source)}",
            title=f"With admission, {called(source)}",
            about="What is predicted to be late is refused, and counts as missed.",
            source=source,
            rows=_admitted(),
            rates=rates,
            judged="best",
            goodput=(OURS, "preble", AS_WRITTEN),
            bounds=(BOUND, BOUND_WITH_FLOOR, NO_FORESIGHT),
            metrics=(*USUAL, "rejected_share"),
        )


def _admitted() -> list[Row]:
    return [
        *everyone(*LIVE_DEFAULT),
        *rows((OURS, "min_ttft", "preble"), "fcfs", "predicted_ttft_global"),
        as_written(admission="predicted_ttft_global"),
    ]


def _lag(workloads: Workloads) -> Iterable[Study]:
    for source, rates in ((workloads.conversation(2500), (6.5,)), (workloads.tools(2500), (13.0,))):
        yield Study(
            key=f"lag-{short(source)}",
            title=f"Knowledge half a second old, {called(source)}",
            about="Policies see nothing of the last 0.5 s, their own dispatches included.",
            source=source,
            rows=at_their_best(),
            rates=rates,
            conditions={"load_lag_s": 0.5},
            judged="near",
        )


def _conditions(workloads: Workloads) -> Iterable[Study]:
    conversation = workloads.conversation(2000)
    for key, title, rates, conditions in (
        ("decode", "decoding shares the engine", (6.5,), {"prefill_only": False}),
        ("small-cache", "caches of 250k tokens", (6.5,), {"kv_capacity_tokens": 250_000}),
        ("wrong-estimates", "half of the estimates wrong by 50%", (7.0,), {"estimate_error": (0.5, 0.5)}),
        ("slow-instance", "one instance at half speed", (6.5,), {"slow_instances": {0: 0.5}}),
        ("late-events", "cache events 0.5 s late, 1% of them lost", (7.0,),
         {"event_delay_s": 0.5, "event_loss": 0.01}),
        ("4-instances", "4 instances", (3.0,), {"instances": 4}),
        ("64-instances", "64 instances", (66.0,), {"instances": 64}),
    ):  # fmt: skip
        yield Study(
            key=f"condition-{key}",
            title=f"Conversation, {title}",
            about="First come, first served, no admission.",
            source=conversation,
            rows=at_their_best(),
            rates=rates,
            seeds=SEEDS[:1],
            conditions=conditions,
            judged="near",
        )


def _tenants(workloads: Workloads) -> Iterable[Study]:
    """Eight clients that ask equally much, at more than can be served."""
    for name, rate in (("llm_as_judge", 220.0), ("tree_of_thoughts", 180.0)):
        yield Study(
            key=f"tenants-{name.replace('_', '-')}",
            title=f"Equal tenants past saturation, {name}",
            about="Eight clients that ask equally much; more load than 8 instances can serve.",
            source=workloads.generated(name, 8000),
            seeds=SEEDS[:1],
            rows=[
                *rows((OURS,)),
                *rows((OURS,), "fair_edf"),
                *rows((OURS, "dualmap", "preble"), *LIVE_DEFAULT),
                *rows(("d2lpm",), "dlpm"),
            ],
            rates=(rate,),
            metrics=("jain", "jain_of_amounts", "ttft_p99_s", "late_wait_s", "service_per_s"),
        )


def _ablation(workloads: Workloads) -> Iterable[Study]:
    """Each rule left out, where it should act: under load, on held-out workloads, with decoding, and with old load."""
    for source, alone, default in (
        (workloads.conversation(2500), 7.0, 9.5),
        (workloads.generated("two_hot_prefixes", 2000), 80.0, 80.0),
        (workloads.generated("llm_as_judge", 3000), 160.0, 160.0),
        (workloads.generated("agent_loops", 2000), 51.0, 51.0),
        (workloads.generated("code_completion", 3600), 240.0, 240.0),
    ):
        yield _without_rules(f"alone-{short(source)}", source, alone)
        yield _without_rules(f"default-{short(source)}", source, default, *LIVE_DEFAULT)
    for key, rate, conditions in (
        ("answers", 3.0, {"prefill_only": False}),
        ("small-kv", 2.5, {"prefill_only": False, "kv_capacity_tokens": 100_000}),
        ("old-load", 6.0, {"load_lag_s": 0.5}),
    ):
        yield _without_rules(f"alone-{key}", workloads.conversation(2500), rate, **conditions)
    one_floods, equal_tenants = (
        workloads.generated("llm_as_judge_s1", 2000),
        workloads.generated("tree_of_thoughts", 2500),
    )
    yield _without_rules("alone-one-floods", one_floods, 90.0, instances=4)
    yield _without_rules("default-one-floods", one_floods, 130.0, *LIVE_DEFAULT, instances=4)
    yield _without_rules("alone-equal-tenants", equal_tenants, 180.0)
    yield _without_rules("default-equal-tenants", equal_tenants, 180.0, *LIVE_DEFAULT)


def _without_rules(
    key: str, source: Source, rate: float, ordering: str = "fcfs", admission: str = "none", **conditions: Any
) -> Study:
    return Study(
        key=f"ablation-{key}",
        title=f"Rules of `pointsman`, {key}",
        about=f"Ordering `{ordering}`, admission `{admission}`; each row lacks one rule.",
        source=source,
        rows=[
            *rows((OURS,), ordering, admission),
            *(
                row
                for rule, setting in RULES.items()
                for row in rows((OURS,), ordering, admission, f"no {rule}", (f"{OURS}.{setting}",))
            ),
        ],
        rates=(rate,),
        conditions=conditions,
        metrics=("capacity_with_tbt", "hit_rate", "ttft_p99_s", "late_wait_s", "worst_length", "jain"),
    )
