"""The network and the log server, with everything that can go wrong between a process and them.

The server is the `MemoryBroker`; what is here is the way to it, one `Link` for each life of a process. Writes go
through a window as in `adapters.jetstream`: sent at once, kept until confirmed, sent again in order under the same
message id. Every message takes time. It can be lost or carried twice, commands can overtake each other, a link can
be slow or cut, and it takes a while until a process notices that it is cut off. The server can go away and come back.

Apart from the faults there is one history: everything that was ever stored, and by whom, but for what the log itself has
lost.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from typing_extensions import override

from pointsman.adapters.memory_log import MemoryBroker
from pointsman.contracts.cache import BlocksRemoved, CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.codec import AnyCommand, LogEvent, UndecodableError, decode_command, encode
from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestHandedOver, WritesLost
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceSuspected,
    InstanceUndrained,
)
from pointsman.contracts.subjects import subject_of
from pointsman.ports import (
    CheckpointLabel,
    Checkpoints,
    Clock,
    CommandHandler,
    Commands,
    CommandTimeoutError,
    ElectionLostError,
    EventLog,
    Fence,
    Lease,
    LogEntry,
    LogExtent,
    LogReset,
    LogUnavailableError,
    NoResponderError,
    StoreUnavailableError,
    Tenure,
)
from pointsman.ports import Link as Ports
from pointsman.primitives import PoolName, RequestId, Seconds, Sequence, Term
from pointsman_lab.torture.loop import MOMENT_SECONDS, VirtualLoop

CALM_DELAY_SECONDS = 0.0004
"""Mean time that a message takes on a good day."""
DELAY_MEANS_MAX = 12.0
"""No message takes longer than so many means."""
ACK_SECONDS_MAX = 1.0
APPEND_SECONDS_MAX = 4.0
EXTENT_SECONDS_MAX = 2.0
STORE_SECONDS_MAX = 1.0
NOTICE_SECONDS_MAX = 3.0
"""How long a process may be cut off before it knows."""
ECHO_SECONDS_MAX = 4.0
LATE_ECHO_SECONDS_MAX = 15.0
"""How late an entry may come to stand in the log a second time."""
RARE_ECHOES = 6.0
RARE = (
    InstanceJoined,
    InstanceLeft,
    InstanceSuspected,
    InstanceDraining,
    InstanceUndrained,
    CacheSnapshot,
    CacheCleared,
    CacheGap,
)
"""Of these there are few, and a second copy is so many times as likely. Of an election there is none: the server compares
before it stores one."""
IN_FLIGHT_MAX = 1024
COMMANDS_WAITING_MAX = 4096


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """What happens to the messages of one link. `loss` and `doubling` are shares of all messages."""

    delay: Seconds = CALM_DELAY_SECONDS
    loss: float = 0.0
    doubling: float = 0.0


CALM = LinkConditions()


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry as it came into the log. `event` is None where nobody can read it. `echo`: it is a second copy, or no
    process of ours wrote it. `first`: what
    retention had left of the log by then."""

    sequence: Sequence
    at: Seconds
    writer: str
    event: LogEvent | None
    echo: bool = False
    first: Sequence = 1
    subject: str = ""
    problem: str = ""
    """Of an entry that nobody can read: where it is, and why, as every reader is told."""

    @property
    def stamp(self) -> Stamp | None:
        return self.event.stamp if self.event is not None else None


