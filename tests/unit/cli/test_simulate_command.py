"""`pointsman simulate`: what it accepts, what it writes, and that its numbers are what the runs gave."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pointsman.policies.policy_set import UnknownPolicyError
from pointsman.simulation.goodput import Goodput, RatePoint
from pointsman.simulation.metrics import summarise
from pointsman.simulation.outcome import LoadSample, Outcome, RequestRow
from pointsman.simulation.simulator import Scenario
from pointsman_cli.main import main
from pointsman_cli.simulate.experiment import (
    Arrival,
    Cell,
    CellResult,
    Series,
    Source,
    goodput_searches,
    run_cell,
    search_key,
)
from pointsman_cli.simulate.plots import draw_plots, telling_rate
from pointsman_cli.simulate.report import capacity_table, in_order, reconstruction_note, run_row
from pointsman_cli.simulate.variants import Variant, variants

ISSUE_KEYS = [
    "workload", "policy", "ordering", "admission", "eviction", "instances", "qps", "seed", "effective_capacity",
    "goodput_qps", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p90_s", "e2e_p50_s", "hit_rate", "load_cv",
    "migrations", "rejections", "jain",
]  # fmt: skip
SMALL = ["--workload", "chat", "--requests", "60", "--warmup", "10", "--instances", "2", "--jobs", "1"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def written(file: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"]
    return runs


def result(policy: str, qps: float, *ttfts: float, seed: int = 1, trace: str = "conversation") -> CellResult:
    """A made-up run in which one request arrived each second."""
    rows = [
        RequestRow(
            number=number,
            tenant="",
            arrived_at=float(number),
            prompt_tokens=1000,
            output_tokens=1,
            slo_ttft=5.0,
            end="finished",
            cached_tokens=500,
            first_token_at=number + ttft,
            ended_at=number + ttft,
        )
        for number, ttft in enumerate(ttfts)
    ]
    variant = Variant(policy=policy, routing=policy, ordering="fcfs", admission="none")
    source = Source(trace=Path(f"{trace}.jsonl"), generator="", requests=len(rows), input_tokens_max=20_480)
    cell = Cell(source=source, variant=variant, scenario=Scenario(instances=2, seed=seed), qps=qps, warmup=0)
    outcome = Outcome(rows, [LoadSample(float(at), (at * 100, 50), (0, 0), ()) for at in range(3)])
    series = Series(tuple(Arrival(row.arrived_at, row.ttft, row.on_time) for row in rows), (), ((0.0, 2),))
    return CellResult(cell, summarise(outcome, hit_bound=0.5), series)


# --- The command ---


def test_every_combination_is_run_and_written_in_the_order_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "runs.json"

    done = run(*SMALL, "--policy", "round_robin,dualmap", "--order", "fcfs,edf", "--rate", "4,2", "--out", str(file))

    assert done.exit_code == 0, done.output
    runs = written(file)
    cells = [(r["policy"], r["ordering"], r["qps"]) for r in runs]
    assert cells == [(p, o, q) for p in ("round_robin", "dualmap") for o in ("fcfs", "edf") for q in (2.0, 4.0)]
    assert [key for key in runs[0] if key in ISSUE_KEYS] == [key for key in ISSUE_KEYS if key != "goodput_qps"]
    assert runs[0]["requests"] == 50
    assert "round_robin + edf" in done.output


def test_equal_seeds_give_equal_numbers_and_others_other_ones(tmp_path: Path) -> None:
    for name in ("one.json", "again.json"):
        run(*SMALL, "--policy", "dualmap", "--rate", "4", "--seeds", "2", "--out", str(tmp_path / name))

    first, again = written(tmp_path / "one.json"), written(tmp_path / "again.json")
    for each in (*first, *again):
        del each["decision_us"]
    assert first == again
    assert [r["seed"] for r in first] == [1, 2]
    assert first[0]["ttft_p50_s"] != first[1]["ttft_p50_s"]


def test_goodput_is_searched_from_the_sweep_and_written_with_every_run(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"

    done = run(*SMALL, "--policy", "round_robin", "--rate", "4", "--goodput", "--out", str(file))

    assert done.exit_code == 0, done.output
    (only,) = written(file)
    assert only["goodput_qps"] >= 0
    assert {"qps": 4.0, "effective_capacity": only["effective_capacity"]} in only["goodput_points"]
    assert "goodput at 90%" in done.output


def test_processes_of_a_pool_give_the_same_numbers(tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        asked = [*SMALL[:-2], "--jobs", jobs, "--policy", "round_robin,dualmap", "--rate", "4"]
        assert run(*asked, "--out", str(tmp_path / jobs)).exit_code == 0

    alone, together = written(tmp_path / "1"), written(tmp_path / "2")
    assert [r["ttft_p99_s"] for r in alone] == [r["ttft_p99_s"] for r in together]


def test_half_of_a_small_run_warms_the_caches_if_nobody_says_how_much() -> None:
    small = ["--workload", "chat", "--requests", "9", "--instances", "2", "--jobs", "1", "--policy", "round_robin"]
    result = CliRunner().invoke(main, ["simulate", *small])

    assert result.exit_code == 0, result.output
    assert "9 requests, the first 4 not counted" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--trace or --workload"),
        ([*SMALL, "--policy", "magic"], "there is no routing policy magic"),
        ([*SMALL, "--policy", "dualmap", "--set", "dualmap.magic=1"], "there is no setting of dualmap magic"),
        ([*SMALL, "--policy", "dualmap", "--set", "min_ttft.x=1"], "min_ttft is not among the policies"),
        ([*SMALL, "--rate", "4,fast"], "not a list of rates"),
        ([*SMALL, "--rate", "0"], "rates are positive"),
        ([*SMALL, "--warmup", "60"], "nothing is left"),
        ([*SMALL, "--split", "2"], "is not P+D"),
        ([*SMALL, "--split", "2+1"], "needs 3 instances"),
        (["--trace", "missing.jsonl"], "missing.jsonl: No such file"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_it_begins(arguments: list[str], said: str) -> None:
    done = run(*arguments)

    assert done.exit_code != 0
    assert said in " ".join(done.output.split())


def test_without_matplotlib_the_way_to_get_it_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pointsman_cli.simulate.plots")
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    done = run(*SMALL, "--plot", str(tmp_path))

    assert "pip install 'pointsman[plots]'" in done.output
    assert "[1/" not in done.output


# --- Variants ---


def test_a_setting_with_several_values_makes_a_variant_of_each() -> None:
    plain, ablation = variants(
        ["dualmap"], ["fcfs"], ["none"], ["routing.ttft_slo_threshold=0.5", "dualmap.both_over=least_loaded,affine"]
    )

    assert plain.settings == {"ttft_slo_threshold": "0.5", "both_over": "least_loaded"}
    assert ablation.settings == {"ttft_slo_threshold": "0.5", "both_over": "affine"}
    names = ["dualmap:both_over=least_loaded", "dualmap:both_over=affine"]
    assert [v.label([plain, ablation]) for v in (plain, ablation)] == names
    with pytest.raises(UnknownPolicyError, match="NAME=VALUE"):
        variants(["dualmap"], ["fcfs"], ["none"], ["dualmap.both_over"])


def test_a_note_tells_rows_of_equal_policies_apart() -> None:
    (plain,) = variants(["dualmap"], ["fcfs"], ["none"])
    noted = replace(plain, note="rebalancing")

    assert plain.key != noted.key
    assert noted.label([plain, noted]) == "dualmap, rebalancing"


# --- Cells ---


def test_load_that_halves_comes_at_half_the_pace_from_there_on() -> None:
    source = Source(trace=None, generator="tools", requests=400, input_tokens_max=20_480, arrivals="uniform")
    steady, halved = (
        run_cell(replace(result("round_robin", 4.0, 1.0).cell, source=one))
        for one in (source, replace(source, halved_after=0.5))
    )

    before, after = steady.series.arrivals[-1].at, halved.series.arrivals[-1].at
    assert after == pytest.approx(1.5 * before, rel=0.01)
    assert halved.series.arrivals[199].at == steady.series.arrivals[199].at


def test_a_goodput_search_begins_with_all_that_the_sweep_found_for_its_variant_and_seed() -> None:
    sweep = [result("dualmap", 4.0, 1.0), result("dualmap", 5.0, 9.0), result("dualmap", 4.0, 1.0, seed=2)]

    searches = goodput_searches(sweep)

    assert [search_key(search.cell) for search in searches] == [("dualmap fcfs none", 1), ("dualmap fcfs none", 2)]
    assert searches[0].known == (RatePoint(4.0, 1.0), RatePoint(5.0, 0.0))


# --- Reports and pictures ---


def test_the_table_shows_the_mean_over_seeds_and_the_best_in_bold() -> None:
    results = [
        result("dualmap", 4.0, 1.0, 9.0),
        result("dualmap", 4.0, 1.0, 1.0, seed=2),
        result("random", 4.0, 9.0, 9.0),
    ]
    table = capacity_table(results, {})
    console = Console(width=100, force_terminal=True, color_system="standard")
    with console.capture() as printed:
        console.print(table)

    assert "\x1b[1m0.750\x1b[0m" in printed.get()
    assert "±0.250" in printed.get()


def test_no_number_is_cut_off_where_there_are_many_columns() -> None:
    done = run(*SMALL, "--decode", "--policy", "pointsman", "--rate", "4", "--split", "1+1")

    assert done.exit_code == 0, done.output
    assert "TBT P90" in done.output
    assert "decision" in done.output
    assert "…" not in done.output


def test_results_are_put_back_in_order_whoever_ended_first() -> None:
    asked = [result("dualmap", 4.0, 1.0), result("dualmap", 5.0, 1.0), result("random", 4.0, 1.0)]

    assert in_order(reversed(asked), [r.cell for r in asked]) == asked


def test_a_run_with_goodput_has_all_keys_of_the_issue_in_its_order() -> None:
    measured = result("dualmap", 4.0, 1.0)
    goodput = Goodput(6.5, (RatePoint(6.5, 0.9),))

    row = run_row(measured, {(measured.cell.variant.key, 1): goodput})

    assert list(row)[: len(ISSUE_KEYS)] == ISSUE_KEYS
    assert (row["goodput_qps"], row["hit_share_of_bound"]) == (6.5, 1.0)


def test_a_reconstructed_trace_is_called_one() -> None:
    real, rebuilt = result("dualmap", 4.0, 1.0), result("dualmap", 4.0, 1.0, trace="toolagent_reconstructed")

    assert reconstruction_note(real.cell.source) is None
    assert "reconstruction" in str(reconstruction_note(rebuilt.cell.source))
    assert run_row(rebuilt, {})["reconstruction"]


def test_pictures_are_drawn_of_whatever_there_is(tmp_path: Path) -> None:
    file = tmp_path / "pictures"

    done = run(
        *SMALL,
        "--policy",
        "pointsman,dualmap",
        "--rate",
        "3,6",
        "--plot",
        str(file),
    )

    assert done.exit_code == 0, done.output
    pictures = sorted(file.glob("*.png"))
    assert [picture.stem for picture in pictures] == [
        "capacity", "pareto", "prompt_lengths", "timeline", "ttft_cdf",
    ]  # fmt: skip
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert len(draw_plots([result("dualmap", 4.0, 9.0)], tmp_path)) == len(pictures)


def test_time_is_shown_at_the_highest_rate_that_someone_serves_well() -> None:
    assert telling_rate([result("a", 4.0, 1.0), result("a", 5.0, 1.0), result("a", 6.0, 9.0)]) == 5.0
    assert telling_rate([result("a", 6.0, 9.0), result("a", 4.0, 9.0)]) == 4.0
