"""`pointsman console` beside a running fleet, as `pointsman up` starts it."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.commands import DescribeFleet, DrainInstance
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import admin_subject, command_subject
from pointsman.ports import ForbiddenError
from pointsman.primitives import InstanceId, PoolName, WallSeconds
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings
from tests.support.up import OUTSIDER, RunningUp, pointsman_up

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    directory = tmp_path_factory.mktemp("console")
    with pointsman_up(directory, "--instances", "1", "--speed", "20", "--console", "--console-port", "0") as running:
        running.wait_for(r"Stop +Ctrl-C")
        yield running
        running.stop()


@pytest.fixture(scope="module")
def url(fleet: RunningUp) -> str:
    return fleet.wait_for(r"Console +(http://\S+)")[1]


@pytest.fixture(scope="module")
def asked(fleet: RunningUp) -> str:
    """The id of a request that was answered."""
    body = {"model": "pointsman-sim", "max_tokens": 4, "messages": [{"role": "user", "content": "a question " * 100}]}
    request = Request(
        f"{fleet.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=20) as answer:
        return str(answer.headers["x-pointsman-request-id"])


def api(url: str, path: str, body: dict[str, Any] | None = None, token: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(url + path, data, headers), timeout=20) as answer:
        return json.load(answer)


async def until(read: Callable[[], Any], done: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(30):
        while not done(found := await asyncio.to_thread(read)):  # noqa: ASYNC110 - the page is asked, as people do
            await asyncio.sleep(0.2)
    return found


async def test_it_follows_the_log_of_the_fleet(url: str, asked: str) -> None:
    shown = await until(lambda: api(url, "/api/requests"), lambda view: view["requests"])
    status = api(url, "/api/status")

    assert shown["requests"][0]["request"] == asked
    assert status["health"] == "live"
    assert status["can_act"]
    assert {one["status"] for one in api(url, "/api/fleet")["instances"]} == {"ready"}


async def test_its_metrics_tell_its_version_and_every_step_that_may_fail(url: str) -> None:
    page = await asyncio.to_thread(lambda: urlopen(f"{url}/metrics", timeout=20).read().decode())

    assert 'pointsman_build_info{version="' in page
    assert 'pointsman_unexpected_errors_total{step="console_page"} 0.0' in page


async def test_one_requests_timeline_is_worked_out_from_the_live_log(url: str, asked: str) -> None:
    told = await until(lambda: api(url, f"/api/requests/{asked}"), lambda view: view["state"] in ("done", "failed"))

    assert told["state"] == "done", told["problem"]
    assert told["timeline"]["request"] == asked
    assert told["timeline"]["phases"]


async def test_who_shows_the_token_drains_an_engine_and_takes_it_back(fleet: RunningUp, url: str) -> None:
    token = (fleet.data / "console-token").read_text().strip()

    done = await asyncio.to_thread(api, url, "/api/instances/engine-1/drain", {}, token)
    assert done["done"], done
    drained = await until(
        lambda: api(url, "/api/fleet")["instances"],
        lambda instances: any(one["status"] == "draining" for one in instances),
    )
    assert [one["instance"] for one in drained if one["status"] == "draining"] == ["engine-1"]

    undone = await asyncio.to_thread(api, url, "/api/instances/engine-1/undrain", {}, token)
    assert undone["done"], undone
    history = await until(
        lambda: api(url, "/api/history")["events"], lambda events: any(e["kind"] == "undrained" for e in events)
    )
    assert "by local" in next(event["detail"] for event in history if event["kind"] == "undrained")


async def test_its_user_on_the_bus_can_ask_nothing_of_a_leader(fleet: RunningUp) -> None:
    """`pointsman_up` checks at its end that no user was refused anything: the console never tries."""
    user = BusUser(BusRole.CONSOLE)
    listed = json.loads((fleet.data / "fleet.json").read_text())
    seed = Credentials(Path(listed["credentials"])).file(user)
    settings = FleetSettings(nats=listed["nats"], nats_credentials=str(seed))
    async with open_link(settings, ScaledClock(), HealthBoard(), name=OUTSIDER, user=user) as link:
        async with asyncio.timeout(10):
            while not link.commands.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        pool = PoolName("default")
        for subject, command in (
            (command_subject(pool, "fleet"), DescribeFleet()),
            (admin_subject(pool, "drain", "local"), DrainInstance(instance=InstanceId("engine-1"), reason="no")),
        ):
            with pytest.raises(ForbiddenError):
                await link.commands.request(subject, command, timeout=WallSeconds(2.0))


async def test_the_page_itself_changes_nothing_without_its_form_token(fleet: RunningUp, url: str) -> None:
    token = (fleet.data / "console-token").read_text().strip()
    form = urlencode({"token": token}).encode()

    def sign_in() -> int:
        try:
            with urlopen(Request(f"{url}/sign-in", form), timeout=10) as answer:
                return int(answer.status)
        except OSError as error:
            return int(getattr(error, "code", 0))

    assert await asyncio.to_thread(sign_in) == 401
