"""Repeated troubles of a connection are told every few seconds; what is remembered for that is bounded."""

from prometheus_client import REGISTRY

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.runtime import log_connection
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import TROUBLE_LOG_SECONDS, _TelemetryListener, open_link
from pointsman.runtime.settings import FleetSettings
from tests.support.settable_clock import StandingClock
from tests.support.waiting import eventually
from tests.unit.runtime.conftest import LinesOf

LOST = "pointsman_log_events_lost_total"


def test_any_number_of_refused_subjects_is_told_within_bounds_and_each_of_a_few(
    lines_of: LinesOf,
) -> None:
    clock, board, lines = StandingClock(), HealthBoard(pool="p"), lines_of(log_connection)
    listener = _TelemetryListener(board, board.missing, clock, "p")
    for number in range(5000):
        listener.forbidden("publish", f"_inbox.{number}.x")
    listener.log_missing("away")
    assert {line["event"] for line in lines} == {"nats_forbidden", "log_missing"}
    assert len(lines) < 500
    assert len(listener._troubles) < 500

    lines.clear()
    clock.at += float(TROUBLE_LOG_SECONDS)
    for _ in range(3):
        for subject in ("pm.p.fleet.a", "pm.p.fleet.b"):
            listener.forbidden("publish", subject)
    assert [line["what"] for line in lines] == ["publish pm.p.fleet.a", "publish pm.p.fleet.b"]


def test_every_lost_write_is_counted_however_many_are_told(lines_of: LinesOf) -> None:
    clock, board, lines = StandingClock(), HealthBoard(pool="p"), lines_of(log_connection)
    listener = _TelemetryListener(board, board.missing, clock, "p")
    before = REGISTRY.get_sample_value(LOST, {"pool": "p"}) or 0.0
    for _ in range(3):
        listener.lost(2, "full")
    clock.at += float(TROUBLE_LOG_SECONDS)
    listener.lost(1, "full")

    assert REGISTRY.get_sample_value(LOST, {"pool": "p"}) == before + 7
    assert [line["count"] for line in lines] == [2, 5]


async def test_a_password_of_nats_is_on_no_page() -> None:
    (closed,) = free_ports(1)
    board = HealthBoard()
    settings = FleetSettings(nats=f"nats://me:hunter2@127.0.0.1:{closed}")
    async with open_link(settings, ScaledClock(), board, name="test", user=BusUser(BusRole.READER)):
        begun = board.lacks["nats"]
        await eventually(lambda: board.lacks["nats"] != begun)

        assert "hunter2" not in begun + board.lacks["nats"]
    assert str(closed) in begun