class Network:
    """The server, and how well it can be reached."""

    def __init__(self, pool: PoolName, loop: VirtualLoop, chance: Random) -> None:
        self.pool = pool
        self.loop = loop
        self.broker = MemoryBroker(pool)
        self.history: list[Stored] = []
        self.losses = 0
        """How often the log has lost its newest entries, or all of them."""
        self.echoes = 0.0
        """Share of entries that are stored once more, some seconds later."""
        self.damage = 0.0
        """Share of cache events that the server confirms and does not keep as they were."""
        self.checkpointed: Sequence = 1
        """The entry of the newest checkpoint: from there on the log must be kept."""
        self.ambush: Callable[[Link], None] = lambda _link: None
        """Called when a process has taken a lease for a new term, before it knows."""
        self.reads: Callable[[Link, Sequence], None] = lambda _link, _sequence: None
        """Called when a process is about to be given an entry of the log."""
        self.links: list[Link] = []
        self.chance = chance
        self._served: dict[str, list[_Served]] = {}
        self._written: dict[tuple[str, int], Sequence] = {}

    def link(self, clock: Clock, *, name: str, window_max: int, on_failure: Callable[[str, Exception], None]) -> "Link":
        link = Link(self, clock, name=name, window_max=window_max, on_failure=on_failure)
        self.links.append(link)
        return link

    def server_down(self) -> None:
        """The server dies; what it had confirmed is safe."""
        self.broker.available = False
        for link in self.links:
            link.lose_sight()

    def server_up(self) -> None:
        self.broker.available = True
        for link in self.links:
            link.find_again()

    def lose_newest(self, count: int) -> None:
        """While the server is down: what it had confirmed last was never on its disk, nor are the leases, which are in its
        memory. Other entries will have those sequences."""
        extent = self.broker.extent
        self.broker.lose_after(max(extent.first - 1, extent.last - count))
        for lease in (self.broker.lease, self.broker.scaler_lease):
            lease.forget()
        self._forget()

    def note_restart(self) -> None:
        """Somebody deletes the stream; another, without an entry, takes its place."""
        self.broker.recreate()
        self._forget()

    def _forget(self) -> None:
        last = self.broker.extent.last
        self.losses += 1
        del self.history[last:]
        self._written = {write: at for write, at in self._written.items() if at <= last}

    def expire(self, kept: int) -> None:
        """Retention: of the log the newest `kept` entries are left, and what is needed to go on from the newest
        checkpoint."""
        extent = self.broker.extent
        first = min(extent.last - kept + 1, self.checkpointed)
        if first > extent.first:
            self.broker.drop_before(first)

    def carry(
        self, weather: LinkConditions, act: Callable[..., None], *arguments: Any, not_before: Seconds = 0.0
    ) -> Seconds:
        """Bring one message over one link, or lose it, or bring it twice. When the last copy comes."""
        chance, now = self.chance, self.loop.time()
        if chance.random() < weather.loss:
            return not_before
        arrives = not_before
        for _ in range(2 if chance.random() < weather.doubling else 1):
            delay = min(chance.expovariate(1 / weather.delay), DELAY_MEANS_MAX * weather.delay)
            arrives = max(arrives + MOMENT_SECONDS, now + delay)
            self.loop.outside(arrives - now, act, *arguments)
        return arrives

    def store(self, writer: str, event: LogEvent, number: int, *, elected_after: Sequence | None = None) -> Sequence:
        """What the server does with a write. `number` tells the writer's writes apart: the same one again is stored once.

        `elected_after`: store it only if the newest LeaderElected is there. Raises ElectionLostError.
        """
        known = self._written.get((writer, number))
        if known is not None:
            return known
        if isinstance(event, CacheEvent) and self.chance.random() < self.damage:
            sequence = self._store_damaged(writer, event)
        else:
            last = self.broker.extent.last
            if elected_after is not None and isinstance(event, LeaderElected):
                sequence = self.broker.elect(event, elected_after)
            else:
                sequence = self.broker.store(event)
            if sequence > last:
                self._note(sequence, writer, event)
        self._written[writer, number] = sequence
        return sequence

    def serve(self, subject: str, served: "_Served") -> None:
        self._served.setdefault(subject, []).append(served)

    def unserve(self, subject: str, served: "_Served") -> None:
        if served in self._served.get(subject, []):
            self._served[subject].remove(served)

    def ask(self, asker: "Link", subject: str, payload: bytes, answer: "asyncio.Future[bytes]") -> None:
        """A command has come as far as the server."""
        if not self.broker.available:
            return
        listening = [served for served in self._served.get(subject, []) if served.link.subscribed]
        if not listening:
            self.carry(asker.weather, asker.hear_nobody, subject, answer)
        for served in listening:
            self.carry(served.link.weather, served.offer, payload, _Answer(self, served.link, asker, answer))

    def store_raw(self, subject: str, payload: bytes) -> None:
        """Somebody who is no process of ours writes these bytes."""
        sequence = self.broker.store_raw(subject, payload)
        read = LogEntry.read(sequence, subject, payload)
        stored = Stored(
            sequence, self.loop.time(), "a stranger", read.event, echo=True, subject=subject, problem=read.problem
        )
        self.history.append(stored)

    def _note(self, sequence: Sequence, writer: str, event: LogEvent) -> None:
        self.history.append(Stored(sequence, self.loop.time(), writer, event, first=self.broker.extent.first))
        share = min(1.0, RARE_ECHOES * self.echoes) if isinstance(event, RARE) else self.echoes
        if self.chance.random() < share and not isinstance(event, LeaderElected):
            seconds = self.chance.choice((ECHO_SECONDS_MAX, LATE_ECHO_SECONDS_MAX))
            self.loop.outside(self.chance.uniform(0.0, seconds), self._echo, event, writer, self.losses)

    def _echo(self, event: LogEvent, writer: str, losses: int) -> None:
        if losses != self.losses:
            return
        sequence = self.broker.store_raw(subject_of(self.pool, event), encode(event))
        self.history.append(Stored(sequence, self.loop.time(), writer, event, echo=True))

    def _store_damaged(self, writer: str, event: CacheEvent) -> Sequence:
        """Bytes that nobody can read, or, where keys were removed, other keys."""
        if isinstance(event, BlocksRemoved) or self.chance.random() < 0.5:
            subject, payload = subject_of(self.pool, event), b"\x00" + encode(event)
            sequence = self.broker.store_raw(subject, payload)
            problem = LogEntry.read(sequence, subject, payload).problem
            self.history.append(Stored(sequence, self.loop.time(), writer, None, subject=subject, problem=problem))
        else:
            altered = BlocksRemoved(
                at=event.at, instance=event.instance, epoch=event.epoch, sequence=event.sequence, keys=b""
            )
            sequence = self.broker.store_raw(subject_of(self.pool, event), encode(altered))
            self.history.append(Stored(sequence, self.loop.time(), writer, altered))
        return sequence


