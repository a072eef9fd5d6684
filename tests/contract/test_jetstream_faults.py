"""What the JetStream adapter does when single messages go astray: the server's part is played by the test."""

import asyncio
import gc
import json
import signal
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client as NatsClient
from typing_extensions import override

from pointsman.adapters import jetstream
from pointsman.adapters.checkpoint_retention import CHECKPOINTS_KEPT
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import Identity, commands, producer
from pointsman.adapters.jetstream.checkpoints import CHUNK_BYTES, READ_AHEAD, JetStreamCheckpoints
from pointsman.adapters.jetstream.client import CONNECT_SECONDS_MAX, PING_SECONDS, PINGS_UNANSWERED_MAX
from pointsman.adapters.jetstream.connection import (
    Connection,
    Message,
    NotConnectedError,
    OnMessage,
    Subscription,
    UnsendableError,
)
from pointsman.adapters.jetstream.consumer import READ_AHEAD_MAX, Reader
from pointsman.adapters.jetstream.direct_stream import DirectStream, Found
from pointsman.adapters.jetstream.log import JetStreamLog
from pointsman.adapters.jetstream.producer import REFUSALS_MAX, WindowSettings, WriteWindow
from pointsman.adapters.jetstream.stream import Stream, StreamSettings
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.codec import AnyCommand, decode_event, encode
from pointsman.contracts.commands import CancelRequest, DescribeFleet
from pointsman.contracts.decisions import WritesLost
from pointsman.contracts.subjects import log_subjects
from pointsman.ports import (
    CheckpointLabel,
    Checkpoints,
    CommandTimeoutError,
    CommandTooLargeError,
    Fence,
    Link,
    LogEntry,
    LogExtent,
    LogUnavailableError,
    NoResponderError,
    Reply,
    StoreUnavailableError,
)
from pointsman.primitives import PoolName, RequestId, WallSeconds
from pointsman.runtime.checkpoint_fingerprint import fold_version
from pointsman.runtime.embedded_nats import MAX_PAYLOAD_BYTES
from tests.support.certificates import Authority
from tests.support.events import stored
from tests.support.log_worlds import RememberingListener
from tests.support.nats import embedded_nats, running_nats
from tests.support.waiting import eventually

POOL = PoolName("default")
UNANSWERED_SECONDS = PING_SECONDS * (PINGS_UNANSWERED_MAX + 1)
SET_POLICIES = b'{"type":"TenantPoliciesSet","at":1.0,"policies":{}}'


@dataclass
class Arrived:
    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None


