"""Engines at URLs that the operator does not allow: the leader removes them, an ingress opens none of them, and what claims
to come from a leader is believed only with a term and the URL that the log has."""

import asyncio
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.commands import ResyncAnswered, ResyncCache, RouteGranted
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.fleet import InstanceLeft
from pointsman.contracts.subjects import command_subject, resync_subject
from pointsman.ports import Reply
from pointsman.primitives import Epoch, InstanceId, PoolName, Term, WallSeconds
from pointsman.simulation.replay import verify
from pointsman.state.state import State
from pointsman_scheduler import resync
from tests.support.events import joined, reported, route
from tests.support.fake_engine import running_engine
from tests.support.ingress_world import CHAT, COMPLETIONS, HELLO, ONE, TOKENS, TWO, IngressBench, world_with
from tests.support.memory_pool import MemoryPool
from tests.support.waiting import eventually

POOL = PoolName("default")
OURS, FOREIGN = "http://127.0.0.1:8001", "http://attacker.example:8001"
ELSEWHERE = ("http://192.0.2.1:*",)
"""Allows none of the engines of a test, which are on the loopback."""


# The leader


async def test_an_instance_at_a_url_that_is_not_allowed_is_removed_and_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resync, "PERIOD_WALL_SECONDS", WallSeconds(0.02))
    pool, asked = MemoryPool(), list[ResyncCache]()

    async def on_resync(command: Any, reply: Reply) -> None:
        asked.append(command)
        await reply(ResyncAnswered(instance=command.instance, accepted=True))

    await pool.append(pool.joined("old-1", url=FOREIGN))  # joined while no scheduler led
    async with pool.scheduler(engine_urls=()) as service:
        await eventually(lambda: not service.state.fleet.instances, what="the end of what was there before its term")
        for name, url in (("engine-1", OURS), ("engine-2", FOREIGN)):
            async with pool.client.commands.serve(resync_subject(POOL, InstanceId(name)), on_resync):
                await pool.append(pool.joined(name, url=url))
                for _ in range(20):  # its worker goes on reporting
                    await pool.append(reported(name, 0, [], at=pool.clock.now()))
                    await asyncio.sleep(0.01)
        await eventually(lambda: [i.id for i in service.state.fleet.instances] == ["engine-1"])
        answer = await pool.client.commands.request(
            command_subject(POOL, "route"), route("r-1", [], arrived_at=pool.clock.now()), timeout=WallSeconds(5.0)
        )

    assert isinstance(answer, RouteGranted)
    assert (answer.instance, answer.url) == ("engine-1", OURS)
    assert not [command for command in asked if command.instance == "engine-2"], "it is not asked to join again"
    entries = await pool.entries()
    left = [entry.event for entry in entries if isinstance(entry.event, InstanceLeft)]
    assert [(event.instance, event.refused, event.stamp is not None) for event in left] == [
        ("old-1", True, True),
        ("engine-2", True, True),
    ]
    assert f"--engine-urls engine-2={FOREIGN}" in left[1].reason
    verdict = verify(entries)
    assert not verdict.differences
    assert not verdict.unchecked


async def test_a_stranger_that_joins_under_a_known_name_keeps_its_worker_out_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resync, "PERIOD_WALL_SECONDS", WallSeconds(0.02))
    pool, asked = MemoryPool(), list[Epoch]()

    async def on_resync(command: Any, reply: Reply) -> None:
        asked.append(command.epoch)
        if command.epoch == 1:
            await pool.append(pool.joined("engine-1", url=OURS, epoch=command.above + 1))
            await reply(ResyncAnswered(instance=command.instance, accepted=True))

    def serving(state: State) -> list[str]:
        return [instance.url for instance in state.fleet.instances]

    async with (
        pool.scheduler(engine_urls=(f"engine-1={OURS}",)) as service,
        pool.client.commands.serve(resync_subject(POOL, InstanceId("engine-1")), on_resync),
    ):
        await pool.append(pool.joined("engine-1", url=OURS))
        await eventually(lambda: serving(service.state) == [OURS])
        await pool.append(pool.joined("engine-1", url=FOREIGN, epoch=2))
        await eventually(lambda: not serving(service.state))
        for _ in range(20):  # both go on reporting, the stranger last
            await pool.append(reported("engine-1", 0, [], at=pool.clock.now(), epoch=1))
            await pool.append(reported("engine-1", 0, [], at=pool.clock.now(), epoch=2))
            await asyncio.sleep(0.01)
        await eventually(lambda: serving(service.state) == [OURS])

    assert asked == [1], "the stranger is not asked"


async def test_an_instance_that_is_named_may_not_pose_at_the_url_of_another() -> None:
    pool = MemoryPool()
    urls = ("engine-1=http://gpu-1:8000", "engine-2=http://gpu-2:8000")
    async with pool.scheduler(engine_urls=urls) as service:
        await pool.append(pool.joined("engine-2", url="http://gpu-1:8000"))
        await pool.append(pool.joined("engine-1", url="http://gpu-1:8000"))
        await eventually(lambda: [i.id for i in service.state.fleet.instances] == ["engine-1"])


