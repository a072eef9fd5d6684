"""`pointsman-lab results`: the page says what the numbers say, whichever way they fall."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pointsman.policies.rebalancing import DEFAULT_REBALANCING
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman_lab.main import main
from pointsman_lab.results.claims import (
    VERDICTS,
    Claim,
    Judged,
    Measured,
    Rule,
    claim_table,
    condition_list,
    gain,
    holds,
    judged,
    near,
    share_true,
    times,
)
from pointsman_lab.results.compare import ablation_table, duels_of, tally
from pointsman_lab.results.gap import gap_summary, gaps, is_bound
from pointsman_lab.results.numbers import METRICS, Numbers, Point, StudyNumbers
from pointsman_lab.results.page import Figures, page
from pointsman_lab.results.runs import run_studies
from pointsman_lab.results.studies import CLAIMS, measurements, studies
from pointsman_lab.results.studies.gap import DEFAULT_ROW, ONE_CACHE_ROW
from pointsman_lab.results.studies.rows import AS_WRITTEN, LIVE_DEFAULT, LOAD_BLIND, ONLY_TUNED, TUNED, everyone
from pointsman_lab.results.study import OURS, Measurement, Study, shortened
from pointsman_lab.results.tables import study_section
from pointsman_lab.results.verdict import Duel, duels

HERE = Path()
DOCS = Path(__file__).parents[3] / "docs"
EARLIER = "docs/results is of an earlier run: `make results` writes it anew"


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
        metrics: dict[str, float] = dict.fromkeys(METRICS, 0.5)
        points += [
            Point(
                row=name,
                rate=rate,
                capacity=[share] * len(one.seeds),
                metrics=metrics,
                windows=[share] * len(one.windows),
            )
            for rate in one.rates
        ]
    searched = {one.name(row): [1.0] for row in one.rows if row.variant.called in one.goodput}
    return StudyNumbers(
        seeds=list(one.seeds),
        points=points,
        goodput=searched,
        bounds={bound: [0.95] * len(one.rates) for bound in one.bounds},
        bound_hits={bound: [0.5] * len(one.rates) for bound in one.bounds},
    )


class AnyNumber(dict[str, float]):
    """A measurement's names are known only after it ran."""

    def __missing__(self, key: str) -> float:
        return 0.5


def planted(*, ours: float, others: float) -> Numbers:
    return Numbers(
        taste=False,
        studies={one.key: numbers_of(one, ours=ours, others=others) for one in studies(HERE)},
        measurements={one.key: AnyNumber() for one in measurements()},
    )


def only(one: Study, numbers: StudyNumbers) -> Numbers:
    return Numbers(taste=False, studies={one.key: numbers})


def duel_of(key: str, *, ours: float, others: float) -> Duel:
    one = study(key)
    return duels([one], only(one, numbers_of(one, ours=ours, others=others)))[0]


# --- Who wins ---


@pytest.mark.parametrize(
    ("ours", "verdict"), [(0.91, "best"), (0.9, "level"), (0.895, "within a point"), (0.88, "**behind**")]
)
def test_a_verdict_follows_from_the_difference(ours: float, verdict: str) -> None:
    assert duel_of("placement-conversation", ours=ours, others=0.9).verdict == verdict


def test_a_duel_names_who_beat_us() -> None:
    one = study("generated-tools")
    found = duels([one], only(one, numbers_of(one, ours=0.9, others=0.8, preble=0.95)))

    assert [(duel.best, round(duel.points, 1), duel.verdict) for duel in found] == [
        ("preble", -5.0, "**behind**")
    ] * len(one.rates)


def test_compared_is_only_who_has_the_same_ordering_and_admission() -> None:
    live, alone = everyone(*LIVE_DEFAULT), everyone()
    one = replace(study("admission-conversation"), rows=[*live, *alone])
    better = f"preble + {' + '.join(LIVE_DEFAULT)}"
    found = duels([one], only(one, numbers_of(one, ours=0.9, others=0.8, **{better: 0.95})))

    assert {(duel.policies, duel.theirs) for duel in found} == {
        ("fair_edf + predicted_ttft_fair", 0.95),
        ("fcfs + none", 0.8),
    }


