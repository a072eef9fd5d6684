"""An ingress that is told to stop: it says so, goes on accepting for a while, finishes what it has, and cuts what is left."""

import asyncio
import json
from typing import Any

import aiohttp
import click
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.requests import RequestCancelled, RequestFinished
from pointsman.primitives import WallSeconds
from pointsman.runtime.supervision import Supervisor
from pointsman_ingress.servers import supervise_server
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import COMPLETIONS, STREAM, TOKENS, IngressBench, world_with
from tests.support.waiting import eventually

LONG = 60.0


async def test_for_a_while_it_is_not_ready_and_serves_on_while_each_answer_closes_its_connection() -> None:
    async with world_with(lame_duck_seconds=LONG) as world:
        async with world.client.get(world.admin_url + "/readyz") as before:
            assert before.status == 200
        async with world.client.get(world.url + "/v1/models") as listed:
            assert listed.headers.get("connection") is None
        world.server.should_exit = True
        await eventually(lambda: not world.board.ready)

        async with world.client.get(world.admin_url + "/readyz") as probe:
            assert (probe.status, (await probe.json())["missing"]) == (503, {"shutdown": "shutting down"})
        async with world.post(COMPLETIONS, STREAM) as served:
            assert (served.status, served.headers["connection"]) == (200, "close")
            assert "[DONE]" in await served.text()
        world.server.hurry()


async def test_it_begins_at_once_and_not_at_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.runtime.health.TICK_SECONDS", WallSeconds(LONG))
    async with asyncio.timeout(LONG / 2), world_with():
        pass


async def test_then_nobody_can_connect_and_what_is_under_way_finishes() -> None:
    async with world_with(drain_seconds_max=LONG) as world:
        world.one.script.append(Behaviour.PAUSES)
        streaming = await world.post(COMPLETIONS, STREAM)
        begun = await streaming.content.readuntil(b"\n\n")
        world.scheduler.holds_back = True
        waiting = asyncio.create_task(answered(world, TOKENS))
        await eventually(lambda: len(world.scheduler.asked) >= 2)
        world.server.should_exit = True
        await eventually(lambda: refuses_connections(world))
        followed = len(world.scheduler.followed)
        await eventually(lambda: len(world.scheduler.followed) > followed)
        world.scheduler.holds_back = False
        world.one.resumes.set()

        assert "[DONE]" in (begun + await streaming.content.read()).decode()
        assert (await waiting)[0] == 200
        await eventually(lambda: not world.server.server_state.tasks)
        ends = [event for event in await world.events() if isinstance(event, RequestFinished | RequestCancelled)]
        assert [type(end) for end in ends] == [RequestFinished, RequestFinished]


async def test_connections_that_idle_are_kept_while_balancers_may_use_them_and_closed_after_that() -> None:
    async with world_with(lame_duck_seconds=1.0, drain_seconds_max=LONG) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"}]}")).startswith(b"HTTP/1.1 200")
        world.server.should_exit = True
        await eventually(lambda: not world.board.ready)
        kept = not reader.at_eof()
        rest = await reader.read()
        writer.close()

        assert kept
        assert rest == b""


@pytest.mark.parametrize("why", ["time is over", "hurried"])
async def test_what_is_left_gets_an_error_event_and_its_end(why: str) -> None:
    async with world_with(drain_seconds_max=0.2 if why == "time is over" else LONG) as world:
        world.one.script.append(Behaviour.PAUSES)
        streaming = await world.post(COMPLETIONS, STREAM)
        begun = await streaming.content.readuntil(b"\n\n")
        world.scheduler.holds_back = True
        waiting = asyncio.create_task(answered(world, TOKENS))
        await eventually(lambda: len(world.scheduler.asked) >= 2)
        world.server.should_exit = True
        if why == "hurried":
            await eventually(lambda: refuses_connections(world))
            world.server.hurry()
        events = (begun + await streaming.content.read()).split(b"\n\n")
        refused = await waiting
        cancelled = [event for event in await world.events() if isinstance(event, RequestCancelled)]

    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "ingress_stopped"
    assert (refused[0], json.loads(refused[1])["error"]["code"]) == (503, "ingress_stopped")
    assert sorted(event.reason for event in cancelled) == ["ingress_stopped"] * 2
    assert {event.instance for event in cancelled} == {"engine-1", ""}


async def test_a_background_task_that_fails_ends_it_without_waiting_for_anybody() -> None:
    async def fail() -> None:
        raise click.ClickException("broken")

    async with world_with(lame_duck_seconds=LONG, drain_seconds_max=LONG) as world:
        world.one.script.append(Behaviour.PAUSES)
        streaming = await world.post(COMPLETIONS, STREAM)
        begun = await streaming.content.readuntil(b"\n\n")
        async with Supervisor() as supervisor:
            supervisor.start(
                supervise_server(world.server, world.admin, supervisor, ScaledClock(), lambda: None),
                name="supervise_server",
            )
            supervisor.start(fail(), name="fails")
            async with asyncio.timeout(LONG / 2):
                events = (begun + await streaming.content.read()).split(b"\n\n")

    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "ingress_stopped"


async def answered(world: IngressBench, body: dict[str, Any]) -> tuple[int, bytes]:
    async with world.post(COMPLETIONS, body) as answer:
        return answer.status, await answer.read()


async def refuses_connections(world: IngressBench) -> bool:
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(world.url + "/v1/models"):
                return False
        except aiohttp.ClientConnectorError:
            return True