class StagedWire(Connection):
    """Keeps what is sent; the test answers."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.payloads: list[bytes] = []
        self.up = True
        self._deliver: OnMessage | None = None
        self._inbox = ""
        self._watchers: list[Callable[[bool], None]] = []

    @property
    @override
    def connected(self) -> bool:
        return self.up

    @override
    def on_forbidden(self, on_forbidden: Callable[[str, str], None]) -> None: ...

    @override
    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None, room: int = 0
    ) -> None:
        if not self.up:
            raise NotConnectedError
        if len(payload) > 1000:
            raise UnsendableError("too large")
        assert headers is not None
        self._inbox, _, number = reply.rpartition(".")
        self.sent.append((int(number), headers["Nats-Msg-Id"]))
        self.payloads.append(payload)

    @override
    def write_now(self) -> None: ...

    @override
    async def subscribe(self, subject: str, on_message: OnMessage, *, queue: str = "") -> Subscription:
        self._deliver = on_message
        return self

    async def close(self) -> None:
        return

    @override
    def on_change(self, on_change: Callable[[bool], None]) -> Callable[[], None]:
        self._watchers.append(on_change)
        return lambda: None

    def change(self, *, up: bool) -> None:
        self.up = up
        for hear in self._watchers:
            hear(up)

    async def answer(self, number: int, answer: bytes = b'{"stream":"S","seq":1}', status: str = "") -> None:
        assert self._deliver is not None
        headers = {"Status": status} if status else None
        self._deliver(Arrived(f"{self._inbox}.{number}", answer, headers=headers))

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.sent]


class Answered:
    """Requests that all get one answer."""

    api = "$JS.API."

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    async def request(self, _subject: str, _payload: bytes, _timeout: float, _headers: Any = None) -> bytes:
        return self.answer


class DescribedStream:
    """Always described at once."""

    def __init__(self) -> None:
        self.asked = 0

    def new_inbox(self) -> str:
        return "_INBOX.w"

    def saw(self, sequence: int) -> None:
        pass

    async def ensure(self) -> tuple[LogExtent, list[str], int]:
        self.asked += 1
        return LogExtent(identity="log", first=1, last=1), [], 3


class Stage:
    """A write window and what plays its server."""

    def __init__(self, settings: WindowSettings) -> None:
        self.wire = StagedWire()
        self.listener = RememberingListener()
        self.no_stream = 0
        self.window = WriteWindow(
            self.wire,
            POOL,
            ScaledClock(),
            self.listener,
            writer="w",
            settings=settings,
            inbox="_INBOX.w",
            on_no_stream=self._no_stream,
            on_confirmed=lambda _sequence: None,
        )

    def _no_stream(self) -> None:
        self.no_stream += 1

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.window.put(stored("engine-1", number, [number]))

    async def sent(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.wire.sent) < count:  # noqa: ASYNC110 - waits for timers
                await asyncio.sleep(0.01)


@pytest.fixture
def quick() -> WindowSettings:
    return WindowSettings(events_max=8, ack_seconds_max=0.1)


async def opened(settings: WindowSettings) -> Stage:
    """A window whose first write is confirmed, so that others may follow side by side."""
    stage = Stage(settings)
    await stage.window.open()
    stage.window.resume()
    stage.put(1)
    await stage.wire.answer(1)
    stage.wire.sent.clear()
    stage.wire.payloads.clear()
    return stage


async def test_what_is_not_confirmed_is_sent_again_from_the_oldest_on_under_the_same_ids(quick: WindowSettings) -> None:
    stage = await opened(quick)
    stage.put(2, 3, 4)
    await stage.wire.answer(3)
    await stage.sent(4)

    assert stage.wire.numbers == [2, 3, 4, 2]  # the oldest alone: is anybody there?
    await stage.wire.answer(2)
    assert stage.wire.numbers == [2, 3, 4, 2, 4]
    await stage.wire.answer(4)
    assert await stage.window.flushed(0.1)
    assert stage.wire.sent[0] == stage.wire.sent[3]


async def test_a_broken_connection_sends_what_was_under_way_again(quick: WindowSettings) -> None:
    stage = await opened(quick)
    stage.put(2, 3)
    stage.wire.change(up=False)
    stage.put(4)
    stage.wire.change(up=True)
    stage.window.resume()
    for number in (2, 3, 4):
        await stage.wire.answer(number)

    assert stage.wire.numbers == [2, 3, 2, 3, 4]
    assert await stage.window.flushed(0.1)


async def test_without_a_stream_writes_wait_and_somebody_is_told(quick: WindowSettings) -> None:
    stage = await opened(quick)
    stage.put(2)
    await stage.wire.answer(2, b"", status="503")
    await stage.sent(2)
    await stage.wire.answer(2)

    assert stage.no_stream == 1
    assert stage.listener.losses == []
    assert await stage.window.flushed(0.1)


async def test_the_end_tells_once_how_many_writes_it_drops() -> None:
    stage = await opened(WindowSettings(ack_seconds_max=60))
    stage.put(2, 3, 4, 5, 6)
    await stage.wire.answer(2)
    appended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stage.window.put(stored("engine-1", 7, [7]), appended)
    stage.window.close()

    assert stage.listener.drops == [4]
    assert stage.listener.losses == []
    assert isinstance(appended.exception(), LogUnavailableError), "its writer knows"


async def test_a_write_that_is_refused_again_and_again_is_given_up_and_the_loss_marked() -> None:
    stage = await opened(WindowSettings(ack_seconds_max=60))
    stage.put(2, 3)
    for tries in range(REFUSALS_MAX):
        await stage.sent(2 + tries)
        await stage.wire.answer(2, b'{"error":{"code":500,"description":"no"}}')
    await stage.sent(2 + REFUSALS_MAX)
    await stage.wire.answer(3)

    assert stage.listener.losses == ["no"]
    lost = decode_event(stage.wire.payloads[-1])
    assert isinstance(lost, WritesLost)
    assert (lost.writer, lost.count, lost.reason) == ("w", 1, "no")


async def test_a_write_that_the_servers_still_replicate_is_repeated_until_it_is_confirmed() -> None:
    stage = await opened(WindowSettings(ack_seconds_max=60))
    stage.put(2)
    for tries in range(REFUSALS_MAX + 1):
        await stage.sent(1 + tries)
        await stage.wire.answer(2, b'{"error":{"err_code":10158,"description":"duplicate message id is in process"}}')
    await stage.sent(2 + REFUSALS_MAX)
    await stage.wire.answer(2)

    assert stage.listener.losses == []
    assert len(set(stage.wire.sent)) == 1
    assert await stage.window.flushed(0.1)


async def test_a_slow_server_is_sent_as_much_as_it_does_in_half_a_second_and_a_quick_one_everything() -> None:
    stage, loop = await opened(WindowSettings(ack_seconds_max=60)), asyncio.get_running_loop()
    began = loop.time()
    stage.put(2)
    await asyncio.sleep(0.1)
    await stage.wire.answer(2)
    took = loop.time() - began
    stage.put(*range(3, 53))

    under_way = len(stage.wire.sent) - 1
    assert max(1, int(0.5 / took)) <= under_way <= 5
    for number in range(3, 3 + under_way):
        await stage.wire.answer(number)
    assert stage.wire.numbers == list(range(2, 53))
    assert stage.listener.losses == []


@pytest.mark.parametrize(
    ("code", "said"),
    [(10047, "insufficient storage resources available"), (10002, "resource limits exceeded for account")],
)
async def test_a_server_without_room_is_asked_again_until_it_has_some_and_says_what_is_wrong(
    code: int, said: str
) -> None:
    stage = await opened(WindowSettings(ack_seconds_max=60))
    stage.put(2, 3)
    for tries in range(REFUSALS_MAX + 1):
        await stage.sent(2 + tries)
        refusal = {"code": 500, "err_code": code, "description": said}
        await stage.wire.answer(2, json.dumps({"error": refusal}).encode())
        assert stage.listener.stalled_now
    await stage.sent(2 + REFUSALS_MAX + 1)
    await stage.wire.answer(2)
    await stage.wire.answer(3)

    assert stage.listener.losses == []
    assert not stage.listener.stalled_now
    assert await stage.window.flushed(0.1)


async def test_a_write_that_nobody_confirms_is_lost_before_the_server_forgets_its_id(
    quick: WindowSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again after that it would be stored twice."""
    monkeypatch.setattr(producer, "UNCONFIRMED_SECONDS_MAX", 0.2)
    stage = await opened(quick)
    stage.put(2)

    await eventually(lambda: stage.listener.losses)