def test_all_rows_of_a_comparison_have_the_same_seeds() -> None:
    for one in studies(HERE):
        seeds: dict[tuple[str, float], list[int]] = {}
        for cell in one.cells():
            seeds.setdefault((cell.variant.key, cell.qps), []).append(cell.scenario.seed)
        assert {*map(tuple, seeds.values())} == {tuple(one.seeds)}, one.key


def test_numbers_of_different_seeds_are_not_compared() -> None:
    one = study("default-chat")
    numbers = numbers_of(one, ours=0.9, others=0.8)
    numbers.points[0].capacity = [0.9]

    with pytest.raises(ValueError, match="zip"):
        duels([one], only(one, numbers))


def test_waiting_requests_of_all_rivals_move_alike_and_those_of_dualmap_by_its_own_rule() -> None:
    for one in studies(HERE):
        for row in one.rows if one.judged else ():
            own = "dualmap_pair" if row.variant.routing == "dualmap" else DEFAULT_REBALANCING
            assert one.scenario(row, 0).rebalancing == own, (one.key, one.name(row))


def test_several_seeds_have_the_tables_that_the_page_says() -> None:
    two = {one.key for one in studies(HERE) if len(one.seeds) == 2}
    generated = {one.key for one in studies(HERE) if one.key.startswith(("generated-", "default-"))}
    long = {key for key in generated if key.endswith(("-batch-classification", "-code-completion"))}

    assert {one.key: len(one.seeds) for one in studies(HERE) if len(one.seeds) > 2} == {
        "ablation-alone-equal-tenants": 4,
        "generated-long-document-qa": 8,
        "default-long-document-qa": 8,
    }
    documents = {key for key in generated if key.endswith("-long-document-qa")}
    assert two == generated - long - documents | {
        "admission-conversation",
        "admission-tools",
        "copies-two-hot-prefixes",
        "copies-two-hot-prefixes-default",
    }


# --- Verdicts on the papers' claims ---


def claim(*, value: float = 0.0, rule: Rule | None = None, tested: bool = True) -> Claim:
    return Claim(
        paper="Paper",
        place="Figure 1",
        says="more is served",
        reported="as much",
        conditions="Eight engines.",
        measure=(lambda _: Measured(value, f"{value:g}")) if tested else None,
        rule=rule,
        why="Other engines.",
    )


NOTHING = Numbers(taste=False, studies={})


@pytest.mark.parametrize(
    ("rule", "value", "verdict"),
    [
        (gain(0.4), 0.45, "reproduced"),
        (gain(0.4), 0.31, "reproduced"),
        (gain(0.4), 0.29, "direction only"),
        (gain(0.4), 0.01, "not reproduced"),
        (gain(0.4), -0.5, "not reproduced"),
        (times(2.25), 2.3, "reproduced"),
        (times(2.25), 1.3, "direction only"),
        (times(2.25), 1.0, "not reproduced"),
        (times(2.25), 0.4, "not reproduced"),
        (near(0.45, within=0.1, direction=0.2), 0.36, "reproduced"),
        (near(0.45, within=0.1, direction=0.2), 0.62, "direction only"),
        (near(0.45, within=0.1, direction=0.2), 0.1, "not reproduced"),
        (holds, 1.0, "reproduced"),
        (holds, 2 / 3, "direction only"),
        (holds, 0.66, "not reproduced"),
        (holds, 0.5, "not reproduced"),
    ],
)
def test_a_verdict_follows_from_the_number(rule: Rule, value: float, verdict: str) -> None:
    assert judged(claim(value=value, rule=rule), NOTHING).verdict == verdict


def test_a_statement_that_fails_at_one_of_the_rates_is_not_true_in_most_cases() -> None:
    assert share_true([True, True, True, False]) == 0.75
    assert share_true([True, True, True], [False, False, True]) == pytest.approx(1 / 3)


def test_candidates_are_judged_in_every_study() -> None:
    claims = [one for one in CLAIMS if one.place == "Figure 15" and one.paper == "DualMap"]
    numbers = planted(ours=0.9, others=0.8)
    for name in ("conversation-fresh", "tools-fresh"):
        key = f"dualmap-candidates-{name}"
        numbers.studies[key] = numbers_of(study(key), ours=0.9, others=0.6, **{"dualmap, as written, d=1": 0.4})
    assert [judged(one, numbers).verdict for one in claims] == ["reproduced"]

    key = "dualmap-candidates-tools-fresh"
    numbers.studies[key] = numbers_of(study(key), ours=0.9, others=0.6, **{"dualmap, as written, d=1": 0.7})

    assert [judged(one, numbers).verdict for one in claims] == ["not reproduced"]


