"""Every rival under the live default (ordering `fair_edf`, admission `predicted_ttft_fair`) and without admission, on
every generated workload; the traces are in `ours`."""

from collections.abc import Iterable, Mapping

from pointsman_cli.simulate.experiment import Source
from pointsman_lab.results.studies.rows import AS_LIVE, LIVE_DEFAULT, Workloads, at_their_best, everyone, short
from pointsman_lab.results.study import SEEDS, USUAL, Study

GENERATED: Mapping[str, tuple[float, ...]] = {
    "chat": (80.0,),
    "tools": (70.0,),
    "gsp_half_shared": (28.0,),
    "gsp_half_shared_round_robin": (29.0,),
    "long_document_qa": (11.0, 16.0),
    "tree_of_thoughts": (135.0,),
    "llm_as_judge": (160.0,),
    "two_hot_prefixes": (80.0,),
    "agent_loops": (51.0,),
    "rag": (46.0,),
    "code_completion": (240.0,),
    "batch_classification": (500.0,),
    "mixed_day": (64.0,),
    "code_completion_few": (86.0,),
    "chat_brisk": (57.0,),
}
"""At rates at which the best is no longer on time without admission; below, the good ones are level."""

RATES_HELD_OUT: Mapping[str, tuple[float, ...]] = {
    "agent_loops_long": (32.0,),
    "rag_wide": (22.0,),
    "code_completion_team": (124.0,),
    "chat_lasting": (97.0,),
}
"""0.95 of the rate at which a central queue, first come first served with one shared cache, has nine in ten on time; no
policy had a say."""

RATES = {**GENERATED, **RATES_HELD_OUT}

IN_STEPS = ("mixed_day",)
"""Their own arrivals, scaled to the rate."""

REQUESTS = 2000
SEEDS_OF: Mapping[str, tuple[int, ...]] = {
    "batch_classification": (0,),
    "code_completion": (0,),
    "long_document_qa": tuple(range(8)),
}
"""Others than SEEDS: one for long runs; eight where a few documents decide, so that two seeds err by two points."""
SECONDS_MIN = 15.0
"""A queue that is longer than the SLO must have time to build."""


def studies(workloads: Workloads) -> Iterable[Study]:
    yield from _prefill_only(workloads)
    yield from _whole_answers(workloads)


def generated(workloads: Workloads, name: str) -> Source:
    """As long as the highest rate needs."""
    requests = max(REQUESTS, int(SECONDS_MIN * max(RATES[name])))
    return workloads.generated(name, requests, arrivals="timestamps" if name in IN_STEPS else "poisson")


def _prefill_only(workloads: Workloads) -> Iterable[Study]:
    for name, rates in RATES.items():
        source, seeds = generated(workloads, name), SEEDS_OF.get(name, SEEDS)
        slug = short(source)
        yield Study(
            key=f"generated-{slug}",
            title=f"Generated workload {name}, no admission",
            about="First come, first served, no admission, with the live rebalancing.",
            source=source,
            rows=everyone(),
            rates=rates,
            seeds=seeds,
            conditions=AS_LIVE,
            judged="best",
        )
        yield Study(
            key=f"default-{slug}",
            title=f"Generated workload {name}, live default",
            about="Ordering `fair_edf`, admission `predicted_ttft_fair`.",
            source=source,
            rows=everyone(*LIVE_DEFAULT),
            rates=rates,
            seeds=seeds,
            judged="best",
            metrics=(*USUAL, "rejected_share", "jain"),
        )


def _whole_answers(workloads: Workloads) -> Iterable[Study]:
    """TTFT alone, and TTFT and TBT both: decoding shares the engines."""
    for source, rate in (
        (workloads.conversation(1500), 3.0),
        (workloads.generated("chat", 1500), 15.0),
    ):
        for called, ordering, admission in (("alone", "fcfs", "none"), ("default", *LIVE_DEFAULT)):
            yield Study(
                key=f"answers-{called}-{short(source)}",
                title=f"Whole answers, {short(source)}, ordering {ordering}, admission {admission}",
                about="Decoding shares the engines. TBT: nine of ten gaps between tokens within 0.1 s.",
                source=source,
                rows=at_their_best(ordering, admission),
                rates=(rate,),
                conditions={**AS_LIVE, "prefill_only": False},
                judged="near",
                metrics=("capacity_with_tbt", "tpot_p90_s", "tbt_p90_s", "ttft_p99_s", "e2e_p90_s", "rejected_share"),
            )
