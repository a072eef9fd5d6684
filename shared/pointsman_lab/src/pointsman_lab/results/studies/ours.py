"""Our own policy: placement alone, with admission, under disturbed conditions, and each of its rules left out."""

from collections.abc import Iterable

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
from pointsman_lab.results.study import AT_ARRIVAL, BOUND, BOUND_FCFS, BOUND_WITH_FLOOR, OURS, USUAL, Row, Study


def studies(workloads: Workloads) -> Iterable[Study]:
    yield from _placement(workloads)
    yield from _admission(workloads)
    yield from _lag(workloads)
    yield from _conditions(workloads)
    yield from _tenants(workloads)


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
            goodput=searched(),
            bounds=(BOUND, BOUND_WITH_FLOOR, AT_ARRIVAL),
            metrics=(*USUAL, "rejected_share"),
        )


def _admitted() -> list[Row]:
    return [
        *everyone(*LIVE_DEFAULT),
        *rows((OURS, "min_ttft", "preble"), "fcfs", "predicted_ttft_global"),
        as_written(admission="predicted_ttft_global"),
    ]


def _lag(workloads: Workloads) -> Iterable[Study]:
    for source, rates in ((workloads.conversation(), (6.5,)), (workloads.tools(), (13.0,))):
        yield Study(
            key=f"lag-{short(source)}",
            title=f"Knowledge half a second old, {called(source)}",
            about="Policies see nothing of the last 0.5 s, their own dispatches included.",
            source=source,
            rows=at_their_best(),
            rates=rates,
            conditions={"load_lag_s": 0.5},
            judged="near",
            goodput=(OURS, "min_ttft", AS_WRITTEN),
        )


def _conditions(workloads: Workloads) -> Iterable[Study]:
    conversation = workloads.conversation(3000)
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
            rows=at_their_best(),
            rates=rates,
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
            source=workloads.generated(name),
            rows=[
                *rows((OURS,)),
                *rows((OURS,), "fair_edf"),
                *rows((OURS, "dualmap", "preble"), *LIVE_DEFAULT),
                *rows(("d2lpm",), "dlpm"),
            ],
            rates=(rate,),
            metrics=("jain", "jain_of_amounts", "ttft_p99_s", "late_wait_s", "service_per_s"),
        )
