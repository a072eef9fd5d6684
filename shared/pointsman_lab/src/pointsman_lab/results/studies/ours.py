"""Our own policy: placement alone, with admission, under disturbed conditions, and each of its rules left out."""

from collections.abc import Iterable, Sequence
from typing import Any

from pointsman_cli.simulate.experiment import Source
from pointsman_lab.results.studies.output_length_measurement import output_lengths
from pointsman_lab.results.studies.rows import (
    AS_LIVE,
    AS_WRITTEN,
    LIVE_DEFAULT,
    Workloads,
    at_their_best,
    called,
    everyone,
    rows,
    short,
    tuned,
)
from pointsman_lab.results.study import OURS, SEEDS, USUAL, Measurement, Study

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
    yield from _conditions(workloads)
    yield _tenants(workloads)
    yield from _ablation(workloads)


def _placement(workloads: Workloads) -> Iterable[Study]:
    for source, rates in ((workloads.conversation(), (6.0, 7.0)), (workloads.tools(), (12.0, 14.0))):
        yield Study(
            key=f"placement-{short(source)}",
            title=f"Placement alone, {called(source)}",
            about="First come, first served, no admission, with the live rebalancing.",
            source=source,
            rows=everyone(),
            rates=rates,
            conditions=AS_LIVE,
            judged="best",
            goodput=(OURS, AS_WRITTEN),
        )


def _admission(workloads: Workloads) -> Iterable[Study]:
    for source, rates in ((workloads.conversation(), (8.0, 9.5)), (workloads.tools(), (16.0, 22.0))):
        yield Study(
            key=f"admission-{short(source)}",
            title=f"With admission, {called(source)}",
            about="What is predicted to be late is refused, and counts as missed.",
            source=source,
            rows=everyone(*LIVE_DEFAULT),
            rates=rates,
            seeds=SEEDS,
            judged="best",
            goodput=(OURS, AS_WRITTEN),
            metrics=(*USUAL, "rejected_share"),
        )


def _conditions(workloads: Workloads) -> Iterable[Study]:
    conversation = workloads.conversation(1500)
    for key, title, rate, conditions in (
        ("lag", "knowledge half a second old", 6.5, {"load_lag_s": 0.5}),
        ("small-cache", "caches of 250k tokens", 6.5, {"kv_capacity_tokens": 250_000}),
        ("wrong-costs", "a cost function that is wrong by 50% for every prompt", 7.0, {"estimate_error": (1.0, 0.5)}),
        ("slow-instance", "one instance at half speed", 6.5, {"slow_instances": {0: 0.5}}),
        ("late-events", "cache events 0.5 s late, 1% of them lost", 7.0, {"event_delay_s": 0.5, "event_loss": 0.01}),
        ("4-instances", "4 instances", 3.0, {"instances": 4}),
        ("64-instances", "64 instances", 66.0, {"instances": 64}),
    ):
        yield Study(
            key=f"condition-{key}",
            title=f"Conversation, {title}",
            about="First come, first served, no admission, with the live rebalancing.",
            source=conversation,
            rows=at_their_best(),
            rates=(rate,),
            conditions={**AS_LIVE, **conditions},
            judged="near",
        )


def _tenants(workloads: Workloads) -> Study:
    return Study(
        key="tenants-llm-as-judge",
        title="Equal tenants past saturation, llm_as_judge",
        about="Eight clients that ask equally much; more load than 8 instances can serve.",
        source=workloads.generated("llm_as_judge", 4000),
        rows=[
            *rows((OURS,)),
            *rows((OURS,), "fair_edf"),
            *rows((OURS, "preble"), *LIVE_DEFAULT),
            tuned("dualmap", *LIVE_DEFAULT),
            tuned("d2lpm", "dlpm"),
        ],
        rates=(220.0,),
        conditions=AS_LIVE,
        metrics=("jain", "jain_of_amounts", "ttft_p99_s", "late_wait_s", "service_per_s"),
    )


def _ablation(workloads: Workloads) -> Iterable[Study]:
    """Each rule left out, where it should act: under load, with hot prefixes, with decoding, with old load, and among
    tenants."""
    conversation, short_conversation = workloads.conversation(2000), workloads.conversation(1500)
    code_completion = workloads.generated("code_completion", 3600)
    floods = workloads.generated("llm_as_judge_s1", 2000)
    yield _without_rules("alone-conversation", conversation, 7.0)
    yield _without_rules("default-two-hot-prefixes", workloads.generated("two_hot_prefixes", 2000), 80.0, *LIVE_DEFAULT)
    yield _without_rules("alone-code-completion", code_completion, 240.0)
    yield _without_rules("default-code-completion", code_completion, 240.0, *LIVE_DEFAULT)
    yield _without_rules("alone-answers", short_conversation, 3.0, prefill_only=False)
    yield _without_rules("default-answers", short_conversation, 3.0, *LIVE_DEFAULT, prefill_only=False)
    yield _without_rules("alone-small-kv", short_conversation, 2.5, prefill_only=False, kv_capacity_tokens=100_000)
    yield _without_rules(
        "default-small-kv", short_conversation, 2.5, *LIVE_DEFAULT, prefill_only=False, kv_capacity_tokens=100_000
    )
    yield _without_rules("alone-old-load", short_conversation, 6.0, load_lag_s=0.5)
    yield _without_rules("alone-one-floods", floods, 90.0, instances=4)
    yield _without_rules("default-one-floods", floods, 130.0, *LIVE_DEFAULT, instances=4)
    unseen = workloads.generated("code_completion_team", 2000)
    yield _without_rules("alone-code-completion-team", unseen, 124.0)
    yield _without_rules("default-code-completion-team", unseen, 124.0, *LIVE_DEFAULT)
    trees = workloads.generated("tree_of_thoughts", 6000)
    yield _without_rules("alone-equal-tenants", trees, 180.0, "fair_edf", seeds=(0, 1, 2, 3))


def _without_rules(
    key: str,
    source: Source,
    rate: float,
    ordering: str = "fcfs",
    admission: str = "none",
    *,
    seeds: Sequence[int] = SEEDS[:1],
    **conditions: Any,
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
        seeds=seeds,
        conditions={**AS_LIVE, **conditions},
        metrics=("capacity_with_tbt", "hit_rate", "ttft_p99_s", "late_wait_s", "worst_length", "jain"),
    )
