"""Log lines that others cause: many at once, then a few, and none of them long."""

import pytest
import structlog

from pointsman.adapters.clocks import ScaledClock
from pointsman.runtime import log_connection, structured_logs
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import LOST_EVENT, _TelemetryListener
from pointsman.runtime.structured_logs import BURST_MAX, LINES_A_SECOND, VALUE_CHARACTERS_MAX, LogPace
from tests.unit.runtime.conftest import LinesOf


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(structured_logs, "time", made)
    return made


def passed(pace: LogPace, event: str, times: int) -> list[int]:
    """What each line that was not dropped says of those that were."""
    lines = []
    for _ in range(times):
        try:
            lines.append(pace(None, "info", {"event": event}).get("suppressed", 0))
        except structlog.DropEvent:
            continue
    return lines


def test_one_event_is_bounded_and_others_are_not_touched(time: Time) -> None:
    pace = LogPace()

    assert passed(pace, "engine_failed", 10_000) == [0] * BURST_MAX
    assert passed(pace, "joined", 3) == [0] * 3
    assert len(passed(pace, "admin_action", 10_000)) == 10_000
    time.now += 1
    assert passed(pace, "engine_failed", 10_000) == [10_000 - BURST_MAX] + [0] * (int(LINES_A_SECOND) - 1)
    time.now += 3600
    assert len(passed(pace, "engine_failed", 10_000)) == BURST_MAX


def test_long_values_are_cut() -> None:
    line = LogPace()(None, "info", {"event": "e", "reason": "x" * 10_000, "number": 3})

    assert line == {"event": "e", "reason": "x" * VALUE_CHARACTERS_MAX + "...", "number": 3}


def test_lost_writes_are_logged_with_their_real_number_whatever_was_not_logged_before(
    lines_of: LinesOf,
) -> None:
    board, lines = HealthBoard(), lines_of(log_connection)
    listener = _TelemetryListener(board, board.degraded, ScaledClock(), "test")
    listener.lost(1, "no room")
    listener.lost(3, "no room")
    listener.dropped(40, "the process ended")

    assert [(line["count"], line["reason"]) for line in lines] == [(1, "no room"), (43, "the process ended")]
    assert {line["event"] for line in lines} == {LOST_EVENT}
