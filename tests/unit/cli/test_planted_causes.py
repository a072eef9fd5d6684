"""Causes are planted, and the first line of `explain` and of `doctor` has to name them, with the number that matters.

What is right is worked out here from what was planted, not with the code under test.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pointsman.contracts.decisions import RequestPlaced, RequestRejected
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import RequestId
from pointsman_cli.doctor.late_causes import because
from pointsman_cli.explain.causes import Cause
from pointsman_cli.main import main
from tests.support.commands import told_by, written
from tests.support.planted_causes import CASES, planted, slowest_of
from tests.support.recorded_log import rewritten
from tests.support.served_log import ServedLog


def told(bundle: Path, *arguments: str) -> dict[str, Any]:
    return told_by("explain", "--from", str(bundle), *arguments)


@pytest.mark.parametrize("name", CASES)
def test_the_first_line_about_a_request_names_the_planted_cause(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    entries = planted(case)
    bundle = written(entries, tmp_path)
    request = slowest_of(entries, case)
    story = told(bundle, request)
    verdict, why = story["verdict"], story["why"]

    assert verdict["cause"] == case.cause
    assert re.search(case.says, verdict["sentence"]), verdict["sentence"]
    assert "\n" not in verdict["sentence"]
    assert len(verdict["sentence"]) < 240
    assert 1 <= len(why) <= 7
    assert case.first_says in why[0]
    for word in case.never:
        assert not any(re.search(rf"\b{word}\b", sentence) for sentence in (verdict["sentence"], *why)), word
    for words in case.names:
        assert any(words in sentence for sentence in why), why
    shown = CliRunner().invoke(main, ["explain", "--from", str(bundle), request]).output.splitlines()
    assert shown.index(verdict["sentence"]) < 6
    assert len(shown) < 25


ROUND_ROBIN = {"policies": policy_set(routing="round_robin", admission="none")}
SEVERAL: list[dict[str, Any]] = [
    {
        "gap": 0.15,
        "requests": 150,
        "engines": 2,
        "pace": {"engine-2": 2.5},
        "own_blocks": {30: 300, 80: 300},
        **ROUND_ROBIN,
    },
    {"gap": 0.2, "requests": 150, "stumbles": {"engine-1": (7, 12.0)}, **ROUND_ROBIN},
    *(case.log for case in CASES.values()),
]


@pytest.mark.parametrize("log", SEVERAL)
def test_the_doctors_example_of_a_cause_has_that_cause_in_explain(log: dict[str, Any], tmp_path: Path) -> None:
    bundle = written(ServedLog(**log).entries, tmp_path)
    report = told_by("doctor", "--from", str(bundle), exit_codes=(0, 1))
    service = [line for finding in report["findings"] if finding["area"] == "service" for line in finding["evidence"]]

    for words, request in re.findall(r"\d% because (.*?): for example request (\S+)", "\n".join(service)):
        verdict = told(bundle, request)["verdict"]
        assert verdict["cause"] == "rejected" or because(Cause(verdict["cause"])) == words, (request, verdict)


@pytest.mark.parametrize("name", CASES)
def test_the_first_line_of_the_doctor_names_the_planted_cause(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    bundle = written(planted(case), tmp_path)
    result = CliRunner().invoke(main, ["doctor", "--from", str(bundle), "--json"])
    report = json.loads(result.stdout)

    assert case.doctor in report["verdict"]
    assert "calibrate" not in "".join(finding["advice"] for finding in report["findings"])
    shown = CliRunner().invoke(main, ["doctor", "--from", str(bundle)]).output.splitlines()
    assert shown[1] == report["verdict"]
    if case.exit_code:
        assert result.exit_code == case.exit_code


def test_the_sentences_come_in_the_order_of_the_seconds_that_they_explain(tmp_path: Path) -> None:
    """Of all requests of the five logs: the seconds at the beginning of sentences that divide the wait."""
    for case in CASES.values():
        entries = planted(case)
        bundle = written(entries, tmp_path)
        why = told(bundle, slowest_of(entries, case))["why"]
        seconds = [
            float(found[1]) for s in why if (found := re.match(r"([\d.]+) s \(\d+% of the wait\) (?:were|went)", s))
        ]

        assert seconds == sorted(seconds, reverse=True)
        assert seconds


def test_the_tokens_that_were_really_cached_make_the_arithmetic(tmp_path: Path) -> None:
    """An engine that is slow by a factor and lost its cache is slow by that factor, not by that of a predicted hit."""
    log = ServedLog(
        emptied={"engine-1": 25.0, "engine-2": 25.0, "engine-3": 25.0}, pace=dict.fromkeys(("engine-1", "engine-2", "engine-3"), 2.0),
        requests=100, families=6, own_blocks=dict.fromkeys(range(100), 2), policies=policy_set(admission="none"),
    )  # fmt: skip
    bundle = written(log.entries, tmp_path)
    ends = [
        e.event
        for e in log.entries
        if isinstance(e.event, RequestFinished) and e.event.at > 26.0 and not e.event.cached_tokens
    ]
    assert ends
    for end in ends[:4]:
        sentences = told(bundle, end.request)
        text = " ".join([sentences["verdict"]["sentence"], *sentences["why"]])
        paces = [float(pace) for pace in re.findall(r"(\d+\.\d) times (?:as long|what its cost)", text)]
        assert all(pace <= 2.1 for pace in paces), text


def test_a_prompt_that_is_too_long_for_its_objective_by_itself_is_told_so_and_no_engine_is_advised(
    tmp_path: Path,
) -> None:
    hard = policy_set(settings={"admission.hard_limit": True})
    entries = ServedLog(own_blocks=dict.fromkeys(range(20, 60), 300), requests=60, gap=25.0, policies=hard).entries
    refused = [e.event for e in entries if isinstance(e.event, RequestRejected)]
    assert len(refused) == 40
    bundle = written(entries, tmp_path)
    verdict = told(bundle, refused[-1].request)["verdict"]
    report = told_by("doctor", "--from", str(bundle), exit_codes=(1,))  # two thirds were rejected

    assert verdict["cause"] == "long_prompt"
    assert "the prompt alone takes longer" in verdict["sentence"]
    assert "their own prompt takes longer than their objective" in report["verdict"]
    assert not any(
        "--instances" in finding["advice"] for finding in report["findings"] if finding["severity"] != "note"
    )

    alone = ServedLog(own_blocks={50: 300}, requests=80, policies=policy_set(admission="none")).entries
    sentence = told(written(alone, tmp_path), "r-50")["verdict"]["sentence"]
    assert re.fullmatch(
        r"slow because its own 19,201 tokens take 19\.2 s to compute, more than its objective of 5\.000 s", sentence
    )


def test_a_best_effort_request_is_told_that_it_was_late_even_alone(tmp_path: Path) -> None:
    entries = ServedLog(
        own_blocks=dict.fromkeys(range(20, 60), 300), requests=60, gap=25.0, policies=policy_set()
    ).entries
    ends = [e.event for e in entries if isinstance(e.event, RequestFinished) and e.event.ttft > 5.0]
    assert len(ends) == 40
    bundle = written(entries, tmp_path)
    verdict = told(bundle, "r-20")["verdict"]
    report = told_by("doctor", "--from", str(bundle), exit_codes=(0, 1))

    assert verdict["cause"] == "long_prompt"
    assert verdict["sentence"] == (
        "slow because its own 19,201 tokens take 19.2 s to compute, more than its objective of 5.000 s: late even alone, best effort"
    )
    assert report["verdict"] == "40 of 60 requests were late because their own prompt takes longer than their objective"
    evidence = [line for finding in report["findings"] for line in finding["evidence"]]
    assert "40 were late even alone and served as best effort: when others left room" in evidence
    assert not any("--instances" in finding["advice"] for finding in report["findings"])


def test_the_wait_of_a_best_effort_request_is_no_slowness_of_its_engine(tmp_path: Path) -> None:
    """Ten prompts of 19.2 s among others at one per second: all engines compute as their cost model says."""
    long = dict.fromkeys(range(20, 60, 4), 300)
    entries = ServedLog(own_blocks=long, requests=80, gap=1.0, policies=policy_set()).entries
    ends = {e.event.request: e.event.ttft for e in entries if isinstance(e.event, RequestFinished)}
    waited = [request for number in long if ends[request := RequestId(f"r-{number}")] > 2.5 * 19.2]
    assert len(waited) >= 2
    bundle = written(entries, tmp_path)
    report = told_by("doctor", "--from", str(bundle), exit_codes=(0, 1))

    for request in waited:
        verdict = told(bundle, request)["verdict"]
        said = re.fullmatch(
            r"slow because its prompt was late even alone: as best effort it waited ([\d.]+) s for room that others did not need",
            verdict["sentence"],
        )
        assert said, verdict["sentence"]
        assert float(said[1]) == pytest.approx(ends[request] - 19.2, abs=0.6)
        assert verdict["cause"] == "long_prompt"
    assert "because their own prompt takes longer than their objective" in report["verdict"]
    assert "engine was slow" not in json.dumps(report)


def test_a_third_rejected_makes_the_exit_code_1(tmp_path: Path) -> None:
    entries = ServedLog(gap=0.11, requests=300, families=300, policies=policy_set()).entries
    rejected = sum(isinstance(e.event, RequestRejected) for e in entries)
    assert 0.25 < rejected / 300 < 0.4
    report = told_by("doctor", "--from", str(written(entries, tmp_path)), exit_codes=(1,))

    assert any(
        f["severity"] == "serious" and f"({rejected / 300:.1%}) were rejected" in f["what"] for f in report["findings"]
    )


def test_slow_prefills_with_others_between_them_are_found(tmp_path: Path) -> None:
    """Every fourth prompt of engine-2 takes long, so that no three come in a row."""
    served = ServedLog(
        requests=90, gap=1.2, families=90, policies=policy_set(routing="round_robin", admission="none"),
        stumbles={"engine-2": (4, 8.0)},
    )  # fmt: skip
    prefills = [
        e.event.prefill
        for e in served.entries
        if isinstance(e.event, PrefillFinished) and e.event.instance == "engine-2"
    ]
    slow = "".join("s" if prefill > 3.5 else "." for prefill in prefills)
    assert "sss" not in slow
    assert slow.count("s") >= 3
    bundle = written(served.entries, tmp_path)
    report = told_by("doctor", "--from", str(bundle), exit_codes=(0, 1))

    assert report["verdict"].startswith("slow for a while: engine-2;")


def test_calibrating_is_advised_where_the_cost_model_is_wrong_and_not_where_the_waiting_was(tmp_path: Path) -> None:
    everywhere = dict.fromkeys(("engine-1", "engine-2", "engine-3"), 2.5)
    log = ServedLog(requests=90, gap=5.0, pace=everywhere, policies=policy_set(admission="none")).entries
    for placed in [entry for entry in log if isinstance(entry.event, RequestPlaced)]:
        event = placed.event
        assert isinstance(event, RequestPlaced)
        naive = msgspec.structs.replace(event, predicted_ttft=event.prefill_seconds)  # of one that learns nothing
        log = rewritten(log, placed.sequence, naive)
    advice = _advice_of_predictions(log, tmp_path)

    assert "pointsman calibrate" in advice
    assert "pointsman calibrate" not in _advice_of_predictions(planted(CASES["a long prompt ahead"]), tmp_path)


def _advice_of_predictions(entries: list[LogEntry], directory: Path) -> str:
    report = told_by("doctor", "--from", str(written(entries, directory)), exit_codes=(0, 1))
    return " ".join(f["advice"] for f in report["findings"] if f["area"] == "predictions")


def test_a_cache_that_evicts_with_events_is_not_called_emptied(tmp_path: Path) -> None:
    healthy = ServedLog(requests=120).entries
    result = CliRunner().invoke(main, ["doctor", "--from", str(written(healthy, tmp_path))])

    assert "behind its back" not in result.output


def test_who_is_ahead_counts_what_was_placed_before(tmp_path: Path) -> None:
    """The numbers of the overload's verdict, counted in the log itself."""
    entries = planted(CASES["overload"])
    request = slowest_of(entries, CASES["overload"])
    placed = next(e.event for e in entries if isinstance(e.event, RequestPlaced) and e.event.request == request)
    begun = {e.event.request for e in entries if isinstance(e.event, PrefillFinished) and e.event.at < placed.at}
    before = [
        e.event for e in entries
        if isinstance(e.event, RequestPlaced) and e.event.instance == placed.instance and e.event.at < placed.at and e.event.request not in begun
    ]  # fmt: skip
    sentence = told(written(entries, tmp_path), request)["verdict"]["sentence"]

    assert f"{len(before)} requests with" in sentence
    tokens = int(re.search(r"with ([\d,]+) tokens", sentence)[1].replace(",", ""))  # type: ignore[index]
    assert 0 <= sum(event.uncached_tokens for event in before) - tokens < max(event.uncached_tokens for event in before)


def test_why_an_idle_engine_was_not_chosen_is_told_as_it_was_decided(tmp_path: Path) -> None:
    """A prompt of 897 tokens, of which 512 are held at engine-3 behind 0.777 s of work, and none at engine-2, which is idle."""
    log = ServedLog(
        requests=4, gap=0.06, families=2, own_blocks=dict.fromkeys(range(4), 6), policies=policy_set(admission="none")
    ).entries
    why = " ".join(told(written(log, tmp_path), "r-2")["why"])

    assert "engine-2 was idle but held none of its prompt: 897 tokens to compute there, 385 here" in why
    assert "from the other requests on engine-3" in why
    assert "on engine-2 (costs least: 0.385 s of work behind 0.777 s)" in why
    assert "0.265 s sooner" in why