async def test_the_load_of_the_window_is_its_fullest_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = await opened(WindowSettings(events_max=8, ack_seconds_max=60))
    assert stage.window.load == 0.0
    stage.put(2, 3, 4, 5)
    assert stage.window.load == pytest.approx(0.5)
    monkeypatch.setattr(producer, "UNCONFIRMED_SECONDS_MAX", 0.2)
    await asyncio.sleep(0.15)
    assert stage.window.load > 0.7
    for number in (2, 3, 4, 5):
        await stage.wire.answer(number)
    assert stage.window.load == 0.0

    narrow = await opened(WindowSettings(bytes_max=1000, ack_seconds_max=60))
    narrow.put(2)
    assert narrow.window.load == pytest.approx(len(narrow.wire.payloads[-1]) / 1000)


async def test_a_writer_that_gave_up_and_writes_nothing_more_is_not_stalled_for_ever(
    quick: WindowSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its alert is critical, and no confirmation comes that would end it."""
    monkeypatch.setattr(producer, "STALLED_SECONDS", 0.05)
    monkeypatch.setattr(producer, "STALL_FORGOTTEN_SECONDS", 1.0)
    stage = await opened(quick)
    for number in (2, 3):
        done = asyncio.get_running_loop().create_future()
        put = stage.window.put(stored("engine-1", number, [number]), done)
        await eventually(lambda: stage.listener.stalled_now)
        stage.window.withdraw(put)
        await asyncio.sleep(0.6)
        assert stage.listener.stalled_now, "it was written again meanwhile"

    await eventually(lambda: not stage.listener.stalled_now)
    stage.put(4)
    assert stage.window.unconfirmed.wait_seconds < WallSeconds(0.5)


async def test_a_writer_whose_last_writes_were_fenced_off_is_stalled_no_more(
    quick: WindowSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "STALLED_SECONDS", 0.05)
    stage = await opened(quick)
    fence = Fence(1)
    stage.window.put(stored("engine-1", 2, [2]), fence=fence)
    await eventually(lambda: stage.listener.stalled_now)
    fence.broken = "another leader was elected"

    await eventually(lambda: not stage.listener.stalled_now)
    assert await stage.window.flushed(0.1)


async def test_a_stream_that_takes_no_writes_yet_is_not_asked_about_without_a_pause(quick: WindowSettings) -> None:
    """As seen with three servers just after an election: it is described at once, and nobody takes a write."""
    stream, wire = DescribedStream(), StagedWire()
    elections: DirectStream = stream  # type: ignore[assignment]
    log = JetStreamLog(wire, stream, elections, POOL, ScaledClock(), RememberingListener(), "w", quick)  # type: ignore[arg-type]
    await log.open()
    keeping = asyncio.create_task(log.keep_stream())
    log.append_soon(stored("engine-1", 1, [1]))
    wire.change(up=True)
    for _ in range(200):
        await asyncio.sleep(0)
        if wire.sent:
            await wire.answer(wire.numbers[-1], b"", status="503")
    keeping.cancel()

    assert 1 <= stream.asked <= 5


async def test_a_log_that_has_become_shorter_is_believed_at_once_of_one_server_and_of_several_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that takes the log over may answer before it has applied what the last one confirmed."""
    monkeypatch.setattr("pointsman.adapters.jetstream.stream.LAG_SECONDS_MAX", 0.2)
    peers = {"cluster": {"leader": "a", "replicas": [{"active": 0}, {"active": 0}]}}
    shorter = {"config": {}, "state": {"first_seq": 1, "last_seq": 7}}
    requests = [Answered(json.dumps({"created": "log"} | shorter | cluster).encode()) for cluster in (peers, {})]
    several, one = (Stream(made, POOL, StreamSettings()) for made in requests)  # type: ignore[arg-type]
    for stream in (several, one):
        await stream.extent()
        stream.saw(8)

    assert (await one.extent()).last == 7
    with pytest.raises(LogUnavailableError, match="7 entries of the log, 8 were seen"):
        await several.extent()
    await asyncio.sleep(0.25)
    assert (await several.extent()).last == 7
    assert (await several.extent()).last == 7
    several.saw(8)
    requests[0].answer = json.dumps({"created": "another"} | shorter | peers).encode()
    assert (await several.extent()).identity == "another"


@pytest.mark.parametrize(
    ("leader", "silent_seconds", "believed"),
    [("a", (0.9, 0.9), True), ("a", (0.9, 9.0), True), ("a", (3.5, 9.0), False), ("", (0.9, 0.9), False)],
)
async def test_how_far_the_log_goes_is_believed_only_of_a_server_that_hears_a_majority(
    leader: str, silent_seconds: tuple[float, ...], believed: bool
) -> None:
    """A leader that was cut off answers for ten seconds more, with what it had; others have written on (measured)."""
    replicas = [{"name": "s", "current": True, "active": int(seconds * 1e9)} for seconds in silent_seconds]
    described = {"created": "log", "config": {}, "state": {"first_seq": 1, "last_seq": 7}}
    answer = json.dumps(described | {"cluster": {"leader": leader, "replicas": replicas}}).encode()
    stream = Stream(Answered(answer), POOL, StreamSettings())  # type: ignore[arg-type]

    if believed:
        assert (await stream.extent()).last == 7
    else:
        with pytest.raises(LogUnavailableError, match="no majority"):
            await stream.extent()


async def test_copies_of_the_log_that_lack_entries_are_counted() -> None:
    """As a server without room on its disk answered, and one that had ended (measured)."""
    full = {"name": "n1", "current": False, "active": 10_000_000, "lag": 2967}
    ended = {"name": "n2", "current": False, "active": 0, "lag": 8}
    well = {"name": "n3", "current": True, "active": 400_000}
    for replicas, behind in (([], 0), ([well, well], 0), ([full, well], 1), ([ended, well], 1)):
        cluster = {"cluster": {"leader": "n4", "replicas": replicas}}
        answer = json.dumps({"created": "log", "config": {}, "state": {"first_seq": 1, "last_seq": 7}} | cluster)
        stream = Stream(Answered(answer.encode()), POOL, StreamSettings())  # type: ignore[arg-type]

        assert (await stream.extent()).copies_behind == behind


async def test_an_answer_that_is_none_is_as_good_as_no_answer(quick: WindowSettings) -> None:
    """On a bus without users anybody may answer before the server does. The task that keeps the stream ended at that, unseen."""
    nonsense: Any = Answered(b"nonsense")
    stream, direct = Stream(nonsense, POOL, StreamSettings()), DirectStream(nonsense, "S")
    for call in (stream.ensure(), stream.extent(), stream.create_consumer("c", 1, ())):
        with pytest.raises(LogUnavailableError, match="not understood"):
            await call
    for direct_call in (direct.write("s", b""), direct.last("s"), direct.next("s", 1), direct.purge("s")):
        with pytest.raises(StoreUnavailableError, match="not understood"):
            await direct_call
    stage = await opened(quick)
    stage.put(2)
    with pytest.raises(msgspec.DecodeError):  # the connection tells it and goes on
        await stage.wire.answer(2, b"nonsense")
    await stage.sent(2)
    await stage.wire.answer(2)

    assert await stage.window.flushed(0.1)
    assert stage.window.load == 0.0


async def test_a_message_too_large_to_send_does_not_hold_up_the_next(quick: WindowSettings) -> None:
    stage = await opened(quick)
    stage.window.put(stored("engine-1", 2, list(range(1000))))
    stage.put(3)

    assert stage.wire.numbers == [3]
    assert stage.listener.losses == ["too large"]


async def test_a_message_lost_on_the_way_to_a_reader_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = Reader._on_message
    seen = 0

    def drop_the_third(reader: Reader, message: Message) -> None:
        nonlocal seen
        seen += 1
        if seen != 3:
            deliver(reader, message)

    monkeypatch.setattr(Reader, "_on_message", drop_the_third)
    listener = RememberingListener()
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="test", listener=listener) as link,
    ):
        for number in range(1, 6):
            await link.log.append(stored("engine-1", number, [number]))
        async with aclosing(link.log.read()) as reading:  # type: ignore[type-var]
            found = [await anext(reading) for _ in range(5)]

    assert [entry.sequence for entry in found if isinstance(entry, LogEntry)] == [1, 2, 3, 4, 5]
    assert listener.resets == []
    assert any("hole" in trouble for trouble in listener.troubles)