# The ingress


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/v1/messages/count_tokens"])
async def test_an_ingress_opens_no_url_that_is_not_allowed(path: str) -> None:
    body = TOKENS if path == COMPLETIONS else HELLO
    async with world_with(engine_urls=ELSEWHERE, hold_seconds=0.1, retries_max=0, engines_join=False) as world:
        for instance in (ONE, TWO):
            await world.log.append(joined(instance, at=ScaledClock().now(), url=world.scheduler.engines[instance]))
        async with world.post(path, body) as answer:
            text = await answer.text()

        assert answer.status in (502, 503), text
        assert "127.0.0.1" not in text
        assert not [*world.one.received, *world.one.questions, *world.two.received, *world.two.questions]


async def test_nor_does_its_probe() -> None:
    async with world_with(engine_urls=ELSEWHERE, probe=True, engines_join=False) as world:
        await world.log.append(joined(ONE, at=ScaledClock().now(), url=world.one.url))
        await eventually(lambda: "refused" in world.board.degraded_parts.get("fleet", ""))
        await asyncio.sleep(0.1)
        assert not [*world.one.received, *world.one.questions]


async def test_nor_the_second_half_of_a_split_request() -> None:
    async with running_engine() as decoder, world_with(retries_max=0, hold_seconds=0.1) as world:
        world.scheduler.engines = {ONE: world.one.url}
        world.scheduler.decoders = {InstanceId("ghost"): decoder.url.replace("127.0.0.1", "0.0.0.0")}
        world.one.transfer_params = {"do_remote_prefill": True}

        assert await status_of(world) in (502, 503)
        assert world.one.received
        assert not decoder.received


async def test_a_refused_instance_is_told_of_where_readiness_is_told() -> None:
    async with world_with(engine_urls=ELSEWHERE, engines_join=False) as world:
        await world.log.append(joined(ONE, at=ScaledClock().now(), url=FOREIGN))

        def told() -> str:
            return world.board.degraded_parts.get("fleet", "")

        await eventually(lambda: f"--engine-urls {ONE}={FOREIGN}" in told())


# What claims to come from a leader


async def test_an_answer_without_a_term_is_not_believed() -> None:
    async with world_with() as world:
        world.scheduler.term = Term(0)
        asking = asyncio.create_task(status_of(world))
        await eventually(lambda: len(world.scheduler.asked) > 3)
        assert not world.one.received
        world.scheduler.term = Term(1)

        assert await asking == 200


@pytest.mark.parametrize("rejection", [(429, "slo_ttft", 1.0), None])
async def test_nor_is_one_of_a_term_before_the_newest(rejection: tuple[int, str, float] | None) -> None:
    async with world_with() as world:
        elected = LeaderElected(at=0.0, term=Term(5), scheduler="s", as_of=0, pool={}, policy="p", settings={})
        await world.log.append(elected)
        world.scheduler.rejection = rejection
        asking = asyncio.create_task(status_of(world))
        await eventually(lambda: len(world.scheduler.asked) > 3)
        assert not asking.done()
        world.scheduler.term, world.scheduler.rejection = Term(5), None

        assert await asking == 200


async def test_a_grant_at_another_url_than_the_logs_is_not_believed() -> None:
    async with running_engine() as stranger, world_with() as world:
        honest, world.scheduler.engines = world.scheduler.engines, {ONE: stranger.url}
        asking = asyncio.create_task(status_of(world))
        await eventually(lambda: len(world.scheduler.asked) > 3)
        world.scheduler.engines = honest

        assert await asking == 200
        assert not stranger.received


async def test_nor_is_a_redispatch_nor_a_decode_engine_at_another_url() -> None:
    async with running_engine() as stranger, world_with(hold_seconds=0.1) as world:
        world.one.pause = asyncio.Event()
        world.scheduler.grant_fields = {"rebind": True}
        asking = asyncio.create_task(status_of(world))
        await eventually(lambda: world.one.received)
        world.scheduler.engines = {ONE: world.one.url, TWO: stranger.url}
        world.scheduler.rebinds = {ONE: TWO}
        await eventually(lambda: len(world.scheduler.followed) > 1)
        world.one.pause.set()
        assert await asking == 200

        world.scheduler.engines, world.scheduler.decoders = {ONE: world.one.url}, {TWO: stranger.url}
        world.scheduler.grant_fields = {}
        split = asyncio.create_task(status_of(world))
        asked = len(world.scheduler.asked)
        await eventually(lambda: len(world.scheduler.asked) > asked + 2)
        split.cancel()
        assert not stranger.received


async def status_of(world: IngressBench) -> int:
    async with world.post(COMPLETIONS, TOKENS) as answer:
        await answer.read()
        status: int = answer.status
        return status