class Link:
    """One life of one process on the network: its log and its commands, and the faults of the way."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        *,
        name: str,
        window_max: int,
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        self.network = network
        self.clock = clock
        self.name = name
        self.weather = CALM
        self.alive = True
        self.cut = False
        """Nothing comes through, whether the process knows it or not."""
        self.connected = network.broker.available
        """What the process believes."""
        self.on_failure = on_failure
        self.window = _Window(self, window_max)
        self.log = SimulatedLog(self)
        self.commands = SimulatedCommands(self)
        self.lease = SimulatedLease(self, network.broker.lease)
        self.scaler_lease = SimulatedLease(self, network.broker.scaler_lease)
        self.checkpoints = SimulatedCheckpoints(self)
        self.term = Term(0)
        """The newest that this process has read of in the log."""
        self._answered: dict[RequestId, tuple[Term, Term]] = {}
        """By request: the term of the last answer, and the newest one known when it came."""
        self._waiting: list[asyncio.Future[bytes]] = []
        self._found_again = asyncio.Event()

    @property
    def ports(self) -> Ports:
        """What a service is given."""
        return Ports(self.log, self.commands, self.lease, self.checkpoints, self.scaler_lease)

    @property
    def open(self) -> bool:
        """Whether messages can pass."""
        return self.alive and not self.cut and self.network.broker.available

    @property
    def subscribed(self) -> bool:
        """Whether the server takes this process for one that listens: until it notices that it is cut off."""
        return self.alive and self.connected

    def cut_off(self) -> None:
        """Partition this process from the server, both ways."""
        self.cut = True
        self.lose_sight()

    def mend(self) -> None:
        self.cut = False
        self.find_again()

    def kill(self) -> None:
        """The process is dead. What it sent already may still arrive."""
        self.alive = False

    def lose_sight(self) -> None:
        """Nothing answers any more; the process notices some time later."""
        chance = self.network.chance
        self.network.loop.outside(chance.uniform(0.0, NOTICE_SECONDS_MAX), self._notice)

    def find_again(self) -> None:
        """The way is free again; the process comes back some time later."""
        self.network.loop.outside(self.network.chance.uniform(0.0, 1.0), self._reconnect)

    def hear(self, answer: "asyncio.Future[bytes]", payload: bytes) -> None:
        """An answer has come. The first counts."""
        if self.open and not answer.done():
            answer.set_result(payload)
            told = decode_command(payload)
            if isinstance(told, RouteGranted):
                self._answered[told.request] = (told.term, self.term)

    def heeds(self, request: RequestId) -> str:
        """What is wrong with the word on which this ingress sends a request to an engine, or nothing."""
        term, newest = self._answered.get(request, (Term(0), Term(0)))
        return f"was told so in term {term}, though it knew of term {newest}" if 0 < term < newest else ""

    def places(self, request: RequestId) -> None:
        """This ingress says itself where a request goes."""
        self._answered.pop(request, None)

    def hear_nobody(self, subject: str, answer: "asyncio.Future[bytes]") -> None:
        if self.open and not answer.done():
            answer.set_exception(NoResponderError(f"nobody serves {subject}"))

    async def ask(self, subject: str, payload: bytes, timeout: Seconds) -> bytes:
        """Raises NoResponderError, CommandTimeoutError."""
        if not self.connected or not self.alive:
            nobody = f"not connected, so nobody serves {subject}"
            raise NoResponderError(nobody)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        if self.open:  # to the server it comes once; who serves it may be brought it twice
            once = replace(self.weather, doubling=0.0)
            self.network.carry(once, self.network.ask, self, subject, payload, answer)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            no_answer = f"no answer on {subject} within {timeout:g} s"
            raise CommandTimeoutError(no_answer) from error
        finally:
            self._waiting.remove(answer)

    async def passage(self) -> None:
        """Wait as long as a message takes from the server to here."""
        network = self.network
        await asyncio.sleep(
            min(network.chance.expovariate(1 / self.weather.delay), DELAY_MEANS_MAX * self.weather.delay)
        )
        while not self.open or not self.connected:
            self._found_again.clear()
            await self._found_again.wait()

    async def one_way(self) -> None:
        """One way to a store at the server, or its loss. Raises StoreUnavailableError, after a while."""
        network = self.network
        lost = network.chance.random() < self.weather.loss
        try:
            async with asyncio.timeout(STORE_SECONDS_MAX):
                await (asyncio.Event().wait() if lost else self.passage())
        except TimeoutError as error:
            away = "the store does not answer"
            raise StoreUnavailableError(away) from error

    def _notice(self) -> None:
        if self.open or not self.connected:
            return
        self.connected = False
        self.window.close()
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(CommandTimeoutError("the connection broke before an answer came"))

    def _reconnect(self) -> None:
        if not self.open:
            return
        self.connected = True
        self.window.resume()
        self._found_again.set()


@dataclass(eq=False, slots=True)
class _Write:
    number: int
    event: LogEvent
    done: "asyncio.Future[Sequence] | None"
    fence: Fence | None = None
    elected_after: Sequence | None = None


class _Window:
    """What one process has not yet seen confirmed, in its order."""

    def __init__(self, link: Link, window_max: int) -> None:
        self._link = link
        self._window_max = window_max
        self._waiting: deque[_Write] = deque()
        self._sent: dict[int, _Write] = {}
        self._number = 0
        self._allowance = IN_FLIGHT_MAX
        self._arrives: Seconds = 0.0
        self._lost = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def put(
        self,
        event: LogEvent,
        done: "asyncio.Future[Sequence] | None" = None,
        *,
        fence: Fence | None = None,
        elected_after: Sequence | None = None,
    ) -> int:
        self._number += 1
        write = _Write(self._number, event, done, fence, elected_after)
        if len(self._waiting) + len(self._sent) >= self._window_max:
            self._lose(write)
            return write.number
        self.idle.clear()
        self._waiting.append(write)
        self._pump()
        return write.number

    def withdraw(self, number: int) -> None:
        """Nobody waits for this write any more; it may have been stored."""
        self._sent.pop(number, None)
        self._waiting = deque(write for write in self._waiting if write.number != number)
        self._settled()

    def close(self) -> None:
        """What is under way waits again."""
        for number in sorted(self._sent, reverse=True):
            self._waiting.appendleft(self._sent[number])
        self._sent.clear()
        self._allowance = 1

    def resume(self) -> None:
        self.close()
        self._pump()

    def _pump(self) -> None:
        link = self._link
        while link.alive and link.connected and self._waiting and len(self._sent) < self._allowance:
            write = self._waiting.popleft()
            if write.fence is not None and write.fence.broken:
                continue
            self._sent[write.number] = write
            link.network.loop.outside(ACK_SECONDS_MAX, self._overdue, write)
            if link.open:
                self._arrives = link.network.carry(link.weather, self._store, write, not_before=self._arrives)

    def _store(self, write: _Write) -> None:
        """At the server."""
        link = self._link
        network = link.network
        if not network.broker.available or link.cut:
            return
        if write.fence is not None and not network.broker.stands(Fence(write.fence.elected)):
            network.carry(link.weather, self._fenced, write)
            return
        try:
            sequence = network.store(link.name, write.event, write.number, elected_after=write.elected_after)
        except ElectionLostError as error:
            network.carry(link.weather, self._refused, write, error)
        else:
            network.carry(link.weather, self._confirm, write, sequence)

    def _confirm(self, write: _Write, sequence: Sequence) -> None:
        if not self._link.open or self._sent.pop(write.number, None) is None:
            return
        self._allowance = IN_FLIGHT_MAX
        if write.done is not None and not write.done.done():
            write.done.set_result(sequence)
        if self._lost:
            self._mark_loss()
        self._pump()
        self._settled()

    def _fenced(self, write: _Write) -> None:
        """Another leader was elected: the server takes no more of this one's decisions."""
        if not self._link.open or write.fence is None:
            return
        write.fence.broken = "another leader was elected"
        self._sent.pop(write.number, None)
        self._pump()
        self._settled()

    def _refused(self, write: _Write, error: Exception) -> None:
        if self._link.open and self._sent.pop(write.number, None) is not None:
            if write.done is not None and not write.done.done():
                write.done.set_exception(error)
            self._pump()
            self._settled()

    def _overdue(self, write: _Write) -> None:
        """Not confirmed in time: everything from the oldest on is sent again."""
        if self._sent.get(write.number) is write:
            self.close()
            self._pump()

    def _lose(self, write: _Write) -> None:
        if write.done is not None:
            write.done.set_exception(LogUnavailableError("too many writes wait for their confirmation"))
        else:
            self._lost += 1

    def _mark_loss(self) -> None:
        link = self._link
        count, self._lost = self._lost, 0
        reason = "too many writes wait for their confirmation"
        self.put(WritesLost(at=link.clock.now(), writer=link.name, count=count, reason=reason))

    def _settled(self) -> None:
        if not self._sent and not self._waiting:
            self.idle.set()


