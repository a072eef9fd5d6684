"""The push-based stateful router: whoever holds the longest prefix always gets the request (its Algorithm 1)."""

from collections.abc import Iterable
from functools import partial

from pointsman_lab.results.claims import Claim, Measured, gain, holds
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.studies.rows import Workloads, called, rows, short, tuned
from pointsman_lab.results.study import Study

claim = partial(Claim, paper="Push-based router")
LETTER = ("sticky_least_loaded.as_published=true",)
"""Algorithm 1: the holder of the longest prefix, however busy; without one the least loaded."""
TO_THE_LETTER = "sticky_least_loaded, to the letter"


def studies(workloads: Workloads) -> Iterable[Study]:
    for source, rate in (
        (workloads.generated("rag", 2000), 23.0),
        (workloads.generated("long_document_qa", 2000), 7.0),
        (workloads.conversation(), 6.0),
    ):
        yield Study(
            key=f"sticky-{short(source)}",
            title=f"Stickiness, {called(source)}",
            about="*To the letter*: whoever holds the longest prefix, however busy.",
            source=source,
            rows=[
                *rows(("sticky_least_loaded",), note="to the letter", settings=LETTER),
                *rows(("sticky_least_loaded",)),
                tuned("sticky_least_loaded"),
                *rows(("round_robin", "least_loaded")),
            ],
            rates=(rate,),
        )


def _over_round_robin(numbers: Numbers) -> Measured:
    found = []
    for key in ("sticky-rag", "sticky-long-document-qa"):
        means = [numbers.mean(key, row, "ttft_mean_s") for row in (TO_THE_LETTER, "round_robin")]
        found.append(1 - means[0] / means[1])
    return Measured(min(found), ", ".join(f"{-each:+.0%}" for each in found))


def _collapse(numbers: Numbers) -> Measured:
    key = "sticky-conversation"
    letter, round_robin = (numbers.mean(key, row, "capacity") for row in (TO_THE_LETTER, "round_robin"))
    return Measured(float(letter >= round_robin), f"capacity {letter:.3f} against {round_robin:.3f}")


CLAIMS = (
    claim(
        place="benchmark (RAG)",
        says="lower mean TTFT than round robin on questions about shared documents",
        reported="lower",
        conditions="`rag` at 23/s and `long_document_qa` at 7/s; the paper's models and hardware are others.",
        measure=_over_round_robin,
        rule=gain(0.05),
        why="The holder of a popular document is asked by everybody, however long its queue.",
    ),
    claim(
        place="Algorithm 1",
        says="the holder of the longest prefix is right however busy it is",
        reported="no number",
        conditions="Conversation at 6/s, against round robin.",
        measure=_collapse,
        rule=holds,
        why="Conversations share a system prompt, so that one holder gets all of them. Our default leaves a holder that is "
        "too busy.",
    ),
    claim(
        place="consistency",
        says="a lost event is healed by the next snapshot",
        reported="within 5 s",
        conditions="Digests in each report and snapshots on doubt.",
        why="It needs processes: tests/integration has it, and the console shows it.",
    ),
)
