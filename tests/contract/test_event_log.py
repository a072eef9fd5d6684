"""What every log and every way of sending commands promises, in memory as over a real nats-server."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest

from pointsman.contracts.cache import CacheGap
from pointsman.contracts.codec import AnyCommand, LogEvent, UnwritableError, decode_command
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    CommandRefused,
    DescribeFleet,
    RouteRequest,
    refusal_of,
)
from pointsman.contracts.decisions import WritesLost
from pointsman.contracts.subjects import command_subject
from pointsman.contracts.wire import WIRE_VERSION
from pointsman.ports import (
    NONE_UNCONFIRMED,
    CommandRefusedError,
    CommandTimeoutError,
    CommandTooLargeError,
    CommandUnsendableError,
    EventLog,
    LogEntry,
    LogReset,
    LogUnavailableError,
    NoResponderError,
    Reply,
)
from pointsman.primitives import Epoch, InstanceId, RequestId, Tenant, WallSeconds
from tests.support.events import joined, removed, stored
from tests.support.log_worlds import LogWorld
from tests.support.waiting import eventually

WAIT_SECONDS = 10.0


async def take(reading: AsyncIterator[LogEntry | LogReset], count: int) -> list[LogEntry | LogReset]:
    async with asyncio.timeout(WAIT_SECONDS):
        return [await anext(reading) for _ in range(count)]


async def read(log: EventLog, count: int, start: int = 1, kinds: tuple[str, ...] = ()) -> list[LogEntry | LogReset]:
    async with aclosing(log.read(start, kinds=kinds)) as reading:  # type: ignore[type-var]
        return await take(reading, count)


def events_of(found: list[LogEntry | LogReset]) -> list[LogEvent | None]:
    assert all(isinstance(entry, LogEntry) for entry in found), found
    return [entry.event for entry in found if isinstance(entry, LogEntry)]


async def test_appended_events_are_read_in_order_from_any_position(world: LogWorld) -> None:
    events = [stored("engine-1", number, [number, number + 1]) for number in range(1, 6)]

    async with world.client() as client:
        sequences = [await client.log.append(event) for event in events]
        extent = await client.log.extent()

        assert sequences == [1, 2, 3, 4, 5]
        assert (extent.first, extent.last) == (1, 5)
        assert events_of(await read(client.log, 5)) == events
        assert events_of(await read(client.log, 2, start=4)) == events[3:]


async def test_a_repeated_append_is_one_event(world: LogWorld) -> None:
    async with world.client() as client:
        assert await client.log.append(joined("engine-1")) == 1
        assert await client.log.append(joined("engine-1")) == 1
        assert await client.log.append(joined("engine-2")) == 2

        assert (await client.log.extent()).last == 2


async def test_nobody_uses_up_the_message_ids_of_another(world: LogWorld) -> None:
    async with world.client("one") as one, world.client("other") as other:
        assert await one.log.append(joined("engine-1")) == 1
        assert await other.log.append(joined("engine-1")) == 2


async def test_append_soon_keeps_the_order_of_the_calls(world: LogWorld) -> None:
    events = [stored("engine-1", number, [number]) for number in range(1, 301)]

    async with world.client() as client:
        for event in events[:-1]:
            client.log.append_soon(event)
        await client.log.append(events[-1])

        assert await client.log.flush(WallSeconds(1))
        assert events_of(await read(client.log, 300)) == events


async def test_append_soon_tells_the_sequence_once_it_is_confirmed(world: LogWorld) -> None:
    told: list[int] = []

    async with world.client() as client:
        for number in range(1, 4):
            client.log.append_soon(stored("engine-1", number, [number]), on_stored=told.append)
        assert await client.log.flush(WallSeconds(1))

        assert told == [1, 2, 3]


async def test_a_reader_at_the_end_sees_what_another_client_writes(world: LogWorld) -> None:
    async with world.client("writer") as writer, world.client("reader") as reader:
        await writer.log.append(joined("engine-1"))
        async with aclosing(reader.log.read(2)) as reading:  # type: ignore[type-var]
            waiting = asyncio.create_task(take(reading, 2))
            await asyncio.sleep(0.05)
            writer.log.append_soon(stored("engine-1", 1, [1]))
            writer.log.append_soon(stored("engine-1", 2, [2]))

            assert events_of(await waiting) == [stored("engine-1", 1, [1]), stored("engine-1", 2, [2])]


async def test_kinds_limit_reading_to_their_subjects(world: LogWorld) -> None:
    async with world.client() as client:
        for number in range(1, 4):
            await client.log.append(joined(f"engine-{number}"))
            await client.log.append(stored(f"engine-{number}", 1, [number]))

        found = await read(client.log, 4, kinds=("fleet", "kv.engine-2"))

        assert [entry.sequence for entry in found if isinstance(entry, LogEntry)] == [1, 3, 4, 5]


async def test_what_does_not_decode_is_handed_on_with_the_problem(world: LogWorld) -> None:
    async with world.client() as client:
        await client.log.append(joined("engine-1"))
        await world.store_raw(client, f"pm.{world.pool}.scale", b'{"type":"Nonsense"}')
        await client.log.append(joined("engine-2"))

        _, strange, after = await read(client.log, 3)

        assert isinstance(strange, LogEntry)
        assert strange.event is None
        assert strange.payload == b'{"type":"Nonsense"}'
        assert "Nonsense" in strange.problem
        assert world.listener.undecodables == [f"pm.{world.pool}.scale"]
        assert isinstance(after, LogEntry)
        assert after.event == joined("engine-2")


async def test_a_recreated_log_resets_its_readers(world: LogWorld) -> None:
    async with world.client() as client:
        await client.log.append(joined("engine-1"))
        before = await client.log.extent()
        async with aclosing(client.log.read()) as reading:  # type: ignore[type-var]
            await take(reading, 1)
            await world.recreate(client)
            await client.log.append(joined("engine-2"))
            reset, entry = await take(reading, 2)

        assert (await client.log.extent()).identity != before.identity
        assert isinstance(reset, LogReset)
        assert reset.first_sequence == 1
        assert "recreated" in reset.reason
        assert isinstance(entry, LogEntry)
        assert (entry.sequence, entry.event) == (1, joined("engine-2"))


async def test_entries_dropped_before_they_were_read_reset_the_reader(world: LogWorld) -> None:
    large = list(range(1, 1001))
    async with world.client(bytes_max=64 * 1024) as client:
        for number in range(1, 21):
            await client.log.append(stored("engine-1", number, large))
        extent = await client.log.extent()

        reset, entry = await read(client.log, 2)

        assert extent.first > 1
        assert reset == LogReset(extent.first, f"entries 1 to {extent.first - 1} were dropped before they were read")
        assert isinstance(entry, LogEntry)
        assert entry.sequence == extent.first


async def test_a_position_beyond_the_end_resets_the_reader(world: LogWorld) -> None:
    async with world.client() as client:
        await client.log.append(joined("engine-1"))

        reset, entry = await read(client.log, 2, start=10)

        assert isinstance(reset, LogReset)
        assert reset.first_sequence == 1
        assert isinstance(entry, LogEntry)
        assert entry.sequence == 1


@pytest.mark.parametrize("rewritten", [1, 5], ids=["shorter", "longer"])
async def test_a_log_that_lost_its_tail_resets_its_readers(world: LogWorld, rewritten: int) -> None:
    """Also where it grew past the reader's position again before the reader could look."""
    async with world.client("writer") as writer, world.client("reader") as reader:
        await writer.log.append(joined("engine-1"))
        await world.remember()
        for number in range(1, 4):
            await writer.log.append(stored("engine-1", number, [number]))
        async with aclosing(reader.log.read()) as reading:  # type: ignore[type-var]
            await take(reading, 4)
            await world.go_back()
            for number in range(1, rewritten + 1):
                writer.log.append_soon(removed("engine-1", 100 + number, [number]))
            await world.start()
            reset, first, second = await take(reading, 3)

        assert isinstance(reset, LogReset)
        assert reset.first_sequence == 1
        assert events_of([first, second]) == [joined("engine-1"), removed("engine-1", 101, [1])]


