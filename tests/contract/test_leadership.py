"""What a leader relies on, in memory as over a real nats-server: the lease, elections, fences, checkpoints."""

import asyncio
from contextlib import aclosing

import pytest

from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.envelope import Stamp
from pointsman.ports import (
    CheckpointLabel,
    ElectionLostError,
    LeaseTakenError,
    LogUnavailableError,
    StoreUnavailableError,
    Tenure,
)
from pointsman.primitives import InstanceId, RequestId, Term, WallSeconds
from tests.support.events import joined, stored
from tests.support.log_reading import events_in
from tests.support.log_worlds import LogWorld
from tests.support.waiting import eventually


def elected(term: int, scheduler: str = "one") -> LeaderElected:
    return LeaderElected(at=0.0, term=Term(term), scheduler=scheduler, as_of=0)


def decision(term: int, number: int) -> RequestGranted:
    stamp = Stamp(term=Term(term), number=number, as_of=0)
    return RequestGranted(at=0.0, stamp=stamp, request=RequestId(f"r{number}"), instance=InstanceId("a"))


def label(as_of: int, form: str = "1") -> CheckpointLabel:
    return CheckpointLabel(identity="log", as_of=as_of, entry="e", form=form)


async def test_a_lease_is_written_by_whoever_has_seen_it_last(world: LogWorld) -> None:
    async with world.client("one") as one, world.client("two") as two:
        assert await one.lease.look() is None
        first = await one.lease.put("one", Term(1), after=0)
        with pytest.raises(LeaseTakenError):
            await two.lease.put("two", Term(2), after=0)
        renewed = await one.lease.put("one", Term(1), after=first.revision)

        assert await two.lease.look() == renewed == Tenure("one", Term(1), renewed.revision)
        assert renewed.revision > first.revision
        with pytest.raises(LeaseTakenError):
            await two.lease.put("two", Term(2), after=first.revision)

        taken = await two.lease.put("two", Term(2), after=renewed.revision)
        with pytest.raises(LeaseTakenError):
            await one.lease.put("one", Term(1), after=renewed.revision)
        assert await one.lease.look() == taken


async def test_of_many_who_want_the_lease_at_once_one_gets_it(world: LogWorld) -> None:
    async with world.client("one") as one, world.client("two") as two:
        puts = [client.lease.put(f"s{n}", Term(1), after=0) for n, client in enumerate([one, two] * 10)]
        results = await asyncio.gather(*puts, return_exceptions=True)

        (winner,) = [result for result in results if isinstance(result, Tenure)]
        assert all(isinstance(result, Tenure | LeaseTakenError) for result in results)
        assert await one.lease.look() == winner


async def test_without_a_server_the_lease_says_so(world: LogWorld) -> None:
    async with world.client() as client:
        tenure = await client.lease.put("one", Term(1), after=0)
        await world.stop()
        with pytest.raises(StoreUnavailableError):
            await client.lease.look()
        with pytest.raises(StoreUnavailableError):
            await client.lease.put("one", Term(1), after=tenure.revision)
        await world.start()


async def test_each_election_has_one_successor(world: LogWorld) -> None:
    async with world.client("one") as one, world.client("two") as two:
        await one.log.append(joined("a"))
        first = await one.log.elect(elected(1), after=0)
        await one.log.append(joined("b"))
        with pytest.raises(ElectionLostError):
            await two.log.elect(elected(1, "two"), after=0)
        second = await two.log.elect(elected(2, "two"), after=first.elected)
        with pytest.raises(ElectionLostError):
            await one.log.elect(elected(2), after=first.elected)

        assert (first.elected, second.elected) == (2, 4)
        assert await events_in(one.log) == [joined("a"), elected(1), joined("b"), elected(2, "two")]


async def test_what_a_deposed_leader_still_writes_is_not_stored(world: LogWorld) -> None:
    async with world.client("one") as one, world.client("two") as two:
        await one.log.append(joined("a"))
        fence = await one.log.elect(elected(1), after=0)
        for number in range(1, 51):
            one.log.append_soon(decision(1, number), fence)
        assert await one.log.flush(WallSeconds(5))
        await two.log.elect(elected(2, "two"), after=fence.elected)
        for number in range(51, 101):
            one.log.append_soon(decision(1, number), fence)
        one.log.append_soon(stored("a", 1, [1]))
        assert await one.log.flush(WallSeconds(5))

        written = [decision(1, number) for number in range(1, 51)]
        assert await events_in(one.log) == [joined("a"), elected(1), *written, elected(2, "two"), stored("a", 1, [1])]
        assert "elected" in fence.broken
        assert world.listener.losses == []


