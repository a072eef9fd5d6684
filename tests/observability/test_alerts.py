"""Alert rules: well formed, tested by `promtool test rules` when they fire and when not, and explained in the runbook."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.observability.promql import unknown_in
from tests.support.debian_programs import debian_program
from tests.tidy.pages import ROOT
from tests.tidy.test_tidiness import anchors

FOLDER = ROOT / "deploy/observability"
RUNBOOK = ROOT / "docs/monitoring.md"


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]:
        yield from group["rules"]


RULES = {rule["alert"]: rule for rule in rules()}


@pytest.fixture(scope="module")
def promtool() -> Path:
    return debian_program("promtool", "promtool", "trixie")


def output_of(*command: str | Path) -> str:
    ran = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=100)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def test_promtool_takes_the_rules_and_they_fire_as_their_tests_say(promtool: Path) -> None:
    assert output_of(promtool, "check", "rules", "alerts.yaml") == ""
    assert output_of(promtool, "test", "rules", "alerts_test.yaml") == ""


def test_promtool_takes_the_configuration_of_prometheus(promtool: Path, tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yml").read_text().replace("/etc/prometheus/alerts.yaml", str(FOLDER / "alerts.yaml"))
    (tmp_path / "prometheus.yml").write_text(text)

    assert output_of(promtool, "check", "config", tmp_path / "prometheus.yml") == ""


def test_every_alert_is_tested_when_it_fires_and_when_not() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    cases = [(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]]

    needed = {(name, fires) for name in RULES for fires in (True, False)}
    assert needed == set(cases), "alerts_test.yaml has a case in which each alert fires (True) and one in which not"


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_how_bad_it_is_what_is_wrong_and_what_to_do(name: str) -> None:
    rule = RULES[name]
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")

    section = RUNBOOK.read_text().partition(f"### {name}\n")[2]
    assert rule["labels"]["severity"] == ("critical" if section.startswith("\nCritical. ") else "warning")
    assert len(rule["annotations"]["summary"]) > 20
    assert (ROOT / page, anchor) == (RUNBOOK, name.lower())
    assert anchor in anchors(RUNBOOK)


@pytest.mark.parametrize("name", RULES)
def test_an_alert_asks_for_metrics_that_exist(name: str) -> None:
    assert unknown_in(RULES[name]["expr"]) == []


def test_manifests_scale_and_alert_by_metrics_that_exist() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "deploy/kubernetes").rglob("*.yaml")}

    assert {name: unknown for name, text in pages.items() if (unknown := unknown_in(text))} == {}
