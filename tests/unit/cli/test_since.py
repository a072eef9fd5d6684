"""Each command that takes `--since` reads a time of day alike."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pointsman_cli.main import main
from tests.support.commands import written
from tests.support.served_log import ServedLog


@pytest.fixture
def begun_at_noon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A log that begins at Unix second 0."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "NOON-12")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("begun_at_noon")
@pytest.mark.parametrize(
    "command",
    [("explain", "--slowest", "20"), ("doctor",), ("hit-rate",), ("usage",), ("what-if", "--instances", "2")],
    ids=lambda command: command[0],
)
def test_a_time_of_day_before_a_recorded_log_shows_all_of_it(command: tuple[str, ...], tmp_path: Path) -> None:
    """Not what came a day later, which is nothing."""
    name, *options = command
    arguments = [name, "--from", str(written(ServedLog(requests=60).entries, tmp_path)), "--json", *options]

    def told(*since: str) -> list[str]:
        lines = CliRunner().invoke(main, [*arguments, *since]).output.splitlines()
        return [line for line in lines if not any(name in line for name in ("beginning", "decision_us"))]

    assert told("--since", "11:55") == told()
    assert told("--since", "13:00") != told()