class SimulatedLog(EventLog):
    """The log as one process sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stored = link.network.broker.client(link.clock, name=link.name).log
        self.begun: Sequence = 1
        """The first entry that was read since all of the log was read last: retention may have dropped what came before."""

    @override
    async def append(self, event: LogEvent) -> Sequence:
        return await self._written(event, None)

    @override
    def append_soon(self, event: LogEvent, fence: Fence | None = None) -> None:
        if isinstance(event, RequestGranted | RequestHandedOver) and event.stamp is None:
            self._link.places(event.request)
        self._link.window.put(event, fence=fence)

    @override
    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        return Fence(await self._written(event, after))

    async def _written(self, event: LogEvent, elected_after: Sequence | None) -> Sequence:
        done: asyncio.Future[Sequence] = asyncio.get_running_loop().create_future()
        number = self._link.window.put(event, done, elected_after=elected_after)
        try:
            async with asyncio.timeout(APPEND_SECONDS_MAX):
                return await done
        except TimeoutError as error:
            unconfirmed = f"not confirmed within {APPEND_SECONDS_MAX:g} s"
            raise LogUnavailableError(unconfirmed) from error
        finally:
            self._link.window.withdraw(number)

    @override
    async def flush(self, timeout: Seconds) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._link.window.idle.wait()
        except TimeoutError:
            return False
        return True

    @override
    async def extent(self) -> LogExtent:
        try:
            async with asyncio.timeout(EXTENT_SECONDS_MAX):
                await self._link.passage()
        except TimeoutError as error:
            away = "the server does not answer"
            raise LogUnavailableError(away) from error
        return self._link.network.broker.extent

    @override
    async def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LogEntry | LogReset]:
        loop = asyncio.get_running_loop()
        fresh_at = -1.0
        begins = True
        async for found in self._stored.read(start, kinds=kinds, at_end=at_end):
            if loop.time() != fresh_at or not self._link.open:
                await self._link.passage()
                fresh_at = loop.time()
            if begins and isinstance(found, LogEntry):
                self.begun = found.sequence
            begins = isinstance(found, LogReset)
            if isinstance(found, LogEntry) and isinstance(found.event, LeaderElected):
                self._link.term = max(self._link.term, found.event.term)
            elif begins:
                self._link.term = Term(0)
            if isinstance(found, LogEntry):
                self._link.network.reads(self._link, found.sequence)
            yield found


class SimulatedCommands(Commands):
    """Request and reply as one process sees them."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    @override
    def connected(self) -> bool:
        return self._link.connected

    @override
    async def request(self, subject: str, command: AnyCommand, *, timeout: Seconds) -> AnyCommand:
        return decode_command(await self._link.ask(subject, encode(command), timeout))

    @override
    async def request_bytes(self, subject: str, payload: bytes, *, timeout: Seconds) -> bytes:
        return await self._link.ask(subject, payload, timeout)

    @override
    def serve(self, subject: str, handler: CommandHandler) -> AbstractAsyncContextManager[None]:
        return self._serving(subject, handler)

    @asynccontextmanager
    async def _serving(self, subject: str, handler: CommandHandler) -> AsyncIterator[None]:
        served = _Served(self._link, subject, handler)
        work = asyncio.create_task(served.work())
        self._link.network.serve(subject, served)
        try:
            yield
        finally:
            self._link.network.unserve(subject, served)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class SimulatedLease(Lease):
    """A lease, at the server's end of a link that loses messages."""

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
            self._link.network.ambush(self._link)
        await self._link.one_way()
        return written