async def test_a_crash_loses_nothing_that_was_confirmed_and_repeats_nothing(world: LogWorld) -> None:
    async with world.client("writer") as writer, world.client("reader") as reader:
        for number in range(1, 101):
            writer.log.append_soon(stored("engine-1", number, [number]))
        await writer.log.append(stored("engine-1", 101, [101]))
        async with aclosing(reader.log.read()) as reading:  # type: ignore[type-var]
            await take(reading, 50)
            for number in range(102, 202):
                writer.log.append_soon(stored("engine-1", number, [number]))
            await world.stop()
            for number in range(202, 301):
                writer.log.append_soon(stored("engine-1", number, [number]))
            assert not await writer.log.flush(WallSeconds(0.05))
            with pytest.raises(LogUnavailableError):
                await reader.log.extent()
            await world.start()
            await writer.log.append(stored("engine-1", 301, [301]))
            rest = await take(reading, 251)

        assert events_of(rest) == [stored("engine-1", number, [number]) for number in range(51, 302)]
        assert world.listener.losses == []


async def test_a_stream_of_writes_keeps_its_order_through_many_crashes(world: LogWorld) -> None:
    async with world.client("writer", window_max=100_000) as writer, world.client("reader") as reader:
        numbers = itertools.count(1)
        for _ in range(6):
            for _ in range(20):
                for number in itertools.islice(numbers, 50):
                    writer.log.append_soon(stored("engine-1", number, [number]))
                await asyncio.sleep(0.002)
            await world.stop()
            await world.start()
        assert await writer.log.flush(WallSeconds(WAIT_SECONDS))
        found = events_of(await read(reader.log, 6000))

    assert found == [stored("engine-1", number, [number]) for number in range(1, 6001)]
    assert world.listener.losses == []


