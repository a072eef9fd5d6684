"""The doctor on a log that was slow, refused requests, or is full; and its silence where none of that was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.contracts.codec import encode
from pointsman.contracts.decisions import RequestsRefused
from pointsman.contracts.subjects import subject_of
from pointsman.ports import LogEntry, LogExtent
from pointsman.primitives import PoolName
from pointsman.state.state import PoolSettings
from pointsman_cli.doctor.examination import examine
from pointsman_cli.doctor.log_health import LogDelay, LogSpace
from pointsman_cli.history.start_point import StartPoint
from tests.support.commands import told_by, written
from tests.support.request_story import RequestStory
from tests.support.served_log import ServedLog
from tests.support.slow_log import read_late

Entries = list[LogEntry]
GIB = 2**30


@pytest.fixture(scope="module")
def healthy() -> Entries:
    return ServedLog().entries


def examined(entries: Entries, directory: Path) -> dict[str, Any]:
    return told_by("doctor", "--from", str(written(entries, directory)), exit_codes=(0, 1))


def of_the_log(entries: Entries, directory: Path) -> list[dict[str, Any]]:
    return [finding for finding in examined(entries, directory)["findings"] if finding["area"] == "log"]


@pytest.mark.parametrize("late", [lambda entries: entries, lambda entries: read_late(entries, 20.0, 60.0, 1.2)])
def test_a_log_that_takes_writes_in_time_is_not_called_slow(
    healthy: Entries, late: Callable[[Entries], Entries], tmp_path: Path
) -> None:
    assert of_the_log(late(healthy), tmp_path) == []


def test_a_slow_log_is_told_with_how_long_and_how_slow_it_was(healthy: Entries, tmp_path: Path) -> None:
    (finding,) = of_the_log(read_late(healthy, 20.0, 30.0, 4.0), tmp_path)  # a decision each 0.4 s

    assert finding["severity"] == "warning"
    assert finding["what"] == "the log was slow for 8 s"
    assert finding["evidence"] == ["for 8 s decisions of term 1 took up to 3.6 s to come back"]


@pytest.mark.parametrize(
    ("delay", "why"),
    [
        (0.0, "their engine was slow: "),
        (4.0, "their leader learned late what engines had finished: the log was slow for 5 s"),
    ],
)
def test_what_was_late_while_the_log_was_slow_blames_no_engine(delay: float, why: str, tmp_path: Path) -> None:
    story = RequestStory()
    story.later(4.0)
    for number in range(6):
        story.asks(f"slow-{number}")
    for second in range(8):
        story.later(1.0)
        story.asks(f"other-{second}", 0)
    for number in range(6):
        story.answers(f"slow-{number}", after=0.05)
    found = examined(read_late(story.log, 104.5, 111.5, delay), tmp_path)

    assert found["verdict"].startswith(f"6 of 6 requests were late because {why}")


@pytest.mark.parametrize(("speed", "slow"), [(1.0, True), (4.0, False)])
def test_how_long_the_log_took_is_judged_in_wall_seconds(healthy: Entries, *, speed: float, slow: bool) -> None:
    """4 engine seconds are one at four times the speed."""
    settings = PoolSettings(speed=speed)
    found = examine(read_late(healthy, 20.0, 50.0, 4.0), settings, [LogDelay(settings)], StartPoint(None, ""))

    assert bool(found.findings) == slow


def test_a_leader_that_only_stood_still_is_no_slow_log(healthy: Entries, tmp_path: Path) -> None:
    assert of_the_log(read_late(healthy, 20.0, 22.8, 8.0), tmp_path) == []


def test_refused_requests_are_counted_and_serious(healthy: Entries, tmp_path: Path) -> None:
    end = healthy[-1]
    assert end.event is not None
    entries = list(healthy)
    for count, since in ((40, 1.0), (2, 12.0)):
        at = end.event.at + since
        refused = RequestsRefused(at=at + 10.0, scheduler="s", count=count, since=at, reason="log_overloaded")
        subject = subject_of(PoolName("default"), refused)
        entries.append(LogEntry(len(entries) + 1, subject, encode(refused), refused))

    (finding,) = of_the_log(entries, tmp_path)

    assert finding["severity"] == "serious"
    assert finding["what"] == "42 requests were refused because the log did not keep up"
    assert finding["evidence"] == ["for 20 s in all; clients got 503 log_overloaded"]


@pytest.mark.parametrize(
    ("used", "limit", "further", "told"),
    [
        (3.9, 4.0, 0, ["the log is full and keeps 2 minutes"]),
        (3.0, 4.0, 0, []),
        (3.9, 0.0, 0, []),
        (3.9, 4.0, 100_000, []),
    ],
    ids=["full", "not full", "no limit", "full, and keeps hours before what was read"],
)
def test_a_full_log_is_told_if_it_keeps_little(
    healthy: Entries, used: float, limit: float, further: int, told: list[str]
) -> None:
    last = healthy[-1].sequence
    extent = LogExtent("a", 1, last + further, int(used * GIB), int(limit * GIB))

    found = examine(healthy, PoolSettings(), [LogSpace(PoolSettings(), extent)], StartPoint(None, ""))

    assert [finding.what for finding in found.findings] == told
