"""Commands of another release: whoever serves their subject refuses them at once, and whoever sent one says so plainly."""

import asyncio

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts import subjects
from pointsman.contracts.codec import AnyCommand, decode_command
from pointsman.contracts.commands import CommandRefused, DescribeFleet, FleetDescribed
from pointsman.ports import Commands, CommandTimeoutError, Reply
from pointsman.primitives import PoolName, WallSeconds
from pointsman_cli.command_client import NoAnswerError, described
from pointsman_lab.memory.log import MemoryBroker
from pointsman_worker.settings import WorkerSettings
from tests.integration.test_scaler import pool, running, scale, scaler_of
from tests.support.fake_publisher import FakePublisher
from tests.support.ingress_world import COMPLETIONS, TOKENS, world_with
from tests.support.memory_pool import MemoryPool
from tests.support.waiting import eventually
from tests.support.worker_bench import INSTANCE, working

POOL = PoolName("default")
FUTURE = b'{"type":"AskOfALaterRelease","request":"r"}'
LATER = b'{"type":"RouteRequest","wire":2000,"request":"r"}'
OF_THE_LEADER = [
    subjects.command_subject(POOL, "route"),
    subjects.command_subject(POOL, "handover"),
    subjects.command_subject(POOL, "follow"),
    subjects.command_subject(POOL, "cancel"),
    subjects.command_subject(POOL, "migrate"),
    subjects.command_subject(POOL, "fleet"),
    *(subjects.admin_subject(POOL, action, "alice") for action in ("drain", "keys", "tenants")),
]


async def refusal(commands: Commands, subject: str, payload: bytes) -> CommandRefused:
    answer = decode_command(await commands.request_bytes(subject, payload, timeout=WallSeconds(5.0)))
    assert isinstance(answer, CommandRefused)
    return answer


async def test_a_leader_refuses_on_every_subject_what_it_does_not_know() -> None:
    leading = MemoryPool()
    asker = leading.client.commands
    async with leading.scheduler():
        for subject in OF_THE_LEADER:
            assert (await refusal(asker, subject, FUTURE)).detail == "this release knows no command AskOfALaterRelease"
            assert (await refusal(asker, subject, LATER)).reason == "newer_wire"
        answer = await asker.request(OF_THE_LEADER[5], DescribeFleet(), timeout=WallSeconds(5.0))

    assert isinstance(answer, FleetDescribed)


async def test_only_who_leads_refuses_so_that_a_newer_leader_is_heard() -> None:
    leading = MemoryPool()
    asker = leading.client.commands
    async with leading.scheduler() as service:
        service.leader.term = None  # as between two terms
        for subject in OF_THE_LEADER:
            with pytest.raises(CommandTimeoutError):
                await asker.request_bytes(subject, FUTURE, timeout=WallSeconds(0.05))


async def test_a_scaler_and_a_worker_refuse_what_they_do_not_know() -> None:
    async with pool() as (world, provider), running(scaler_of(world, provider, "x")):
        await scale(world, None)  # it acts
        scaler = await refusal(world.client.commands, subjects.admin_subject(POOL, "scale", "alice"), FUTURE)
    async with FakePublisher() as publisher, working(publisher) as bench:
        subject = subjects.resync_subject(POOL, INSTANCE)
        await eventually(lambda: bench.board.whole)
        worker = [await refusal(bench.commands, subject, payload) for payload in (FUTURE, b'{"type":"DescribeFleet"}')]

    assert scaler.reason == "unknown_command"
    assert [answer.reason for answer in worker] == ["unknown_command", "unexpected"]


async def test_an_ingress_whose_commands_are_refused_places_by_least_load_and_says_why() -> None:
    async def refuse(_command: AnyCommand, reply: Reply) -> None:
        await reply(CommandRefused(reason="newer_wire", detail="this RouteRequest needs wire version 9", reads=1))

    async with world_with() as world:
        await world.scheduler.__aexit__(None, None, None)
        async with world.broker.client(ScaledClock(), name="old").commands.serve(
            subjects.command_subject(POOL, "route"), refuse
        ):
            async with asyncio.timeout(2.0), world.post(COMPLETIONS, TOKENS) as answer:
                await answer.read()
            why = world.board.degraded_parts["scheduler"]

    assert answer.status == 200
    assert answer.headers["x-pointsman-knowledge"] == "blind"
    assert "needs wire version 9" in why


async def test_a_command_of_a_person_shows_the_refusal() -> None:
    async def refuse(_command: AnyCommand, reply: Reply) -> None:
        await reply(CommandRefused(reason="unknown_command", detail="this release knows no command Ask"))

    broker = MemoryBroker(POOL)
    link = broker.client(ScaledClock(), name="old")
    async with link.commands.serve(subjects.command_subject(POOL, "fleet"), refuse):
        with pytest.raises(NoAnswerError, match=r"refused: this release knows no command Ask; the fleet runs another"):
            await described(link.commands, WorkerSettings())
