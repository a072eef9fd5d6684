"""Who is behind with commands or with the log leaves turns to what else the process does: a leader renews its lease."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from pointsman.adapters.jetstream.commands import COMMANDS_A_TURN, COMMANDS_WAITING_MAX, JetStreamCommands, Requests
from pointsman.adapters.jetstream.connection import Connection, OnMessage, Subscription
from pointsman.adapters.jetstream.consumer import ENTRIES_A_TURN, Reader
from pointsman.adapters.log_listener import LogListener
from pointsman.adapters.turns import TURN_SECONDS_MAX
from pointsman.ports import LogEntry, Reply
from pointsman.primitives import Sequence
from tests.support.events import stored
from tests.support.waiting import eventually

COMMANDS = 1_000
SUBJECT = "pm.default.cmd.route"


@dataclass
class Sent:
    data: bytes
    subject: str = SUBJECT
    reply: str = "_INBOX.ingress.1"
    headers: dict[str, str] | None = None


class Wire(Connection, Subscription):
    """Delivers what the test says."""

    def __init__(self) -> None:
        self.deliver: OnMessage = lambda message: None

    @property
    @override
    def connected(self) -> bool:
        return True

    @override
    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None, room: int = 0
    ) -> None: ...

    @override
    def write_now(self) -> None: ...

    @override
    async def subscribe(self, subject: str, on_message: OnMessage, *, queue: str = "") -> Subscription:
        self.deliver = on_message
        return self

    @override
    def on_forbidden(self, on_forbidden: Callable[[str, str], None]) -> None: ...

    @override
    def on_change(self, on_change: Callable[[bool], None]) -> Callable[[], None]:
        return lambda: None

    @override
    async def close(self) -> None: ...


async def test_commands_that_wait_are_handled_in_order_with_turns_for_others() -> None:
    handled: list[int] = []
    wire, turns = Wire(), [0]
    commands = JetStreamCommands(wire, Requests(wire), LogListener())

    async def handle(payload: bytes, _reply: Reply) -> None:
        handled.append(json.loads(payload))

    async def other() -> None:
        while len(handled) < COMMANDS:
            await asyncio.sleep(0)
            turns[0] += 1

    async with commands.serve_payloads(SUBJECT, handle):
        await asyncio.sleep(0)
        for number in range(COMMANDS):
            wire.deliver(Sent(json.dumps(number).encode()))
        async with asyncio.timeout(10):
            await other()

    assert handled == list(range(COMMANDS))
    assert turns[0] >= COMMANDS / COMMANDS_A_TURN / 2


async def test_what_another_account_asks_in_a_flood_waits_behind_our_own_and_is_refused_alone() -> None:
    handled: list[str] = []
    wire = Wire()
    commands = JetStreamCommands(wire, Requests(wire), LogListener())

    async def handle(payload: bytes, _reply: Reply) -> None:
        handled.append(payload.decode())

    async with commands.serve_payloads(SUBJECT, handle):
        await asyncio.sleep(0)
        for _ in range(2 * COMMANDS_WAITING_MAX):
            wire.deliver(Sent(b"theirs", reply="_R_.other.1"))
        wire.deliver(Sent(b"ours"))
        await eventually(lambda: len(handled) > COMMANDS_WAITING_MAX)

    assert handled == ["ours", *["theirs"] * COMMANDS_WAITING_MAX]


async def test_others_have_a_turn_after_each_command_that_takes_long() -> None:
    handled, wire, turns = list[int](), Wire(), 0
    commands = JetStreamCommands(wire, Requests(wire), LogListener())

    async def handle(payload: bytes, _reply: Reply) -> None:
        time.sleep(TURN_SECONDS_MAX)  # noqa: ASYNC251 - decoding does not leave a turn, either
        handled.append(json.loads(payload))

    async with commands.serve_payloads(SUBJECT, handle):
        await asyncio.sleep(0)
        for number in range(COMMANDS_A_TURN):
            wire.deliver(Sent(json.dumps(number).encode()))
        while len(handled) < COMMANDS_A_TURN:
            await asyncio.sleep(0)
            turns += 1

    assert turns >= COMMANDS_A_TURN - 1


async def test_a_command_knows_how_long_it_waited_for_its_turn() -> None:
    waits: list[float] = []
    wire, last = Wire(), asyncio.Event()
    commands = JetStreamCommands(wire, Requests(wire), LogListener())

    async def handle(_payload: bytes, reply: Reply) -> None:
        waits.append(float(reply.waited))
        if len(waits) == 3:
            last.set()
        await asyncio.sleep(0.05)

    async with commands.serve_payloads(SUBJECT, handle):
        for _ in range(3):
            wire.deliver(Sent(b"1"))
        async with asyncio.timeout(10):
            await last.wait()

    assert waits[0] < waits[1] < waits[2]
    assert waits[2] >= 0.1


class Described:
    """Of a stream, what a reader asks of it while it reads on."""

    def next_subject(self, consumer: str) -> str:
        return "$JS.API.CONSUMER.MSG.NEXT.log." + consumer

    def entry(self, sequence: Sequence, subject: str, payload: bytes) -> LogEntry:
        return LogEntry(sequence, subject, payload, stored("engine-1", sequence, [sequence]))


def read_ahead(entries: int, described: Described) -> Reader:
    """A reader that has so many entries of the log in its buffer."""
    reader = Reader(Wire(), described, LogListener(), 1, (), lambda: None)  # type: ignore[arg-type]
    reader._pull.attached = True
    for number in range(1, entries + 1):
        place = f"$JS.ACK.log.reader.1.{number}.{number}.0.{entries - number}"
        reader._pull.buffer.append(Sent(b"{}", "pm.default.kv.engine-1", place))
    return reader


async def test_entries_that_were_read_ahead_are_folded_in_order_with_turns_for_others() -> None:
    folded: list[Sequence] = []
    turns = [0]
    reader = read_ahead(COMMANDS, Described())

    async def fold() -> None:
        while len(folded) < COMMANDS:
            entry = await reader.next()
            assert isinstance(entry, LogEntry)
            folded.append(entry.sequence)

    folding = asyncio.create_task(fold())
    async with asyncio.timeout(10):
        while not folding.done():
            await asyncio.sleep(0)
            turns[0] += 1
    await reader.close()

    assert folded == list(range(1, COMMANDS + 1))
    assert turns[0] >= COMMANDS / ENTRIES_A_TURN / 2


class SlowlyDescribed(Described):
    @override
    def entry(self, sequence: Sequence, subject: str, payload: bytes) -> LogEntry:
        time.sleep(TURN_SECONDS_MAX)
        return super().entry(sequence, subject, payload)


async def test_others_have_a_turn_after_each_entry_that_takes_long() -> None:
    entries, turns = ENTRIES_A_TURN // 4, 0
    reader = read_ahead(entries, SlowlyDescribed())

    async def read() -> None:
        for _ in range(entries):
            assert await reader.next() is not None

    reading = asyncio.create_task(read())
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    await reader.close()

    assert turns >= entries - 1
