"""DualMap: the figures of its paper, numbered as there. `dualmap, as written` has its rebalancing; ablations decide
within the pair by one thing, without it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pointsman_cli.simulate.experiment import Source
from pointsman_lab.results.studies.dualmap_claims import CLAIMS
from pointsman_lab.results.studies.dualmap_measurements import key_lengths, scheduler_overhead, shared_prefixes
from pointsman_lab.results.studies.rows import (
    AS_WRITTEN,
    DUALMAP_BASELINES,
    INPUT_CAP,
    PAPER,
    PAPER_SETTINGS,
    Workloads,
    as_written,
    called,
    rows,
    short,
    tuned,
)
from pointsman_lab.results.study import OURS, Measurement, Row, Study

__all__ = ["CLAIMS", "MEASUREMENTS", "studies"]

PROFILE_14B = "qwen2.5-14b-910b4"
CAP_14B = 10_240
DS = (1, 2, 3, 4)

MEASUREMENTS = (
    Measurement(key="dualmap-key-lengths", measure=key_lengths),
    Measurement(key="dualmap-shared-prefixes", measure=shared_prefixes),
    Measurement(key="dualmap-scheduler-overhead", measure=scheduler_overhead),
)


def studies(workloads: Workloads) -> Iterable[Study]:
    yield from _capacity(workloads)
    yield from _latency(workloads)
    yield _ablation(workloads)
    yield _elasticity(workloads)
    yield _scale(workloads)
    yield from _candidates(workloads)
    yield from _rebalancing(workloads)


def paper_rows() -> list[Row]:
    """DualMap and the policies that its paper compares it with."""
    return [as_written(), *rows(DUALMAP_BASELINES)]


def _capacity(workloads: Workloads) -> Iterable[Study]:
    """Figures 1, 3, 10 and 11."""
    for model, cap, conditions, per_source in (
        ("7b", INPUT_CAP, {}, ((6.0, 7.0), (12.0, 14.0))),
        ("14b", CAP_14B, {"profile": PROFILE_14B}, ((4.0, 5.0), (7.0, 9.0))),
    ):
        sources = (workloads.conversation(cap=cap), workloads.tools(cap=cap))
        for source, rates in zip(sources, per_source, strict=True):
            yield Study(
                key=f"dualmap-{model}-{short(source)}",
                title=f"DualMap, Figures 1, 3, 10 and 11: {model.upper()}, {called(source)}",
                about="Against the policies of its paper.",
                source=source,
                rows=paper_rows(),
                rates=rates,
                conditions=conditions,
                goodput=(AS_WRITTEN, *DUALMAP_BASELINES) if model == "7b" else (),
                metrics=("hit_rate", "hit_share_of_bound", "load_cv", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
            )


def _latency(workloads: Workloads) -> Iterable[Study]:
    for source, rate in ((workloads.conversation(), 3.0), (workloads.tools(), 6.0)):
        yield Study(
            key=f"dualmap-latency-{short(source)}",
            title=f"DualMap, Figure 4: TTFT and end to end, {called(source)}",
            about="Whole answers, which share the engine with prefills.",
            source=source,
            rows=paper_rows(),
            rates=(rate,),
            conditions={"prefill_only": False},
            metrics=("capacity_with_tbt", "ttft_p50_s", "ttft_p90_s", "e2e_p50_s", "e2e_p90_s"),
        )


def _ablation(workloads: Workloads) -> Study:
    source = workloads.conversation(cap=CAP_14B)
    alone = {"rebalancing": "off"}
    return Study(
        key="dualmap-ablation",
        title="DualMap, Figure 5: ablation, 14B, conversation",
        about="Within the pair by one thing only, then SLO-aware, then with rebalancing.",
        source=source,
        rows=[
            *(
                as_written(f"{PAPER}, {ablation}", (*PAPER_SETTINGS, f"dualmap.ablation={ablation}"), **alone)
                for ablation in ("cache-affinity", "least-loaded", "min-ttft")
            ),
            as_written(f"{PAPER}, no rebalancing", **alone),
            as_written(),
            tuned("dualmap"),
        ],
        rates=(4.0, 5.0),
        conditions={"profile": PROFILE_14B},
        metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
    )


def _elasticity(workloads: Workloads) -> Study:
    tools = workloads.tools(5000)
    return Study(
        key="elasticity",
        title=f"DualMap, Figure 12: a fleet that grows and shrinks, {called(tools)}",
        about="4 instances are too few for 9/s; 2 more come after 120 s and 2 more after 180 s. After 333 s the load halves, and at 450 s and 600 s two instances leave.",
        source=replace(tools, halved_after=0.5),
        rows=[*rows((OURS,)), *paper_rows()],
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
    )


def _scale(workloads: Workloads) -> Study:
    return Study(
        key="dualmap-32-instances",
        title="DualMap, Figure 13a: 32 instances, conversation",
        about="At a rate at which some are late; 8 instances are in Figure 3.",
        source=workloads.conversation(),
        rows=paper_rows(),
        rates=(27.0,),
        conditions={"instances": 32},
        metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s"),
    )


def _candidates(workloads: Workloads) -> Iterable[Study]:
    for source, rate, lag in (
        (workloads.conversation(), 6.5, 0.0),
        (workloads.tools(), 13.0, 0.0),
        (workloads.conversation(), 6.5, 0.5),
    ):
        knowledge = "stale" if lag else "fresh"
        yield Study(
            key=f"dualmap-candidates-{short(source)}-{knowledge}",
            title=f"DualMap, Figure 15: d candidates, {called(source)}, {knowledge} load",
            about="SLO-aware among d owners of the prefix on d rings, without rebalancing.",
            source=source,
            rows=[_of(count) for count in DS],
            rates=(rate,),
            conditions={"load_lag_s": lag},
            metrics=("hit_rate", "load_cv", "ttft_p50_s", "ttft_p90_s"),
        )


def _of(count: int) -> Row:
    settings = (*PAPER_SETTINGS, f"dualmap.candidates={count}")
    return as_written(f"{PAPER}, d={count}", settings, rebalancing="off")


def _rebalancing(workloads: Workloads) -> Iterable[Study]:
    for key, title, source, rate, conditions in _disturbed(workloads):
        yield Study(
            key=f"rebalancing-{key}",
            title=f"Rebalancing, {title}",
            about="Whether moving requests that wait makes up for where they were placed.",
            source=source,
            rows=[
                as_written(f"{PAPER}, no rebalancing", rebalancing="off"),
                as_written(),
                as_written(f"{PAPER}, rebalancing anywhere", rebalancing="global"),
            ],
            rates=(rate,),
            conditions=conditions,
            metrics=("hit_rate", "load_cv", "ttft_p90_s", "migrations"),
        )


def _disturbed(workloads: Workloads) -> Sequence[tuple[str, str, Source, float, dict[str, object]]]:
    conversation = workloads.conversation()
    return (
        ("fresh", "fresh knowledge", conversation, 6.5, {}),
        ("lag", "knowledge half a second old", conversation, 6.5, {"load_lag_s": 0.5}),
        ("slow", "one instance at half speed", conversation, 6.5, {"slow_instances": {0: 0.5}}),
        ("hot", "two hot prefixes", workloads.generated("two_hot_prefixes"), 55.0, {}),
    )
