"""Repeated troubles of a connection are told every few seconds; what is remembered for that is bounded."""

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.primitives import WallSeconds
from pointsman.runtime import log_connection
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import TROUBLE_LOG_SECONDS, _TelemetryListener
from tests.unit.runtime.conftest import LinesOf


class SteppedClock(ScaledClock):
    at = WallSeconds(1000.0)

    @override
    def wall(self) -> WallSeconds:
        return self.at


def test_any_number_of_refused_subjects_is_told_within_bounds_and_each_of_a_few(
    lines_of: LinesOf,
) -> None:
    clock, board, lines = SteppedClock(), HealthBoard(pool="p"), lines_of(log_connection)
    listener = _TelemetryListener(board, board.missing, clock, "p")
    for number in range(5000):
        listener.forbidden("publish", f"_inbox.{number}.x")
    listener.log_missing("away")
    assert {line["event"] for line in lines} == {"nats_forbidden", "log_missing"}
    assert len(lines) < 500
    assert len(listener._troubles) < 500

    lines.clear()
    clock.at += TROUBLE_LOG_SECONDS
    for _ in range(3):
        for subject in ("pm.p.fleet.a", "pm.p.fleet.b"):
            listener.forbidden("publish", subject)
    assert [line["what"] for line in lines] == ["publish pm.p.fleet.a", "publish pm.p.fleet.b"]