@pytest.mark.parametrize("error", [RuntimeError("a defect"), asyncio.CancelledError()])
async def test_the_end_of_what_runs_in_the_background_is_told(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_log: JetStreamLog) -> None:
        raise error

    monkeypatch.setattr(JetStreamLog, "keep_stream", fails)
    listener = RememberingListener()
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="test", listener=listener),
    ):
        await eventually(lambda: listener.missing)

    reason = "it was cancelled" if isinstance(error, asyncio.CancelledError) else repr(error)
    assert listener.missing == [f"task stream ended: {reason}; restart this process"]


async def test_a_consumer_that_the_server_forgot_is_made_anew(tmp_path: Path) -> None:
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="test") as link,
        aclosing(link.log.read()) as reading,  # type: ignore[type-var]
    ):
        await link.log.append(stored("engine-1", 1, [1]))
        assert isinstance(await anext(reading), LogEntry)
        names = await link.commands.request_bytes(
            "$JS.API.CONSUMER.NAMES.POINTSMAN_default", b"", timeout=WallSeconds(2)
        )
        consumer = names.decode().split('"consumers":["')[1].split('"')[0]
        await link.commands.request_bytes(
            f"$JS.API.CONSUMER.DELETE.POINTSMAN_default.{consumer}", b"", timeout=WallSeconds(2)
        )
        await link.log.append(stored("engine-1", 2, [2]))

        async with asyncio.timeout(3):
            entry = await anext(reading)

    assert isinstance(entry, LogEntry)
    assert entry.sequence == 2


async def test_a_server_that_stood_still_while_somebody_subscribed_is_heard_as_soon_as_it_goes_on(
    tmp_path: Path,
) -> None:
    async with (
        embedded_nats(tmp_path / "nats") as server,
        jetstream.connect(server.url, POOL, ScaledClock(), name="test") as link,
    ):
        await link.log.append(stored("engine-1", 1, [1]))
        server.process.send_signal(signal.SIGSTOP)
        async with link.commands.serve("pm.default.test", _answer_nothing):  # a round trip that is given up
            server.process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(2):
                await link.log.append(stored("engine-1", 2, [2]))


