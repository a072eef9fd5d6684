"""One process's connection to the log server: faults of the way, and the window of its writes."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from pointsman.adapters.jetstream.producer import SILENCE_LATENCIES, SILENCE_SECONDS_MAX, UNCONFIRMED_SECONDS_MAX
from pointsman.adapters.jetstream.write_queue import next_allowance
from pointsman.contracts.codec import LogEvent, decode_command
from pointsman.contracts.commands import FollowAnswered, RouteGranted
from pointsman.contracts.decisions import WritesLost
from pointsman.ports import (
    NONE_UNCONFIRMED,
    Clock,
    CommandTimeoutError,
    ElectionLostError,
    Fence,
    LogUnavailableError,
    NoResponderError,
    StoreUnavailableError,
    UnconfirmedWrites,
)
from pointsman.ports import Link as Ports
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Sequence, Term, WallSeconds
from pointsman_lab.memory.log import Continuity
from pointsman_lab.torture.network import DELAY_MEANS_MAX, IDEAL, Network

ACK_SECONDS_MAX = 1.0
STORE_SECONDS_MAX = 1.0
NOTICE_SECONDS_MAX = 3.0
IN_FLIGHT_MAX = 1024


class Link:
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
        self.conditions = IDEAL
        self.alive = True
        self.cut = False
        self.connected = network.broker.available
        self.on_failure = on_failure
        self.window = _Window(self, window_max)
        self.continuity = Continuity(network.broker)
        self.ports: Ports
        self.term = Term(0)
        self._answered: dict[RequestId, tuple[Term, Term]] = {}
        """By request: term of the last answer, and the newest term known then."""
        self.rebound: set[tuple[RequestId, InstanceId]] = set()
        """Redispatched requests and their new instances, as told: a leader tells it before the log has it."""
        self._waiting: list[asyncio.Future[bytes]] = []
        self._found_again = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.alive and not self.cut and self.network.broker.available

    @property
    def reaches_log(self) -> bool:
        return self.open and self.network.quorum

    @property
    def subscribed(self) -> bool:
        """Whether the server counts this process as a subscriber: until it notices the cut."""
        return self.alive and self.connected

    def cut_off(self) -> None:
        self.cut = True
        self.connection_lost()

    def mend(self) -> None:
        self.cut = False
        self.connection_restored()

    def kill(self) -> None:
        self.alive = False

    def connection_lost(self) -> None:
        chance = self.network.chance
        self.network.loop.outside(chance.uniform(0.0, NOTICE_SECONDS_MAX), self.connection_reset)

    def connection_restored(self) -> None:
        self.network.loop.outside(self.network.chance.uniform(0.0, 1.0), self._reconnect)

    def receive(self, answer: "asyncio.Future[bytes]", payload: bytes) -> None:
        if self.open and not answer.done():
            answer.set_result(payload)
            command = decode_command(payload)
            if isinstance(command, RouteGranted):
                self._answered[command.request] = (command.term, self.term)
            elif isinstance(command, FollowAnswered):
                self.rebound |= {(grant.request, grant.instance) for grant in command.rebound}

    def stale_answer(self, request: RequestId) -> str:
        """Why the answer on which this ingress dispatches a request is stale, or ""."""
        term, newest = self._answered.get(request, (Term(0), Term(0)))
        return f"relies on an answer of term {term}, though it had read term {newest}" if 0 < term < newest else ""

    def forget_answer(self, request: RequestId) -> None:
        self._answered.pop(request, None)

    def no_responders(self, subject: str, answer: "asyncio.Future[bytes]") -> None:
        if self.open and not answer.done():
            answer.set_exception(NoResponderError(f"no process serves {subject}"))

    async def ask(self, subject: str, payload: bytes, timeout: EngineSeconds) -> bytes:
        """Raises NoResponderError, CommandTimeoutError."""
        if not self.connected or not self.alive:
            raise NoResponderError(f"not connected, so no process serves {subject}")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        if self.open:  # to the server it comes once; who serves it may be brought it twice
            once = replace(self.conditions, duplication=0.0)
            self.network.carry(once, self.network.ask, self, subject, payload, answer)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            raise CommandTimeoutError(f"no answer on {subject} within {timeout:g} s") from error
        finally:
            self._waiting.remove(answer)

    async def one_delay(self) -> None:
        network = self.network
        await asyncio.sleep(
            min(network.chance.expovariate(1 / self.conditions.delay), DELAY_MEANS_MAX * self.conditions.delay)
        )
        while not self.reaches_log or not self.connected:
            self._found_again.clear()
            await self._found_again.wait()

    async def one_way(self) -> None:
        """One way to a store at the server, or its loss. Raises StoreUnavailableError after a timeout."""
        network = self.network
        lost = network.chance.random() < self.conditions.loss
        try:
            async with asyncio.timeout(STORE_SECONDS_MAX):
                await (asyncio.Event().wait() if lost else self.one_delay())
        except TimeoutError as error:
            raise StoreUnavailableError("the store does not answer") from error

    def connection_reset(self) -> None:
        """Notices it, unless the server is there again."""
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
        self.continuity.check()
        self.window.resume()
        self._found_again.set()


@dataclass(eq=False, slots=True)
class _Write:
    number: int
    event: LogEvent
    done: "asyncio.Future[Sequence] | None"
    fence: Fence | None = None
    elected_after: Sequence | None = None
    put_at: EngineSeconds = 0.0
    sent_at: EngineSeconds = 0.0
    tries: int = 0
    ahead: int = 0


class _Window:
    """Unconfirmed writes of one process, in order."""

    def __init__(self, link: Link, window_max: int) -> None:
        self._link = link
        self._window_max = window_max
        self._waiting: deque[_Write] = deque()
        self._sent: dict[int, _Write] = {}
        self._number = 0
        self._allowance = IN_FLIGHT_MAX
        self._arrives: EngineSeconds = 0.0
        self._latency: EngineSeconds = 0.0
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
        write = _Write(self._number, event, done, fence, elected_after, put_at=self._link.network.loop.time())
        if len(self._waiting) + len(self._sent) >= self._window_max:
            self._lose(write)
            return write.number
        self.idle.clear()
        self._waiting.append(write)
        self._pump()
        return write.number

    @property
    def load(self) -> float:
        writes = self.unconfirmed
        return max(writes.count / self._window_max, float(writes.wait_seconds) / UNCONFIRMED_SECONDS_MAX)

    @property
    def unconfirmed(self) -> UnconfirmedWrites:
        writes = [*self._sent.values(), *self._waiting]
        if not writes:
            return NONE_UNCONFIRMED
        waited = self._link.network.loop.time() - min(write.put_at for write in writes)
        return UnconfirmedWrites(len(writes), WallSeconds(waited))

    def withdraw(self, number: int) -> None:
        self._sent.pop(number, None)
        self._waiting = deque(write for write in self._waiting if write.number != number)
        self._settled()

    def close(self) -> None:
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
            write.tries += 1
            write.ahead, write.sent_at = len(self._sent), link.network.loop.time()
            patience = max(ACK_SECONDS_MAX, min(SILENCE_LATENCIES * self._latency, SILENCE_SECONDS_MAX))
            link.network.loop.outside(patience, self._overdue, write, write.tries)
            if link.open:
                self._arrives = link.network.carry(link.conditions, self._reach, write, not_before=self._arrives)

    def _reach(self, write: _Write) -> None:
        """Of the server: its disk works on one write after the other."""
        network = self._link.network
        if network.broker.available and network.quorum and not self._link.cut:
            network.when_written(self._link.name, write.number, self._store, write)

    def _store(self, write: _Write) -> None:
        link = self._link
        network = link.network
        if not network.broker.available or not network.quorum or link.cut:
            return
        if write.fence is not None and not network.broker.may_write(Fence(write.fence.elected)):
            network.carry(link.conditions, self._fenced, write)
            return
        try:
            sequence = network.store(link.name, write.event, write.number, elected_after=write.elected_after)
        except ElectionLostError as error:
            network.carry(link.conditions, self._refused, write, error)
        else:
            network.carry(link.conditions, self._confirm, write, sequence)

    def _confirm(self, write: _Write, sequence: Sequence) -> None:
        if not self._link.open or self._sent.pop(write.number, None) is None:
            return
        now = self._link.network.loop.time()
        self._latency = now - write.sent_at
        self._allowance = next_allowance(
            self._allowance, tries=write.tries, ahead=write.ahead, seconds=now - write.sent_at, most=IN_FLIGHT_MAX
        )
        if write.done is not None and not write.done.done():
            write.done.set_result(sequence)
        if self._lost:
            self._mark_loss()
        self._pump()
        self._settled()

    def _fenced(self, write: _Write) -> None:
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

    def _overdue(self, write: _Write, tries: int) -> None:
        if self._sent.get(write.number) is write and write.tries == tries:
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