async def test_a_writer_knows_how_many_writes_wait_for_how_long(world: LogWorld) -> None:
    async with world.client() as client:
        await client.log.append(stored("engine-1", 1, [1]))
        before = client.log.unconfirmed
        await world.stop()
        client.log.append_soon(stored("engine-1", 2, [2]))
        client.log.append_soon(stored("engine-1", 3, [3]))
        await eventually(lambda: client.log.unconfirmed.wait_seconds > WallSeconds(0.2))
        meanwhile = client.log.unconfirmed.count
        await world.start()
        assert await client.log.flush(WallSeconds(10))
        after = client.log.unconfirmed

    assert (before, meanwhile, after) == (NONE_UNCONFIRMED, 2, NONE_UNCONFIRMED)


async def test_writes_beyond_the_window_are_lost_and_the_log_says_so(world: LogWorld) -> None:
    async with world.client("writer-1", window_max=4) as client:
        await client.log.append(joined("engine-1"))
        await world.stop()
        for number in range(1, 11):
            client.log.append_soon(stored("engine-1", number, [number]))
        await world.start()
        found = events_of(await read(client.log, 6))

        assert found[1:5] == [stored("engine-1", number, [number]) for number in range(1, 5)]
        assert isinstance(found[5], WritesLost)
        assert (found[5].writer, found[5].count) == ("writer-1", 6)
        assert len(world.listener.losses) == 6


async def test_what_can_never_be_written_is_told_apart_from_a_log_that_is_away(world: LogWorld) -> None:
    unwritable = CacheGap(at=0.0, instance=InstanceId("engine-1"), epoch=Epoch(1), sequence=1, missed=2**60, reason="x")
    async with world.client("writer") as client:
        with pytest.raises(UnwritableError, match="CacheGap"):
            await client.log.append(unwritable)
        client.log.append_soon(unwritable)
        await client.log.append(joined("engine-1"))

        assert await client.log.flush(WallSeconds(WAIT_SECONDS))
        found = events_of(await read(client.log, 2))
        assert sorted(type(event).__name__ for event in found) == ["InstanceJoined", "WritesLost"]


async def test_a_command_that_cannot_be_sent_says_so_at_once_and_why(world: LogWorld) -> None:
    route = RouteRequest(
        request=RequestId("r1"), ingress="i", arrived_at=1.0, tenant=Tenant("t"), keys=bytes(7 * 2**20), prompt_tokens=1,
        max_output_tokens=1, slo_ttft=1.0, slo_tpot=1.0,
    )  # fmt: skip
    subject, day = command_subject(world.pool, "route"), WallSeconds(86_400.0)

    async with world.client("asker") as asker:
        for command, error in (
            (route, CommandTooLargeError),
            (msgspec.structs.replace(route, keys=b"", prompt_tokens=2**60), CommandUnsendableError),
        ):
            async with asyncio.timeout(WAIT_SECONDS):
                with pytest.raises(CommandUnsendableError) as raised:
                    await asker.commands.request(subject, command, timeout=day)

            assert type(raised.value) is error