async def test_commands_served_from_a_time_without_a_connection_on_are_answered_once_it_is_back(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with AsyncExitStack() as first:
        url = await first.enter_async_context(running_nats(tmp_path, port))
        async with jetstream.connect(url, POOL, ScaledClock(), name="test") as link:
            await eventually(lambda: link.commands.connected)
            await first.aclose()
            await eventually(lambda: not link.commands.connected)
            async with link.commands.serve("pm.test.cmd.late", _answer_alike), running_nats(tmp_path, port):
                await eventually(lambda: link.commands.connected)
                answer = await link.commands.request("pm.test.cmd.late", DescribeFleet(), timeout=WallSeconds(5))

    assert answer == DescribeFleet()


async def test_who_is_cancelled_while_subscribing_leaves_no_subscription(tmp_path: Path) -> None:
    async with (
        embedded_nats(tmp_path / "nats") as server,
        jetstream.connect(server.url, POOL, ScaledClock(), name="test") as link,
    ):
        await eventually(lambda: link.commands.connected)
        server.process.send_signal(signal.SIGSTOP)
        serving = asyncio.create_task(link.commands.serve("pm.test.cmd.left", _answer_alike).__aenter__())
        await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.wait([serving])
        server.process.send_signal(signal.SIGCONT)

        with pytest.raises(NoResponderError):
            await link.commands.request("pm.test.cmd.left", DescribeFleet(), timeout=WallSeconds(2))


async def test_an_error_that_ends_the_reconnecting_of_nats_py_is_told_and_another_client_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,), listener, broken = free_ports(1), RememberingListener(), asyncio.Event()
    command = NatsClient._connect_command

    def broken_once(client: NatsClient) -> bytes:
        if client._reconnection_task is not None and not broken.is_set():
            broken.set()
            raise TypeError("no seed")
        return command(client)

    monkeypatch.setattr(NatsClient, "_connect_command", broken_once)
    async with AsyncExitStack() as first:
        url = await first.enter_async_context(running_nats(tmp_path, port))
        async with jetstream.connect(url, POOL, ScaledClock(), name="test", listener=listener) as link:
            await eventually(lambda: link.commands.connected)
            await first.aclose()
            await eventually(lambda: not link.commands.connected)
            async with running_nats(tmp_path, port):
                await eventually(lambda: link.commands.connected)

    assert broken.is_set()
    assert any("no seed" in reason for reason in listener.reasons)


async def test_an_error_of_the_first_attempt_is_told_and_another_attempt_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, listener = 0, RememberingListener()
    command = NatsClient._connect_command

    def broken_once(client: NatsClient) -> bytes:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise TypeError("no seed")
        return command(client)

    monkeypatch.setattr(NatsClient, "_connect_command", broken_once)
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="test", listener=listener) as link,
    ):
        await eventually(lambda: link.commands.connected)

    assert listener.reasons == ["TypeError: no seed"]


@pytest.mark.parametrize("speaks", [False, True])
async def test_a_sick_server_that_is_asked_first_keeps_nobody_from_the_others(speaks: bool, tmp_path: Path) -> None:
    """It takes connections, and then says nothing or something else."""
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        if speaks:
            writer.write(b"-ERR 'sick'\r\n")
        await reader.read()
        writer.close()

    async with running_nats(tmp_path) as healthy, await asyncio.start_server(answer, "127.0.0.1", 0) as sick:
        (port,) = {each.getsockname()[1] for each in sick.sockets}
        urls = f"{healthy.replace('127.0.0.1', '0.0.0.0')},nats://127.0.0.1:{port}"  # a loopback address is asked first
        async with jetstream.connect(urls, POOL, ScaledClock(), name="test") as link:
            await eventually(lambda: link.commands.connected)

    assert asked.is_set()