def test_what_is_not_the_papers_load_makes_no_claim_about_lbgr() -> None:
    numbers, other = planted(ours=0.9, others=0.8), planted(ours=0.9, others=0.8)
    for point in other.studies["lbgr-in-turn"].points:
        point.metrics = dict.fromkeys(point.metrics, 0.1 if "rlt" in point.row else 100.0)
    about_lbgr = [one for one in CLAIMS if "LBGR with" in one.says]

    assert len(about_lbgr) == 6
    for one in about_lbgr:
        assert judged(one, numbers) == judged(one, other)


def test_a_load_that_one_policy_serves_says_nothing_about_fairness() -> None:
    numbers = planted(ours=0.9, others=0.8)
    key = "fairness-long-document-qa-s1"
    for point in numbers.studies[key].points:
        point.metrics = dict.fromkeys(point.metrics, 0.9 if "dlpm" in point.row else 0.1)
    (more,) = [one for one in CLAIMS if one.says == "more throughput than VTC"]
    assert "9.00 times" in judged(more, numbers).measured

    for point in numbers.studies[key].points:
        point.capacity = [0.95 if point.row == "preble + lpm" else 0.5]

    assert "1.00 times" in judged(more, numbers).measured


def test_a_saving_is_printed_as_the_paper_prints_it() -> None:
    numbers = planted(ours=0.9, others=0.8)
    for workload in ("conversation", "tools"):
        for point in numbers.studies[f"fetches-{workload}"].points:
            point.metrics = {**point.metrics, "ttft_mean_s": 0.75 if "direct, 10 GB/s" in point.row else 1.0}
    (saved,) = [one for one in CLAIMS if one.paper == "Mooncake, transfers" and one.reported == "-14%"]

    found = judged(saved, numbers)

    assert found.measured == "conversation 4/s: -25%, conversation 5/s: -25%, tools 8/s: -25%, tools 10/s: -25%"
    assert found.verdict == "reproduced"


def test_a_reason_is_told_unless_the_claim_is_reproduced() -> None:
    reached = judged(claim(value=0.4, rule=gain(0.4)), NOTHING)
    missed = judged(claim(value=0.0, rule=gain(0.4)), NOTHING)
    untested = judged(claim(tested=False), NOTHING)

    assert (reached.why, missed.why, untested.why) == ("", "Other engines.", "Other engines.")
    assert untested.verdict == "not testable here"
    assert "**not reproduced**" in claim_table([missed])
    assert "**" not in claim_table([reached])


def test_conditions_are_listed_for_each_claim_and_a_reason_once() -> None:
    missed = [judged(claim(value=0.0, rule=gain(0.4)), NOTHING) for _ in range(2)]
    second = Judged(replace(missed[1].claim, place="Figure 2"), missed[1].measured, missed[1].verdict)

    first_line, second_line = condition_list([missed[0], second]).splitlines()
    assert first_line == "- Figure 1, more is served: Eight engines. *Not reproduced*: Other engines."
    assert second_line == "- Figure 2, more is served: Eight engines. *Not reproduced*: as for Figure 1."


def test_every_claim_has_a_number_or_says_why_not() -> None:
    for one in CLAIMS:
        assert one.reported, one
        assert one.conditions, one
        if one.measure is None:
            assert one.rule is None, one
            assert one.why, one
        else:
            assert one.rule is not None, one


def test_a_claim_without_its_study_is_an_error_and_not_a_verdict() -> None:
    for one in CLAIMS:
        if one.measure is not None:
            with pytest.raises(KeyError):
                judged(one, NOTHING)


def test_every_claim_is_measured_in_a_study_that_exists() -> None:
    numbers = planted(ours=0.9, others=0.8)

    assert {judged(one, numbers).verdict for one in CLAIMS} <= set(VERDICTS)


# --- The studies and the page ---


def test_rows_of_a_study_have_names_of_their_own() -> None:
    for one in studies(HERE):
        names = [one.name(row) for row in one.rows]
        assert len(set(names)) == len(names), one.key


