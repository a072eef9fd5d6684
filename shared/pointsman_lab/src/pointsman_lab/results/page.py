"""The page: what was asked first, then the papers' figures and claims, then every table."""

from collections.abc import Sequence

from pointsman_lab.results.claims import claims_section
from pointsman_lab.results.figures import figures_section
from pointsman_lab.results.markdown import study_section
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.studies import Study
from pointsman_lab.results.verdict import verdict_section

INTRODUCTION = """# Results

Made by one command, `make results`, on a machine with two cores. Every number, every picture and every sentence that
judges comes from that run, in virtual time, deterministic for its seeds; [results.json](results/results.json) holds what
the page is made from. Effective capacity is the share of all requests whose first token met the objective of 5 s; refused
ones count as missed. Goodput is the highest rate at which it stays at 90% or above. Hit rates are token-weighted and
reported by the engine model. Unless a study says otherwise: 8 instances, prefill-bound engines, first come first served,
no admission, the first 500 requests as warm-up, means over three seeds.

The *conversation* trace is the one published with Mooncake (4,000 requests, 3,000 in some studies, input capped at
20,480 tokens). The *tool-and-agent* trace is **a reconstruction, not the published one** (5,000 requests, 4,000 in some
studies): conversation rows with two hot tool prefixes in the shares that DualMap's Figure 6 gives. Arrivals are spread
inside the traces' 3-second buckets by seed and scaled to a rate; those of generated workloads are Poisson. Nothing is
tuned per trace, rate or workload.

`dualmap` keeps affinity where both candidates would be late and calls a prefix hot above 1/n of the traffic;
`dualmap, as written` is the paper's text: then to the less loaded, and hot above 2/n.
"""

TASTE = """
> **A taste only**: one seed, few requests, some rates. These numbers mean little.
"""


def page(studies: Sequence[Study], numbers: Numbers) -> str:
    """All of it in Markdown, of the studies that were run."""
    shown = [study for study in studies if study.key in numbers.studies]
    parts = [
        INTRODUCTION + (TASTE if numbers.taste else ""),
        verdict_section(shown, numbers),
        claims_section(numbers),
        figures_section(numbers, shown),
        "## Every table\n",
        *(study_section(study, numbers.studies[study.key]) for study in shown),
    ]
    return "\n".join(part for part in parts if part)