@pytest.mark.parametrize("tls", [False, True], ids=["in the clear", "tls"])
async def test_a_server_that_stops_reading_is_left_for_another_once_its_pings_are_unanswered(
    tmp_path: Path, *, tls: bool
) -> None:
    identity, offered = _tls_of(tmp_path) if tls else (Identity(), "")
    other_port, unsent = free_ports(1)[0], bytes(MAX_PAYLOAD_BYTES // 2)
    async with embedded_nats(tmp_path / "one", accounts=offered) as frozen:
        urls = f"{frozen.url},nats://127.0.0.1:{other_port}"
        async with jetstream.connect(urls, POOL, ScaledClock(), name="test", identity=identity) as link:
            await eventually(lambda: link.commands.connected)
            async with embedded_nats(tmp_path / "other", other_port, accounts=offered):
                frozen.process.send_signal(signal.SIGSTOP)
                try:
                    for _ in range(5):  # more than the kernel keeps for a peer that does not read
                        with pytest.raises(CommandTimeoutError):
                            await link.commands.request_bytes("pm.test.large", unsent, timeout=WallSeconds(0.05))
                    async with asyncio.timeout(UNANSWERED_SECONDS + 6):
                        await eventually(partial(_has_server, link), seconds=60)
                finally:
                    frozen.process.send_signal(signal.SIGCONT)


async def test_a_server_that_freezes_within_the_tls_handshake_does_not_keep_a_client_from_the_next_attempt(
    tmp_path: Path,
) -> None:
    identity, offered = _tls_of(tmp_path)
    seen, ends = asyncio.Event(), asyncio.Event()

    async def freeze(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.11.0","max_payload":1000,"tls_required":true}\r\n')
        seen.set()
        await ends.wait()
        writer.close()

    frozen = await asyncio.start_server(freeze, "127.0.0.1")
    port: int = frozen.sockets[0].getsockname()[1]
    url = f"nats://127.0.0.1:{port}"
    async with jetstream.connect(url, POOL, ScaledClock(), name="test", identity=identity) as link:
        await seen.wait()
        frozen.close()
        async with embedded_nats(tmp_path / "nats", port, accounts=offered), asyncio.timeout(CONNECT_SECONDS_MAX + 6):
            await eventually(partial(_has_server, link), seconds=60)
    ends.set()


async def test_a_handshake_that_failed_leaves_no_connection_open(tmp_path: Path) -> None:
    """Without the garbage collector, which would close it some time."""
    opened = 0
    left: set[asyncio.StreamWriter] = set()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        left.add(writer)
        writer.write(b"not NATS\r\n")
        await reader.read()
        left.discard(writer)
        writer.close()

    port = free_ports(1)[0]
    gc.disable()
    try:
        async with jetstream.connect(f"nats://127.0.0.1:{port}", POOL, ScaledClock(), name="test") as link:
            async with embedded_nats(tmp_path / "nats", port):
                await eventually(lambda: link.commands.connected)
            async with await asyncio.start_server(refuse, "127.0.0.1", port):
                await eventually(lambda: opened > 3, seconds=30.0, what="several attempts")
                await eventually(lambda: len(left) < 2, seconds=1.0, what="the end of earlier attempts")
    finally:
        gc.enable()


async def test_a_client_that_is_closed_while_it_reconnects_stays_closed() -> None:
    """At each turn of the event loop that the attempt may have reached: in some of them nats-py does not end."""
    present: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        present.add(writer)
        writer.write(b'INFO {"version":"2.12.0","max_payload":1000000}\r\n')
        with suppress(OSError):
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        present.discard(writer)
        writer.close()

    one, other = [await asyncio.start_server(serve, "127.0.0.1") for _ in range(2)]  # none is asked twice at once
    async with one, other:
        url = ",".join(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (one, other))
        before = asyncio.all_tasks()
        for turns in range(60):
            async with jetstream.connect(url, POOL, ScaledClock(), name="test") as link:
                await eventually(lambda: link.commands.connected)
                for writer in present:
                    writer.transport.abort()
                for _ in range(turns):
                    await asyncio.sleep(0)

            await asyncio.sleep(0.02)  # in which it would connect anew
            left = {task for task in asyncio.all_tasks() - before if "Client" in repr(task.get_coro())}
            assert not left, f"closed after {turns} turns"
            await eventually(lambda: not present, what=f"the end of what was closed after {turns} turns")


def _tls_of(directory: Path) -> tuple[Identity, str]:
    """Of a client, and of the server's configuration."""
    authority = Authority(directory, "ours")
    server = authority.issue("server")
    offered = f'tls {{cert_file: "{server.certificate}", key_file: "{server.key}"}}\n'
    return Identity(ca=str(authority.file)), offered


async def _has_server(link: Link) -> bool:
    try:
        await link.commands.request_bytes("$JS.API.INFO", b"", timeout=WallSeconds(0.5))
    except (CommandTimeoutError, NoResponderError):
        return False
    return True


async def test_an_address_that_cannot_be_used_is_told() -> None:
    listener = RememberingListener()
    async with jetstream.connect("nats://127.0.0.1:99999", POOL, ScaledClock(), name="test", listener=listener):
        await eventually(lambda: listener.reasons)

    assert "invalid connect url" in listener.reasons[0]


async def _answer_alike(command: AnyCommand, reply: Reply) -> None:
    await reply(command)


async def _answer_nothing(_command: AnyCommand, _reply: Reply) -> None:
    return


async def test_a_reader_that_falls_behind_holds_a_bounded_part_and_misses_nothing(tmp_path: Path) -> None:
    written, waiting = 3 * READ_AHEAD_MAX, 0
    listener = RememberingListener()
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="test", listener=listener) as link,
        aclosing(link.log.read()) as slow,  # type: ignore[type-var]
        aclosing(link.log.read()) as fast,  # type: ignore[type-var]
    ):
        for number in range(1, written + 1):
            link.log.append_soon(stored("engine-1", number, [number]))
        assert isinstance(await anext(slow), LogEntry)
        async with asyncio.timeout(30):
            kept_up = [await anext(fast) for _ in range(written)]
        (reader,) = [r for r in gc.get_objects() if type(r) is Reader and r._progress.position == 1]
        waiting = len(reader._pull.buffer)
        async with asyncio.timeout(30):
            caught_up = [await anext(slow) for _ in range(written - 1)]

    assert 0 < waiting <= READ_AHEAD_MAX
    assert [e.sequence for e in kept_up if isinstance(e, LogEntry)] == list(range(1, written + 1))
    assert [e.sequence for e in caught_up if isinstance(e, LogEntry)] == list(range(2, written + 1))
    assert listener.resets == []
    assert not any("hole" in trouble for trouble in listener.troubles)


