"""`pointsman-lab results`: the page says what the numbers say, whichever way they fall."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from pointsman_lab.main import main
from pointsman_lab.results.claims import claims_section
from pointsman_lab.results.numbers import Numbers, Point, StudyNumbers
from pointsman_lab.results.page import page
from pointsman_lab.results.studies import OURS, SEEDS, Study, studies
from pointsman_lab.results.verdict import Duel, duels, verdict_section

HERE = Path()
DOCS = Path(__file__).parents[3] / "docs"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["results", *arguments])


def study(key: str) -> Study:
    return next(one for one in studies(HERE) if one.key == key)


def numbers_of(one: Study, *, ours: float, others: float, **by_row: float) -> StudyNumbers:
    """Everybody gets `others` at every rate, but for ours and who is named."""
    points = []
    for row in one.rows:
        name = one.name(row)
        share = by_row.get(name, ours if row.variant.routing == OURS else others)
        metrics: dict[str, float] = dict.fromkeys(one.metrics, 0.5)
        points += [Point(row=name, rate=rate, capacity=[share] * len(one.seeds), metrics=metrics) for rate in one.rates]
    return StudyNumbers(seeds=list(one.seeds), points=points)


def only(one: Study, numbers: StudyNumbers) -> Numbers:
    return Numbers(taste=False, studies={one.key: numbers})


def duel_of(key: str, *, ours: float, others: float) -> Duel:
    one = study(key)
    return duels([one], only(one, numbers_of(one, ours=ours, others=others)))[0]


# --- Who wins ---


@pytest.mark.parametrize(
    ("key", "ours", "verdict", "passed"),
    [
        ("placement-conversation", 0.91, "best", True),
        ("placement-conversation", 0.9, "level", True),
        ("placement-conversation", 0.895, "within a point", False),
        ("condition-decode", 0.895, "within a point", True),
        ("condition-decode", 0.88, "**behind**", False),
    ],
)
def test_a_verdict_follows_from_the_difference_and_from_what_was_asked(
    key: str, ours: float, verdict: str, passed: bool
) -> None:
    duel = duel_of(key, ours=ours, others=0.9)

    assert (duel.verdict, duel.passed) == (verdict, passed)


def test_where_we_lose_stands_first_with_who_beat_us() -> None:
    one = study("generated-tools")
    section = verdict_section([one], only(one, numbers_of(one, ours=0.9, others=0.8, preble=0.95)))

    lost, every = section.split("Every point")
    assert f"0 of {len(one.rates)} points" in lost
    assert "5.0 points below `preble`" in lost
    assert lost.count("**behind**") == every.count("**behind**") == len(one.rates)


def test_compared_is_only_who_has_the_same_ordering_and_admission() -> None:
    one = study("admission-conversation")
    found = duels([one], only(one, numbers_of(one, ours=0.9, others=0.8)))

    assert {duel.policies for duel in found} == {
        "fcfs + predicted_ttft",
        "fcfs + predicted_ttft_global",
        "fcfs + predicted_ttft_fair",
    }


# --- What papers claim ---


@pytest.mark.parametrize(("greedy", "same"), [(0.8, "yes"), (0.95, "**no**")])
def test_a_claim_holds_or_not_as_the_numbers_are(greedy: float, same: str) -> None:
    fresh, lag = study("placement-conversation"), study("lag-conversation")
    numbers = Numbers(
        taste=False,
        studies={one.key: numbers_of(one, ours=0.99, others=0.9, min_ttft=greedy) for one in (fresh, lag)},
    )

    (line,) = (line for line in claims_section(numbers).splitlines() if "two candidates beat" in line)
    assert line.endswith(f"{same} |")


def test_claims_whose_studies_were_not_run_are_left_out() -> None:
    assert claims_section(Numbers(taste=False, studies={})) == ""


# --- The studies and the page ---


def test_rows_of_a_study_have_names_of_their_own() -> None:
    for one in studies(HERE):
        names = [one.name(row) for row in one.rows]
        assert len(set(names)) == len(names), one.key


def test_every_comparison_of_ours_has_all_policies_and_three_seeds() -> None:
    judged = [one for one in studies(HERE) if one.judged]

    assert all(tuple(one.seeds) == SEEDS and len(one.rows) >= 15 for one in judged)


def test_the_page_is_made_of_the_numbers_alone() -> None:
    every = studies(HERE)
    numbers = Numbers(taste=False, studies={one.key: numbers_of(one, ours=0.9, others=0.8) for one in every})

    text = page(every, msgspec.json.decode(msgspec.json.encode(numbers), type=Numbers))

    assert all(one.title in text for one in every)
    assert all(f"Figure {number}" in text for number in (1, 3, 4, 5, 12, 13))
    assert text == page([replace(one) for one in every], numbers)


def test_the_page_in_docs_is_what_its_numbers_give() -> None:
    content = (DOCS / "results" / "results.json").read_bytes()
    try:
        numbers = msgspec.json.decode(content, type=Numbers)
    except msgspec.ValidationError:
        pytest.skip("docs/results is of an earlier run: `make results` writes it anew")

    assert (DOCS / "results.md").read_text() == page(studies(HERE), numbers)


# --- The command ---


def test_a_part_runs_by_itself_without_traces_and_leaves_docs_alone(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"

    done = run("--traces", str(tmp_path), "--only", "rebalancing-hot", "--quick", "--jobs", "1", "--json", str(file))

    assert done.exit_code == 0, done.output
    assert "A taste only" in done.output
    assert "DualMap, Figure 13" in done.output
    assert list(json.loads(file.read_text())["studies"]) == ["rebalancing-hot"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "magic"], "no study has 'magic' in its key; there are: placement-conversation"),
        (["--only", "lag"], "has no mooncake_conversation.jsonl and no toolagent_reconstructed.jsonl"),
        (["--page", "--out", "nowhere"], "run without --page first"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_to_do(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run("--traces", str(tmp_path), *arguments)

    assert done.exit_code != 0
    assert said in " ".join(done.output.split())


def test_studies_are_named_without_running_any(tmp_path: Path) -> None:
    done = run("--traces", str(tmp_path), "--list", "--only", "fairness")

    assert done.output.count("fairness-") == 4
