"""The log server, the messages on their way to it, and everything that can go wrong with both.

The server is the `MemoryBroker`. Every message takes time; it can be lost or carried twice. The server can go away and come
back. Apart from the faults there is one history: everything that was ever stored, and by whom, except what the log has lost.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from pointsman.contracts.cache import BlocksRemoved, CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import LeaderElected
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
    LogEntry,
)
from pointsman.primitives import PoolName, Seconds, Sequence
from pointsman_lab.memory.log import MemoryBroker
from pointsman_lab.torture.loop import MOMENT_SECONDS, VirtualLoop

IDEAL_DELAY_SECONDS = 0.0004
"""Mean time that a message takes on a good day."""

DELAY_MEANS_MAX = 12.0
"""No message takes longer than so many means."""

DUPLICATE_SECONDS_MAX = 4.0

LATE_DUPLICATE_SECONDS_MAX = 15.0
"""How late an entry may come to stand in the log a second time."""

RARE_DUPLICATES = 6.0

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


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """What happens to the messages of one link. `loss` and `duplication` are shares of all messages."""

    delay: Seconds = IDEAL_DELAY_SECONDS
    loss: float = 0.0
    duplication: float = 0.0


IDEAL = LinkConditions()


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry as it came into the log. `event` is None where nobody can read it. `duplicate`: it is a second copy, or no
    process of ours wrote it. `first`: what
    retention had left of the log by then."""

    sequence: Sequence
    at: Seconds
    writer: str
    event: LogEvent | None
    duplicate: bool = False
    first: Sequence = 1
    subject: str = ""
    problem: str = ""
    """Of an entry that nobody can read: where it is, and why, as every reader is told."""

    @property
    def stamp(self) -> Stamp | None:
        return self.event.stamp if self.event is not None else None


class Endpoint(Protocol):
    """A link, as the server sees it."""

    conditions: LinkConditions

    @property
    def subscribed(self) -> bool: ...
    def lose_sight(self) -> None: ...
    def find_again(self) -> None: ...
    def hear(self, answer: "asyncio.Future[bytes]", payload: bytes) -> None: ...
    def hear_nobody(self, subject: str, answer: "asyncio.Future[bytes]") -> None: ...


class Served(Protocol):
    """A handler of commands behind a link."""

    @property
    def link(self) -> Endpoint: ...
    def offer(self, payload: bytes, asker: Endpoint, answer: "asyncio.Future[bytes]") -> None: ...


class Network:
    """The server, and how well it can be reached."""

    def __init__(self, pool: PoolName, loop: VirtualLoop, chance: Random) -> None:
        self.pool = pool
        self.loop = loop
        self.broker = MemoryBroker(pool)
        self.history: list[Stored] = []
        self.losses = 0
        """How often the log has lost its newest entries, or all of them."""
        self.duplicates = 0.0
        """Share of entries that are stored once more, some seconds later."""
        self.damage = 0.0
        """Share of cache events that the server confirms and does not keep as they were."""
        self.checkpointed: Sequence = 1
        """The entry of the newest checkpoint: from there on the log must be kept."""
        self.ambush: Callable[[str], None] = lambda _link: None
        """Called with the name of a link whose process has taken a lease for a new term, before it knows."""
        self.reads: Callable[[str, Sequence], None] = lambda _link, _sequence: None
        """Called with the name of a link whose process is about to be given an entry of the log."""
        self.links: list[Endpoint] = []
        self.chance = chance
        self._served: dict[str, list[Served]] = {}
        self._written: dict[tuple[str, int], Sequence] = {}

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
        self, conditions: LinkConditions, act: Callable[..., None], *arguments: Any, not_before: Seconds = 0.0
    ) -> Seconds:
        """Bring one message over one link, or lose it, or bring it twice. When the last copy comes."""
        chance, now = self.chance, self.loop.time()
        if chance.random() < conditions.loss:
            return not_before
        arrives = not_before
        for _ in range(2 if chance.random() < conditions.duplication else 1):
            delay = min(chance.expovariate(1 / conditions.delay), DELAY_MEANS_MAX * conditions.delay)
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

    def serve(self, subject: str, served: Served) -> None:
        self._served.setdefault(subject, []).append(served)

    def unserve(self, subject: str, served: Served) -> None:
        if served in self._served.get(subject, []):
            self._served[subject].remove(served)

    def ask(self, asker: Endpoint, subject: str, payload: bytes, answer: "asyncio.Future[bytes]") -> None:
        """A command has come as far as the server."""
        if not self.broker.available:
            return
        listening = [served for served in self._served.get(subject, []) if served.link.subscribed]
        if not listening:
            self.carry(asker.conditions, asker.hear_nobody, subject, answer)
        for served in listening:
            self.carry(served.link.conditions, served.offer, payload, asker, answer)

    def store_raw(self, subject: str, payload: bytes) -> None:
        """Somebody who is no process of ours writes these bytes."""
        sequence = self.broker.store_raw(subject, payload)
        read = LogEntry.read(sequence, subject, payload)
        stored = Stored(
            sequence, self.loop.time(), "a stranger", read.event, duplicate=True, subject=subject, problem=read.problem
        )
        self.history.append(stored)

    def _note(self, sequence: Sequence, writer: str, event: LogEvent) -> None:
        self.history.append(Stored(sequence, self.loop.time(), writer, event, first=self.broker.extent.first))
        share = min(1.0, RARE_DUPLICATES * self.duplicates) if isinstance(event, RARE) else self.duplicates
        if self.chance.random() < share and not isinstance(event, LeaderElected):
            seconds = self.chance.choice((DUPLICATE_SECONDS_MAX, LATE_DUPLICATE_SECONDS_MAX))
            self.loop.outside(self.chance.uniform(0.0, seconds), self._duplicate, event, writer, self.losses)

    def _duplicate(self, event: LogEvent, writer: str, losses: int) -> None:
        if losses != self.losses:
            return
        sequence = self.broker.store_raw(subject_of(self.pool, event), encode(event))
        self.history.append(Stored(sequence, self.loop.time(), writer, event, duplicate=True))

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