async def test_a_command_beyond_the_servers_max_payload_is_told_apart_from_one_that_nobody_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.runtime.embedded_nats.MAX_PAYLOAD_BYTES", 16 * 1024)

    async with running_nats(tmp_path) as url, jetstream.connect(url, POOL, ScaledClock(), name="client") as client:
        await eventually(lambda: client.commands.connected)
        fits = ("x" * 1000, NoResponderError)
        for reason, error in (fits, ("x" * 15_000, CommandTooLargeError), ("x" * 17_000, CommandTooLargeError)):
            command = CancelRequest(request=RequestId("r"), reason=reason)
            with pytest.raises(NoResponderError) as raised:
                await client.commands.request("pm.test.cmd.nobody", command, timeout=WallSeconds(10))

            assert type(raised.value) is error


@pytest.mark.parametrize(
    ("bound", "most"),
    [("COMMANDS_WAITING_MAX", 4), ("COMMANDS_WAITING_BYTES_MAX", 4 * len(encode(DescribeFleet())))],
    ids=["number", "bytes"],
)
async def test_commands_beyond_what_may_wait_are_dropped_and_their_askers_ask_again(
    bound: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, bound, most)
    listener = RememberingListener()
    goes_on, served = asyncio.Event(), 0

    async def slow(_command: AnyCommand, reply: Reply) -> None:
        nonlocal served
        await goes_on.wait()
        served += 1
        await reply(DescribeFleet())

    def dropped() -> int:
        return sum("too many wait" in trouble for trouble in listener.troubles)

    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="server", listener=listener) as server,
        jetstream.connect(url, POOL, ScaledClock(), name="client") as client,
        server.commands.serve("pm.test.cmd.slow", slow),
    ):

        async def ask(seconds: float = 30.0) -> bool:
            try:
                await client.commands.request("pm.test.cmd.slow", DescribeFleet(), timeout=WallSeconds(seconds))
            except (CommandTimeoutError, NoResponderError):
                return False
            return True

        goes_on.set()
        while not await ask():  # noqa: ASYNC110 - until both are connected
            await asyncio.sleep(0.05)
        goes_on.clear()
        *asked, last = [asyncio.create_task(ask(seconds)) for seconds in [30.0] * 19 + [1.0]]
        last_answered = await last
        await eventually(lambda: dropped() >= 15)
        goes_on.set()
        await eventually(lambda: served + dropped() == 21, what="each command is served or dropped")
        again = await ask()
        answered = sum(task.done() for task in asked)
        for task in asked:
            task.cancel()

    assert not last_answered
    assert 1 <= answered <= 5, "one in the handler's hands, four waiting"
    assert served == answered + 2
    assert again


async def test_a_checkpoint_that_somebody_deleted_or_damaged_makes_room_for_the_next_and_stops_none(
    tmp_path: Path,
) -> None:
    listener = RememberingListener()
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="test", listener=listener) as link,
    ):
        await eventually(lambda: link.commands.connected)
        labels = [_label(as_of) for as_of in range(1, 9)]
        for label in labels[:3]:
            await link.checkpoints.save(label, b"state")
        client = await nats.connect(url)
        try:
            name = {"name": "checkpoint-0", "bucket": "pointsman-default", "nuid": "checkpoint-0-a"}
            marker = json.dumps(name | {"size": 0, "chunks": 0, "deleted": True})
            for slot, description in (("checkpoint-0", marker), ("checkpoint-1", "{")):
                subject = f"$O.pointsman-default.M.{urlsafe_b64encode(slot.encode()).decode()}"
                await client.request(subject, description.encode(), headers={"Nats-Rollup": "sub"})
        finally:
            await client.close()

        assert await link.checkpoints.labels() == [labels[2]]
        assert await link.checkpoints.load(labels[0]) is None
        for label in labels[3:]:
            await link.checkpoints.save(label, b"state")
        assert len(await link.checkpoints.labels()) == 6
        assert await link.checkpoints.load(labels[3]) == b"state"

    assert [trouble.partition(":")[0] for trouble in listener.troubles] == [
        "checkpoint-1 is not understood and will be replaced"
    ]


async def test_a_strangers_description_with_numbers_that_are_too_long_ends_no_start(tmp_path: Path) -> None:
    long = "9" * 5000
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="test", listener=RememberingListener()) as link,
    ):
        await eventually(lambda: link.commands.connected)
        await link.checkpoints.save(_label(7), b"state")
        client = await nats.connect(url)
        try:
            name = {"name": "checkpoint-1", "bucket": "pointsman-default", "nuid": "checkpoint-1-a"}
            described = json.dumps(name | {"size": 0, "chunks": 0, "metadata": {"as_of": long, "form": f"{long}.x"}})
            subject = f"$O.pointsman-default.M.{urlsafe_b64encode(b'checkpoint-1').decode()}"
            await client.request(subject, described.encode(), headers={"Nats-Rollup": "sub"})
        finally:
            await client.close()
        ours, theirs = await link.checkpoints.labels()

    assert ours == _label(7)
    assert theirs.as_of == -1
    assert fold_version(theirs.form) is None


async def test_a_checkpoint_counts_as_stored_though_the_one_that_it_replaced_could_not_be_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_slow(_stream: DirectStream, _subject: str) -> None:
        raise StoreUnavailableError

    labels = [_label(as_of) for as_of in range(1, 4 * CHECKPOINTS_KEPT)]
    async with _checkpoints(tmp_path) as checkpoints:
        for label in labels[:CHECKPOINTS_KEPT]:
            await checkpoints.save(label, b"state")
        with monkeypatch.context() as slow:
            slow.setattr(DirectStream, "purge", too_slow)
            await checkpoints.save(labels[CHECKPOINTS_KEPT], b"state")

        assert (await checkpoints.labels())[0] == labels[CHECKPOINTS_KEPT]
        for label in labels[CHECKPOINTS_KEPT + 1 :]:
            await checkpoints.save(label, f"state of {label.as_of}".encode())
            assert await checkpoints.load(label) == f"state of {label.as_of}".encode()


