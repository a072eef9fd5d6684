"""The dashboards are what their source writes, and ask for metrics, labels and variables that exist."""

import json
import re
from typing import Any

import pytest

from tests.observability.promql import METRIC, SERIES, unknown_in
from tests.support.deploy_scripts import deploy_script
from tests.tidy.pages import ROOT

FOLDER = ROOT / "deploy/observability"
BOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
VARIABLE = re.compile(r"\$(?:\{)?(\w+)")
BUILTIN = {"__rate_interval", "__all"}
SHOWN_ELSEWHERE = {
    "pointsman_redispatches_ordered_total",
    "pointsman_redispatch_wasted_prefill_seconds_total",
    "pointsman_migrations_planned_total",
    "pointsman_engine_urls_refused_total",
    "pointsman_handovers_without_transfer_total",
}
"""Metrics that no panel needs: for `pool` in the menu, and for a look at /metrics."""


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


def board_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboards" / name).read_text())
    return found


NAMES = [path.name for path in BOARDS]


def test_the_files_are_what_their_source_writes() -> None:
    source = deploy_script("observability/dashboards.py")

    assert {path.name: path.read_text() for path in BOARDS} == source.files()  # else: make dashboards


@pytest.mark.parametrize("name", NAMES)
def test_panels_ask_for_what_exists(name: str) -> None:
    board = board_of(name)

    assert [unknown for expression in expressions(board) for unknown in unknown_in(expression)] == []


@pytest.mark.parametrize("name", NAMES)
def test_variables_are_defined(name: str) -> None:
    board = board_of(name)
    variables = {variable["name"] for variable in board["templating"]["list"]}

    assert set(VARIABLE.findall(json.dumps([board["panels"]]))) <= variables | BUILTIN


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_titles_of_their_own_and_say_what_they_show(name: str) -> None:
    titles = [panel["title"] for panel in panels(board_of(name))]

    assert len(set(titles)) == len(titles)
    assert [panel["title"] for panel in panels(board_of(name)) if not panel.get("description")] == []


@pytest.mark.parametrize("name", NAMES)
def test_lines_have_a_legend(name: str) -> None:
    lines = [panel for panel in panels(board_of(name)) if panel["type"] == "timeseries"]

    assert lines
    assert [panel["title"] for panel in lines if not panel["options"].get("legend", {}).get("showLegend")] == []


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap(name: str) -> None:
    cells = [
        (x, y)
        for panel in board_of(name)["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]

    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_what_is_measured_is_shown() -> None:
    shown = {
        re.sub(r"_(bucket|count|sum)$", "", name) for board in NAMES for name in METRIC.findall(str(board_of(board)))
    }
    measured = {re.sub(r"_(bucket|count|sum)$", "", name) for name in SERIES}

    hidden = measured - shown
    assert hidden == SHOWN_ELSEWHERE & measured, "one without a panel (dashboards.py) is named in SHOWN_ELSEWHERE"