async def test_a_leader_whose_election_was_dropped_by_retention_writes_on(world: LogWorld) -> None:
    async with world.client(bytes_max=64 * 1024) as client:
        await client.log.append(joined("a"))
        fence = await client.log.elect(elected(1), after=0)
        for number in range(1, 21):
            await client.log.append(stored("a", number, list(range(1, 1001))))
        assert (await client.log.extent()).first > fence.elected
        for number in range(1, 11):
            client.log.append_soon(decision(1, number), fence)
        assert await client.log.flush(WallSeconds(5))

        assert not fence.broken
        last = (await client.log.extent()).last
        assert last == 32
        again = await client.log.elect(elected(2), after=0)
        assert again.elected == last + 1


async def test_what_rests_on_an_entry_that_a_power_cut_took_is_not_stored(world: LogWorld) -> None:
    async with world.client("leader") as leader, world.client("worker") as worker:
        fence = await leader.log.elect(elected(1), after=0)
        await world.remember()
        await worker.log.append(joined("a"))
        async with aclosing(leader.log.read()) as reading:  # type: ignore[type-var]
            assert [await anext(reading), await anext(reading)]
            await world.go_back()
            worker.log.append_soon(joined("b"))
            leader.log.append_soon(decision(1, 1), fence)
            await world.start()
            assert await worker.log.flush(WallSeconds(5))
            assert await leader.log.flush(WallSeconds(5))

        assert await events_in(worker.log) == [elected(1), joined("b")]
        assert "lost entry 2" in fence.broken


async def test_a_crash_that_loses_nothing_leaves_the_leader_its_right(world: LogWorld) -> None:
    async with world.client("leader") as leader, world.client("worker") as worker:
        fence = await leader.log.elect(elected(1), after=0)
        await worker.log.append(joined("a"))
        async with aclosing(leader.log.read()) as reading:  # type: ignore[type-var]
            assert [await anext(reading), await anext(reading)]
            await world.stop()
            leader.log.append_soon(decision(1, 1), fence)
            await world.start()
            assert await leader.log.flush(WallSeconds(5))

        assert await events_in(leader.log) == [elected(1), joined("a"), decision(1, 1)]
        assert not fence.broken


async def test_nobody_is_elected_while_the_log_is_away(world: LogWorld) -> None:
    async with world.client() as client:
        await client.log.append(joined("a"))
        await world.stop()
        with pytest.raises(LogUnavailableError):
            await client.log.elect(elected(1), after=0)
        await world.start()


async def test_six_checkpoints_are_kept_whole_and_one_that_nobody_can_use_goes_first(world: LogWorld) -> None:
    contents = {as_of: bytes([as_of]) * 300_000 for as_of in range(1, 8)}
    async with world.client("writer") as writer, world.client("reader") as reader:
        assert await reader.checkpoints.labels() == []
        for as_of, content in contents.items():
            await writer.checkpoints.save(label(as_of), content, log_begins=2)

        assert await reader.checkpoints.labels() == [label(as_of) for as_of in (7, 6, 5, 4, 3, 2)]
        assert await reader.checkpoints.load(label(5)) == contents[5]
        assert await reader.checkpoints.load(label(2)) == contents[2]
        assert await reader.checkpoints.load(label(1)) is None
        assert await reader.checkpoints.load(label(4, form="2")) is None


async def test_the_head_of_a_checkpoint_is_read_without_the_rest(world: LogWorld) -> None:
    content = bytes(range(256)) * 2_000
    async with world.client("writer") as writer, world.client("reader") as reader:
        await writer.checkpoints.save(label(1), content, head_bytes=200_001)
        await writer.checkpoints.save(label(2), content)

        assert await reader.checkpoints.load_head(label(1)) == content[:200_001]
        assert await reader.checkpoints.load(label(1)) == content
        assert await reader.checkpoints.load_head(label(2)) is None
        assert await reader.checkpoints.load_head(label(3)) is None


async def test_checkpoints_survive_a_restart_of_the_server_and_are_away_with_it(world: LogWorld) -> None:
    async with world.client() as client:
        await client.checkpoints.save(label(1), b"state")
        await world.stop()
        with pytest.raises(StoreUnavailableError):
            await client.checkpoints.labels()
        await world.start()
        await eventually(lambda: client.commands.connected)

        assert await client.checkpoints.load(label(1)) == b"state"