async def test_a_chunk_that_takes_too_long_is_written_again_and_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fates = DirectStream.write, cycle(("lost", "unconfirmed", "confirmed"))
    content = bytes(7 * CHUNK_BYTES)

    async def slow(stream: DirectStream, subject: str, payload: bytes, **options: Any) -> int:
        fate = next(fates)
        sequence = 0 if fate == "lost" else await write(stream, subject, payload, **options)
        if fate != "confirmed":
            raise StoreUnavailableError
        return sequence

    async with _checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(DirectStream, "write", slow)
        await checkpoints.save(_label(1), content)

        assert await checkpoints.load(_label(1)) == content
        assert await _stored_chunks(checkpoints) == 7


async def test_chunks_of_a_checkpoint_are_read_ahead_again_and_in_order_whatever_lies_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read, gaps, under_way, most = DirectStream.write, DirectStream.next, cycle((0, 2, 9, 1)), 0, 0
    failing: set[int] = set()
    content = b"".join(bytes([number]) * CHUNK_BYTES for number in range(25))

    async def between_others(stream: DirectStream, subject: str, payload: bytes, **options: Any) -> int:
        for _ in range(next(gaps)):
            await write(stream, "$O.pointsman-default.C.other", b"other")
        return await write(stream, subject, payload, **options)

    async def failing_once(stream: DirectStream, subject: str, start: int) -> Found | None:
        nonlocal under_way, most
        if start not in failing:
            failing.add(start)
            raise StoreUnavailableError
        under_way += 1
        most = max(most, under_way)
        try:
            return await read(stream, subject, start)
        finally:
            under_way -= 1

    async with _checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(DirectStream, "write", between_others)
        await checkpoints.save(_label(1), content, head_bytes=10 * CHUNK_BYTES)
        monkeypatch.setattr(DirectStream, "next", failing_once)

        assert await checkpoints.load(_label(1)) == content
        assert await checkpoints.load_head(_label(1)) == content[: 10 * CHUNK_BYTES]
    assert 1 < most <= READ_AHEAD


async def test_checkpoints_are_looked_up_again_where_one_look_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, asked = DirectStream.last, set[str]()

    async def unanswered_once(stream: DirectStream, subject: str) -> Found | None:
        if subject not in asked:
            asked.add(subject)
            raise StoreUnavailableError
        return await last(stream, subject)

    async with _checkpoints(tmp_path) as checkpoints:
        await checkpoints.save(_label(1), b"state")
        monkeypatch.setattr(DirectStream, "last", unanswered_once)

        assert await checkpoints.labels() == [_label(1)]


async def test_of_two_who_write_one_checkpoint_at_a_time_one_is_told_and_no_mixture_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DirectStream.write

    async def followed(stream: DirectStream, subject: str, payload: bytes, **options: Any) -> int:
        sequence = await write(stream, subject, payload, **options)
        await write(stream, subject, b"of another process")
        return sequence

    async with _checkpoints(tmp_path) as checkpoints:
        await checkpoints.save(_label(1), b"first")
        with monkeypatch.context() as another:
            another.setattr(DirectStream, "write", followed)
            with pytest.raises(StoreUnavailableError, match="another process"):
                await checkpoints.save(_label(2), bytes(3 * CHUNK_BYTES))

        assert await checkpoints.labels() == [_label(1)]


async def _stored_chunks(checkpoints: Checkpoints) -> int:
    assert isinstance(checkpoints, JetStreamCheckpoints)
    count, sequence = 0, 0
    while (found := await checkpoints._bucket.next("$O.pointsman-default.C.>", sequence + 1)) is not None:
        count, sequence = count + 1, found.sequence
    return count


@asynccontextmanager
async def _checkpoints(directory: Path) -> AsyncIterator[Checkpoints]:
    async with running_nats(directory) as url, jetstream.connect(url, POOL, ScaledClock(), name="test") as link:
        await eventually(lambda: link.commands.connected)
        yield link.checkpoints


def _label(as_of: int) -> CheckpointLabel:
    return CheckpointLabel(identity="log", as_of=as_of, entry="e", form="1")


async def test_a_stream_of_an_earlier_version_gets_the_subjects_of_new_events(tmp_path: Path) -> None:
    async with running_nats(tmp_path) as url:
        old = {"name": "POINTSMAN_default", "subjects": ["pm.default.kv.*", "pm.default.lost"], "storage": "file"}
        client = await nats.connect(url)
        try:
            await client.request("$JS.API.STREAM.CREATE.POINTSMAN_default", json.dumps(old).encode())
            async with jetstream.connect(url, POOL, ScaledClock(1.0), name="test") as link:
                sequence = await link.log.append(decode_event(SET_POLICIES))
            info = json.loads((await client.request("$JS.API.STREAM.INFO.POINTSMAN_default")).data)
        finally:
            await client.close()
    assert sequence == 1
    assert set(info["config"]["subjects"]) == set(log_subjects(POOL))