def test_every_comparison_of_ours_has_all_rivals_and_the_tuned_ones() -> None:
    judged_ones = [one for one in studies(HERE) if one.judged]
    better = {*ROUTING_POLICIES} - {*LOAD_BLIND} - {*TUNED} | {AS_WRITTEN, *(f"{name}, tuned" for name in TUNED)}

    assert judged_ones
    for one in judged_ones:
        named = better if one.judged == "near" else better | {*TUNED} - {*ONLY_TUNED}
        assert named <= {row.variant.called for row in one.rows}, one.key


@pytest.mark.parametrize(("ours", "level", "points"), [(0.9, 1.0, 10.0), (0.8, 1.0, 0.0), (0.79, 0.0, -1.0)])
@pytest.mark.parametrize("admission", [True, False])
def test_the_summary_counts_where_ours_is_best_or_level(
    ours: float, level: float, points: float, admission: bool
) -> None:
    found = duels_of(duels(studies(HERE), planted(ours=ours, others=0.8)), admission=admission)
    counted = tally(found)

    assert {duel.study.partition("-")[0] for duel in found} == (
        {"admission", "default"} if admission else {"placement", "generated"}
    )
    assert counted.level == level * counted.duels
    assert round(counted.worst.points, 6) == points


def test_held_out_workloads_are_counted_by_themselves() -> None:
    every = studies(HERE)
    numbers = planted(ours=0.9, others=0.8)
    for key in ("generated-rag-wide", "default-rag-wide"):
        numbers.studies[key] = numbers_of(study(key), ours=0.7, others=0.8)
    figures = Figures(every, numbers)

    text = "-10.0 ± 0.0 (rag-wide"
    for admission in (True, False):
        assert text in figures.tally(admission=admission, held_out=True)
        assert "-10.0" not in figures.tally(admission=admission, held_out=False)
        assert text in figures.tally(admission=admission)


def test_a_loss_within_the_spread_of_its_seeds_is_not_counted_as_behind() -> None:
    numbers = planted(ours=0.9, others=0.8)
    for key, ours in (("default-rag", [0.66, 0.84]), ("default-chat", [0.74, 0.76])):
        found = numbers.studies[key] = numbers_of(study(key), ours=0.75, others=0.8)
        for point in found.points:
            ahead = point.row.startswith("pointsman")
            point.capacity = ours if ahead else [0.8, 0.8]

    told = Figures(studies(HERE), numbers).tally(admission=True)

    assert "behind by more than a point and twice the standard error at 1;" in told  # chat: -5 ± 1; rag: -5 ± 9


def test_a_rule_left_out_is_shown_in_points_against_the_whole() -> None:
    key = "ablation-alone-conversation"
    one = study(key)
    without = one.name(one.rows[1])
    table = ablation_table(only(one, numbers_of(one, ours=0.9, others=0.9, **{without: 0.85})))

    assert table.splitlines()[-1].startswith("| alone-conversation | 7/s | 0.900 | -5.0 | +0.0 |")


def test_a_bound_is_compared_with_the_runs_of_its_own_seeds() -> None:
    numbers = planted(ours=0.9, others=0.8)
    for point in numbers.studies["default-chat"].points:
        point.capacity = [0.9, 1.0]

    assert {gap.best_of_all for gap in gaps(numbers) if gap.workload == "chat"} == {0.9}


def test_a_policy_above_the_bound_is_counted() -> None:
    below, above = gaps(planted(ours=0.9, others=0.8)), gaps(planted(ours=0.96, others=0.8))

    assert below
    assert is_bound(below) == (len(below), len(below))
    assert is_bound(above) == (0, len(above))
    assert {round(gap.ours / gap.bound, 3) for gap in below} == {0.947}


