"""Every rival under the live default (ordering `fair_edf`, admission `predicted_ttft_fair`) and without admission, on
every generated workload; the traces are in `ours`."""

from collections.abc import Iterable, Mapping

from pointsman.simulation.workload import HELD_OUT
from pointsman_lab.results.studies.rows import LIVE_DEFAULT, Workloads, at_their_best, everyone, short
from pointsman_lab.results.study import AT_ARRIVAL, BOUND, USUAL, Study

GENERATED: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("chat", (60.0, 80.0)),
    ("tools", (55.0, 70.0)),
    ("gsp_half_shared", (21.0, 28.0)),
    ("gsp_half_shared_round_robin", (21.0, 29.0)),
    ("long_document_qa", (7.0, 16.0)),
    ("tree_of_thoughts", (100.0, 135.0)),
    ("llm_as_judge", (120.0, 160.0)),
    ("two_hot_prefixes", (50.0, 80.0)),
)
"""The rates lead from where the best is on time without admission to where it no longer is."""

RATES_HELD_OUT: Mapping[str, tuple[float, ...]] = {
    "agent_loops": (14.0, 18.0),
    "rag": (23.0, 30.0),
    "code_completion": (39.0, 51.0),
    "batch_classification": (123.0, 160.0),
    "mixed_day": (28.0, 36.0),
}
"""Generators that nobody looked at while a rule or a setting of ours was chosen. The rates: where `least_loaded` begins
to miss, without admission, and 1.3 times that."""

IN_STEPS = ("mixed_day",)
"""Their own arrivals, scaled to the rate."""

REQUESTS = 2000


def studies(workloads: Workloads) -> Iterable[Study]:
    yield from _prefill_only(workloads)
    yield from _whole_answers(workloads)


def _prefill_only(workloads: Workloads) -> Iterable[Study]:
    for name, rates in (*GENERATED, *((name, RATES_HELD_OUT[name]) for name in HELD_OUT)):
        source = workloads.generated(name, REQUESTS, arrivals="timestamps" if name in IN_STEPS else "poisson")
        slug = short(source)
        yield Study(
            key=f"generated-{slug}",
            title=f"Generated workload {name}, no admission",
            about="First come, first served, no admission.",
            source=source,
            rows=everyone(),
            rates=rates,
            judged="best",
            bounds=(BOUND, AT_ARRIVAL),
        )
        yield Study(
            key=f"default-{slug}",
            title=f"Generated workload {name}, live default",
            about="Ordering `fair_edf`, admission `predicted_ttft_fair`.",
            source=source,
            rows=everyone(*LIVE_DEFAULT),
            rates=rates,
            judged="best",
            metrics=(*USUAL, "rejected_share", "jain"),
        )


def _whole_answers(workloads: Workloads) -> Iterable[Study]:
    """TTFT alone, and TTFT and TBT both: decoding shares the engines."""
    for source, rate in (
        (workloads.conversation(2000), 5.5),
        (workloads.tools(2000), 10.0),
        (workloads.generated("chat", 2000), 40.0),
        (workloads.generated("rag", 2000), 17.0),
        (workloads.generated("agent_loops", 2000), 11.0),
    ):
        for called, ordering, admission in (("alone", "fcfs", "none"), ("default", *LIVE_DEFAULT)):
            yield Study(
                key=f"answers-{called}-{short(source)}",
                title=f"Whole answers, {short(source)}, ordering {ordering}, admission {admission}",
                about="Decoding shares the engines. TBT: nine of ten gaps between tokens within 0.1 s.",
                source=source,
                rows=at_their_best(ordering, admission),
                rates=(rate,),
                conditions={"prefill_only": False},
                judged="near",
                metrics=("capacity_with_tbt", "tpot_p90_s", "tbt_p90_s", "ttft_p99_s", "e2e_p90_s", "rejected_share"),
            )
