"""Every rival under the live default (ordering `fair_edf`, admission `predicted_ttft_fair`) and without admission, on
every generated workload; the traces are in `ours`."""

from collections.abc import Iterable

from pointsman_lab.results.studies.rows import LIVE_DEFAULT, Workloads, everyone
from pointsman_lab.results.study import USUAL, Study

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

HELD_OUT: tuple[tuple[str, tuple[float, ...]], ...] = ()
"""Generators that nobody looked at while a rule or a setting of ours was chosen."""


def studies(workloads: Workloads) -> Iterable[Study]:
    for name, rates in (*GENERATED, *HELD_OUT):
        source = workloads.generated(name)
        slug = name.replace("_", "-")
        yield Study(
            key=f"generated-{slug}",
            title=f"Generated workload {name}, no admission",
            about="First come, first served, no admission.",
            source=source,
            rows=everyone(),
            rates=rates,
            judged="best",
        )
        yield Study(
            key=f"default-{slug}",
            title=f"Generated workload {name}, live default",
            about="Ordering `fair_edf`, admission `predicted_ttft_fair`.",
            source=source,
            rows=everyone(*LIVE_DEFAULT),
            rates=rates,
            judged="best",
            metrics=(*USUAL, "rejected_share"),
        )