def test_the_steps_from_the_bound_to_ours_add_up_and_the_dearest_is_named() -> None:
    numbers = planted(ours=0.9, others=0.8)
    key = "gap-long-document-qa"
    numbers.studies[key] = numbers_of(study(key), ours=0.9, others=0.8, **{ONE_CACHE_ROW: 0.94, DEFAULT_ROW: 0.87})

    (gap,) = [one for one in gaps(numbers) if one.workload == "long-document-qa"]

    assert [round(points, 6) for points in gap.steps.values()] == [0.0, 1.0, 4.0, 3.0]
    assert round(sum(gap.steps.values()), 6) == 8.0
    assert round(gap.late, 6) == 0.0, "half are refused, and 0.87 on time"
    assert gap_summary([gap]) == (
        "0 of 1 workloads reach 0.97 of the central queue; least 0.92 (long-document-qa). "
        "What costs most where it is missed: eight caches (1)."
    )


def test_what_floors_gain_is_no_cost_of_eight_queues() -> None:
    numbers = planted(ours=0.9, others=0.8)
    key = "gap-long-document-qa"
    numbers.studies[key] = numbers_of(study(key), ours=0.8, others=0.8, **{ONE_CACHE_ROW: 0.85, DEFAULT_ROW: 0.88})

    (gap,) = [one for one in gaps(numbers) if one.workload == "long-document-qa"]

    assert [round(points, 6) for points in gap.steps.values()] == [0.0, 10.0, 5.0, -8.0]
    assert gap.dearest == "eight caches"


def test_the_trace_and_the_generator_of_one_name_are_two_workloads() -> None:
    workloads = [gap.workload for gap in gaps(planted(ours=0.9, others=0.8))]

    assert len(set(workloads)) == len(workloads)
    assert {"tools", "tools (trace)"} <= set(workloads)


def test_keys_of_studies_are_their_own() -> None:
    keys = [one.key for one in studies(HERE)] + [one.key for one in measurements()]

    assert len(set(keys)) == len(keys)


def test_dualmap_as_written_has_the_rebalancing_of_its_paper() -> None:
    written = [(one, row) for one in studies(HERE) for row in one.rows if row.variant.called == AS_WRITTEN]

    assert written
    for one, row in written:
        assert one.scenario(row, 0).rebalancing == "dualmap_pair", one.key


def test_the_page_is_made_of_the_numbers_alone() -> None:
    every = studies(HERE)
    numbers = planted(ours=0.9, others=0.8)

    text = page(every, numbers)

    assert all(one.title in study_section(one, numbers) for one in every)
    assert text == page([replace(one) for one in every], numbers)
    assert text != page(every, planted(ours=0.7, others=0.8))


def test_where_tbt_counts_too_the_worst_is_told() -> None:
    one = study("answers-alone-chat")
    numbers = only(one, numbers_of(one, ours=0.9, others=0.9))
    (ours,) = [point for point in numbers.studies[one.key].points if point.row == OURS]
    assert Figures([one], numbers).with_tbt().startswith("best or level at 1 of 1")

    ours.metrics["capacity_with_tbt"] = 0.4

    assert "at 0 of 1 points; the worst is -10.0 (alone-chat, " in Figures([one], numbers).with_tbt()


def test_beside_each_capacity_stand_the_p99_and_how_long_late_requests_wait() -> None:
    text = page(studies(HERE), planted(ours=0.9, others=0.8))
    heads = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| policy")]
    counts = [
        [sum(title.endswith(what) for title in head) for what in ("capacity", "P99", "late ones wait")]
        for head in heads
    ]

    assert all(capacity <= min(p99, waits) for capacity, p99, waits in counts)
    assert sum(capacity for capacity, *_ in counts) > 20


def test_headings_and_tables_of_the_page_stand_apart() -> None:
    lines = page(studies(HERE), planted(ours=0.9, others=0.8)).splitlines()

    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        assert line == line.rstrip()
        assert line or after, f"two empty lines after: {before}"
        if line.startswith("#"):
            assert not before, line
            assert not after, line
        if line.startswith("|"):
            assert before.startswith("|") or not before, line


def numbers_in_docs() -> Numbers:
    """Skips if they are of an earlier run, which had other studies or rows."""
    content = (DOCS / "results" / "results.json").read_bytes()
    try:
        numbers = msgspec.json.decode(content, type=Numbers)
    except msgspec.ValidationError:
        pytest.skip(EARLIER)
    if any(
        one.key not in numbers.studies or not {*map(one.name, one.rows)} <= {*numbers.studies[one.key].rows()}
        for one in studies(HERE)
    ):
        pytest.skip(EARLIER)
    return numbers