async def test_a_command_is_answered_by_whoever_serves_it_even_later(world: LogWorld) -> None:
    replies: list[Reply] = []

    async def keep(command: AnyCommand, reply: Reply) -> None:
        replies.append(reply)
        if len(replies) == 2:
            for number, waiting in enumerate(replies):
                await waiting(CancelAnswered(request=RequestId(f"r{number}"), ended=True))

    async with world.client("asker") as asker, world.client("server") as server:
        subject = command_subject(world.pool, "cancel")
        async with server.commands.serve(subject, keep):
            command = CancelRequest(request=RequestId("r"), reason="gone")
            answers = await asyncio.gather(
                *(asker.commands.request(subject, command, timeout=WallSeconds(2)) for _ in range(2))
            )

    assert answers == [CancelAnswered(request=RequestId(f"r{number}"), ended=True) for number in range(2)]


async def test_without_a_server_nobody_responds(world: LogWorld) -> None:
    async def silent(command: AnyCommand, reply: Reply) -> None:
        return

    async with world.client("asker") as asker, world.client("server") as server:
        subject, command = command_subject(world.pool, "cancel"), CancelRequest(request=RequestId("r"), reason="gone")
        with pytest.raises(NoResponderError):
            await asker.commands.request(subject, command, timeout=WallSeconds(2))
        async with server.commands.serve(subject, silent):
            with pytest.raises(CommandTimeoutError):
                await asker.commands.request(subject, command, timeout=WallSeconds(0.05))
        with pytest.raises(NoResponderError):
            await asker.commands.request(subject, command, timeout=WallSeconds(2))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"type":"FutureCommand","request":"r"}', "unknown_command"),
        (b'{"type":"FutureCommand","wire":99,"request":["r"]}', "newer_wire"),
        (b'{"type":"CancelRequest","wire":99,"request":"r","reason":"gone"}', "newer_wire"),
        (b'{"type":"CancelRequest","reason":7}', "invalid"),
        (b"nonsense", "invalid"),
        (b'{"type":"DescribeFleet"}', "unexpected"),
    ],
)
async def test_what_a_service_cannot_read_is_refused_at_once_with_the_reason(
    world: LogWorld, payload: bytes, reason: str
) -> None:
    async def refusing(command: AnyCommand, reply: Reply) -> None:
        refusal = refusal_of(command, (CancelRequest,))
        assert refusal is not None
        await reply(refusal)

    async with world.client("asker") as asker, world.client("server") as server:
        subject = command_subject(world.pool, "cancel")
        async with server.commands.serve(subject, refusing):
            answer = decode_command(await asker.commands.request_bytes(subject, payload, timeout=WallSeconds(2)))

    assert isinstance(answer, CommandRefused)
    assert (answer.reason, answer.reads) == (reason, WIRE_VERSION)


async def test_a_refusal_is_an_error_of_its_own_that_says_what_was_refused(world: LogWorld) -> None:
    async def refusing(_command: AnyCommand, reply: Reply) -> None:
        await reply(b'{"type":"CommandRefused","reason":"x","detail":"this release knows no command Ask","wire":0}')

    async with world.client("asker") as asker, world.client("server") as server:
        subject = command_subject(world.pool, "cancel")
        async with server.commands.serve(subject, refusing):
            with pytest.raises(CommandRefusedError, match="knows no command Ask"):
                await asker.commands.request(subject, DescribeFleet(), timeout=WallSeconds(2))


async def test_a_bad_command_and_a_failing_handler_leave_the_next_command_served(world: LogWorld) -> None:
    async def fragile(command: AnyCommand, reply: Reply) -> None:
        if not isinstance(command, CancelRequest):
            return
        if command.reason == "fail":
            raise ValueError("cannot")
        await reply(b"done")

    async with world.client("asker") as asker, world.client("server") as server:
        subject = command_subject(world.pool, "cancel")
        async with server.commands.serve(subject, fragile):
            with pytest.raises(CommandTimeoutError):
                await asker.commands.request_bytes(subject, b"nonsense", timeout=WallSeconds(0.05))
            with pytest.raises(CommandTimeoutError):
                await asker.commands.request(
                    subject, CancelRequest(request=RequestId("r"), reason="fail"), timeout=WallSeconds(0.05)
                )
            good = b'{"type":"CancelRequest","request":"r","reason":"ok"}'

            assert await asker.commands.request_bytes(subject, good, timeout=WallSeconds(2)) == b"done"
        assert world.listener.undecodables == [subject]
        assert [str(failure) for failure in world.listener.failures] == ["cannot"]
