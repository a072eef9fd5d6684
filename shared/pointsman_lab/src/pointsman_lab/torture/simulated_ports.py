"""The ports of a service over a simulated link: log, commands, leases and checkpoints."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from typing_extensions import override

from pointsman.adapters.command_decoding import DecodingCommands
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestHandedOver
from pointsman.ports import (
    CheckpointLabel,
    Checkpoints,
    Clock,
    EventLog,
    Fence,
    Lease,
    LogEntry,
    LogExtent,
    LogReset,
    LogUnavailableError,
    OnStored,
    PayloadHandler,
    Tenure,
    UnconfirmedWrites,
)
from pointsman.ports import Link as Ports
from pointsman.primitives import Sequence, Term, WallSeconds
from pointsman_lab.memory.commands import CommandService
from pointsman_lab.torture.link import Link
from pointsman_lab.torture.network import Network

APPEND_SECONDS_MAX = 4.0
EXTENT_SECONDS_MAX = 2.0


def open_link(
    network: Network, clock: Clock, *, name: str, window_max: int, on_failure: Callable[[str, Exception], None]
) -> Link:
    link = Link(network, clock, name=name, window_max=window_max, on_failure=on_failure)
    link.ports = Ports(
        SimulatedLog(link),
        SimulatedCommands(link),
        SimulatedLease(link, network.broker.lease),
        SimulatedCheckpoints(link),
        SimulatedLease(link, network.broker.scaler_lease),
        network.broker.access,
    )
    network.links.append(link)
    return link


class SimulatedLog(EventLog):
    def __init__(self, link: Link) -> None:
        self._link = link
        self._stored = link.network.broker.client(link.clock, name=link.name).log

    @override
    async def append(self, event: LogEvent) -> Sequence:
        return await self._written(event, None)

    @override
    def append_soon(self, event: LogEvent, fence: Fence | None = None, on_stored: OnStored | None = None) -> None:
        assert on_stored is None, "nothing is traced here"
        if isinstance(event, RequestGranted | RequestHandedOver) and event.stamp is None:
            self._link.forget_answer(event.request)
        self._link.window.put(event, fence=fence)

    @property
    @override
    def write_load(self) -> float:
        return self._link.window.load

    @property
    @override
    def unconfirmed(self) -> UnconfirmedWrites:
        return self._link.window.unconfirmed

    @override
    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        fence = Fence(await self._written(event, after))
        self._link.continuity.fence = fence
        return fence

    async def _written(self, event: LogEvent, elected_after: Sequence | None) -> Sequence:
        done: asyncio.Future[Sequence] = asyncio.get_running_loop().create_future()
        number = self._link.window.put(event, done, elected_after=elected_after)
        try:
            async with asyncio.timeout(APPEND_SECONDS_MAX):
                return await done
        except TimeoutError as error:
            raise LogUnavailableError(f"not confirmed within {APPEND_SECONDS_MAX:g} s") from error
        finally:
            self._link.window.withdraw(number)

    @override
    async def flush(self, timeout: WallSeconds) -> bool:
        try:
            async with asyncio.timeout(float(timeout)):
                await self._link.window.idle.wait()
        except TimeoutError:
            return False
        return True

    @override
    async def extent(self) -> LogExtent:
        try:
            async with asyncio.timeout(EXTENT_SECONDS_MAX):
                await self._link.one_delay()
        except TimeoutError as error:
            raise LogUnavailableError("the server does not answer") from error
        return self._link.network.broker.extent

    @override
    async def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LogEntry | LogReset]:
        loop = asyncio.get_running_loop()
        fresh_at = -1.0
        async for found in self._stored.read(start, kinds=kinds, at_end=at_end):
            self._link.continuity.note(found)
            if loop.time() != fresh_at or not self._link.reaches_log:
                await self._link.one_delay()
                fresh_at = loop.time()
            if isinstance(found, LogEntry) and isinstance(found.event, LeaderElected):
                self._link.term = max(self._link.term, found.event.term)
            elif isinstance(found, LogReset):
                self._link.term = Term(0)
            if isinstance(found, LogEntry):
                self._link.network.reads(self._link.name, found.sequence)
            yield found


class SimulatedCommands(DecodingCommands):
    def __init__(self, link: Link) -> None:
        super().__init__(LogListener())
        self._link = link

    @property
    @override
    def connected(self) -> bool:
        return self._link.connected

    @override
    async def request_bytes(self, subject: str, payload: bytes, *, timeout: WallSeconds) -> bytes:
        return await self._link.ask(subject, payload, float(timeout))

    @override
    @asynccontextmanager
    async def serve_payloads(self, subject: str, handler: PayloadHandler, *, queue: str = "") -> AsyncIterator[None]:
        """Nobody asks here, so nobody is chosen."""
        service = CommandService(subject, handler, _Failures(self._link))
        work = asyncio.create_task(service.work())
        self._link.network.serve(subject, self._link, service)
        try:
            yield
        finally:
            if vars(self._link):  # else the run has been forgotten
                self._link.network.unserve(subject, self._link, service)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


class SimulatedLease(Lease):
    def __init__(self, link: Link, kept: Lease) -> None:
        self._link = link
        self._kept = kept

    @override
    async def look(self) -> Tenure | None:
        await self._link.one_way()
        found = await self._kept.look()
        await self._link.one_way()
        return found

    @override
    async def put(self, holder: str, term: Term, *, after: int) -> Tenure:
        await self._link.one_way()
        before = await self._kept.look()
        written = await self._kept.put(holder, term, after=after)
        if before is None or before.term != term:
            self._link.network.ambush(self._link.name)
        await self._link.one_way()
        return written


class SimulatedCheckpoints(Checkpoints):
    def __init__(self, link: Link) -> None:
        self._link = link

    @override
    async def save(
        self, label: CheckpointLabel, content: bytes, *, head_bytes: int = 0, log_begins: Sequence = 1
    ) -> None:
        await self._link.one_way()
        kept = self._link.network.broker.checkpoints
        await kept.save(label, content, head_bytes=head_bytes, log_begins=log_begins)
        self._link.network.checkpointed = max(self._link.network.checkpointed, label.as_of)
        await self._link.one_way()

    @override
    async def labels(self) -> list[CheckpointLabel]:
        await self._link.one_way()
        return await self._link.network.broker.checkpoints.labels()

    @override
    async def load(self, label: CheckpointLabel) -> bytes | None:
        await self._link.one_way()
        return await self._link.network.broker.checkpoints.load(label)

    @override
    async def load_head(self, label: CheckpointLabel) -> bytes | None:
        await self._link.one_way()
        return await self._link.network.broker.checkpoints.load_head(label)


class _Failures(LogListener):
    """Whatever a handler raises is a finding."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @override
    def handler_failed(self, subject: str, error: Exception) -> None:
        self._link.on_failure(subject, error)
