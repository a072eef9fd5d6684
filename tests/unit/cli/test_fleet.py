"""`pointsman fleet` and the console say why an engine takes no requests, or one at a time; `pointsman drain` when it has none."""

import msgspec
import pytest

from pointsman.ports import NONE_UNCONFIRMED
from pointsman.primitives import InstanceId, PoolName
from pointsman_cli.console.log.fleet_views import fleet_view
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.console.pages.health import attention
from pointsman_cli.drain import Drained
from pointsman_cli.fleet import fleet_table
from pointsman_cli.terminal import SafeConsole
from pointsman_scheduler.fleet_status import describe_fleet
from tests.support.events import fleet_described, reported
from tests.support.failing_pool import FailingPool, policies

SICK = InstanceId("a")
RECORD = "5 requests in a row failed there: 500 Internal Server Error"


def ejected_pool() -> FailingPool:
    pool = FailingPool()
    pool.serve(40, sick=SICK)
    return pool


def half_open_pool() -> FailingPool:
    pool = ejected_pool()
    pool.later(60.0)
    pool.look()
    return pool


def down_pool() -> FailingPool:
    pool = FailingPool()
    pool.happens(reported(SICK, 0, [], at=pool.now, serving=False))
    return pool


@pytest.mark.parametrize(
    ("pool", "status", "reason"),
    [
        (ejected_pool(), "ejected", RECORD),
        (half_open_pool(), "ready", f"half-open, takes one request at a time: consecutive_failures: {RECORD}"),
        (down_pool(), "down", "its engine does not answer or cannot be followed: its worker's /readyz and log say why"),
    ],
)
def test_the_table_says_why(pool: FailingPool, status: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = describe_fleet(
        pool.state, policies(), NONE_UNCONFIRMED, pool=PoolName("p"), scheduler="s", checkpoints_overdue=""
    )
    SafeConsole(width=200).print(fleet_table(fleet))

    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {SICK} is {status}: ")]
    assert reason in line


def test_names_are_whole_where_the_screen_is_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    """`pointsman drain` takes the name. These are of engines that DNS found."""
    names = [InstanceId(f"172-20-0-{n}-8080") for n in (2, 3)]
    (known,) = fleet_described().instances
    shown = [
        msgspec.structs.replace(known, instance=name, url=f"http://172.20.0.{n}:8080")
        for n, name in enumerate(names, start=2)
    ]
    SafeConsole(width=120).print(fleet_table(fleet_described(instances=shown)))

    output = capsys.readouterr().out
    assert all(f" {name} " in output for name in names)
    assert "\N{HORIZONTAL ELLIPSIS}" not in output


def test_the_console_shows_a_half_open_engine_as_such() -> None:
    view = fleet_view(Observer(half_open_pool().state))

    assert [engine.status for engine in view.instances] == ["half-open", "ready", "ready", "ready"]
    assert view.totals.ready == 3
    ((level, word, reason),) = [
        (level, word, why) for level, engine, word, why in attention(view) if engine.instance == SICK
    ]
    assert (level, word) == ("warning", "half-open")
    assert RECORD in reason


@pytest.mark.parametrize("where", ["pending", "in_prefill", "decoding"])
def test_an_instance_is_drained_once_it_has_no_request_of_any_kind(where: str) -> None:
    drained, (idle,) = Drained(InstanceId("engine-1")), fleet_described().instances

    assert not drained.is_over(fleet_described(instances=[msgspec.structs.replace(idle, **{where: 1})]))
    assert not drained.reached
    assert drained.is_over(fleet_described())
    assert drained.reached