def test_the_page_in_docs_is_what_its_numbers_give() -> None:
    numbers = numbers_in_docs()

    assert (DOCS / "results.md").read_text() == page(studies(HERE), numbers)
    for one in studies(HERE):
        found = numbers.studies[one.key]
        assert (found.seeds, {*found.rates()}) == ([*one.seeds], {*one.rates}), one.key


# --- The command ---


def test_a_part_runs_by_itself_without_traces_and_leaves_docs_alone(tmp_path: Path) -> None:
    done = run("--traces", str(tmp_path), "--only", "rebalancing-hot", "--quick", "--out", str(tmp_path))

    assert done.exit_code == 0, done.output
    assert "A taste only" in done.output
    assert done.output.count("### ") == 1
    assert "### Rebalancing, two hot prefixes" in done.output
    assert not list(tmp_path.iterdir())


def broken(traces: Path) -> dict[str, float]:
    raise ValueError(f"{traces.name} is broken")


def counted(_: Path) -> dict[str, float]:
    return {"one": 1.0}


def tiny(key: str) -> Study:
    """The study `key` with few requests."""
    return shortened(study(key))


def test_what_raises_is_told_and_loses_nothing_of_the_others() -> None:
    kept: list[set[str]] = []
    whole, wrong = tiny("rebalancing-hot"), replace(tiny("generated-chat"), conditions={"profile": "unknown"})

    runs = run_studies(
        [whole, wrong],
        1,
        Console(quiet=True),
        taste=True,
        measurements=[Measurement(key="bad", measure=broken), Measurement(key="good", measure=counted)],
        traces=Path("traces"),
        keep=lambda numbers: kept.append({*numbers.studies, *numbers.measurements}),
    )

    assert set(runs.failed) == {"generated-chat", "bad"}
    assert runs.failed["bad"] == "ValueError: traces is broken"
    assert set(runs.numbers.studies) == {"rebalancing-hot"}
    assert runs.numbers.measurements == {"good": {"one": 1.0}}
    assert kept[0] == {"rebalancing-hot"}, "kept after the sweep already"
    assert kept[-1] == {"rebalancing-hot", "good"}


def test_a_part_is_added_to_the_numbers_that_are_there(tmp_path: Path) -> None:
    numbers = planted(ours=0.9, others=0.8)
    numbers.measurements = {key: dict.fromkeys(["planted"], 0.5) for key in numbers.measurements}
    (tmp_path / "results").mkdir()
    file = tmp_path / "results" / "results.json"
    file.write_bytes(msgspec.json.encode(numbers))

    done = run(
        "--traces",
        str(tmp_path),
        "--only",
        "rebalancing-hot",
        "--quick",
        "--add",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
    )

    after = msgspec.json.decode(file.read_bytes(), type=Numbers)
    assert after.studies["rebalancing-hot"] != numbers.studies["rebalancing-hot"]
    assert after.studies["rebalancing-lag"] == numbers.studies["rebalancing-lag"]
    assert "lacks" in done.output, "the planted measurements have no names"


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--only", "magic"], "no study has 'magic' in its key; there are: placement-conversation"),
        (["--only", "fetches"], "has no mooncake_conversation.jsonl and no toolagent_reconstructed.jsonl"),
        (["--page", "--out", "nowhere"], "run without --page first"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_to_do(tmp_path: Path, arguments: list[str], output: str) -> None:
    done = run("--traces", str(tmp_path), *arguments)

    assert done.exit_code != 0
    assert output in " ".join(done.output.split())


def test_the_tuned_rows_are_the_best_of_the_grid_that_was_measured() -> None:
    """In results.json as committed: to within a point of capacity, which other seeds turn round."""
    numbers = numbers_in_docs()
    conversation, tools = (numbers.studies[f"tuning-{name}"] for name in ("conversation", "tools"))
    mean = {row: (conversation.point(row, 7.0).mean + tools.point(row, 14.0).mean) / 2 for row in conversation.rows()}

    assert set(TUNED) == {row.partition(":")[0] for row in mean}
    for policy, settings in TUNED.items():
        shown = ":".join((policy, *(one.removeprefix(f"{policy}.") for one in settings)))
        assert mean[shown] > max(mean[row] for row in mean if row.startswith(f"{policy}:")) - 0.01, policy