class SimulatedCheckpoints(Checkpoints):
    """The checkpoints, as SimulatedLease."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @override
    async def save(self, label: CheckpointLabel, content: bytes, *, log_begins: Sequence = 1) -> None:
        await self._link.one_way()
        await self._link.network.broker.checkpoints.save(label, content, log_begins=log_begins)
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


class _Served:
    """A handler with the commands that wait for it, served one after the other."""

    def __init__(self, link: Link, subject: str, handler: CommandHandler) -> None:
        self.link = link
        self._subject = subject
        self._handler = handler
        self._waiting: asyncio.Queue[tuple[bytes, _Answer]] = asyncio.Queue(COMMANDS_WAITING_MAX)

    def offer(self, payload: bytes, answer: "_Answer") -> None:
        if self.link.open and not self._waiting.full():
            self._waiting.put_nowait((payload, answer))

    async def work(self) -> None:
        while True:
            payload, answer = await self._waiting.get()
            try:
                await self._handler(decode_command(payload), answer)
            except (Exception, UndecodableError) as error:  # noqa: BLE001 - whatever a handler raises is a finding
                self.link.on_failure(self._subject, error)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A Reply, on its way back over two links."""

    network: Network
    answerer: Link
    asker: Link
    answer: "asyncio.Future[bytes]"

    async def __call__(self, answer: AnyCommand | bytes) -> None:
        if self.answerer.open:
            payload = answer if isinstance(answer, bytes) else encode(answer)
            self.network.carry(self.answerer.weather, self._at_server, payload)

    def _at_server(self, payload: bytes) -> None:
        if self.network.broker.available:
            self.network.carry(self.asker.weather, self.asker.hear, self.answer, payload)
