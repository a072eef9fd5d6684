"""The log server (a `MemoryBroker`) and the messages to it. Messages are delayed, lost and duplicated; the server can
go down. `history` has every entry ever stored, except those that the log has lost, which `lost` has."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    InstanceRoleChanged,
    InstanceSuspected,
    InstanceUndrained,
)
from pointsman.contracts.subjects import any_actor, heartbeat_subject, instance_of, subject_of
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId, PoolName, Sequence
from pointsman_lab.memory.commands import CommandService, Respond
from pointsman_lab.memory.log import MemoryBroker
from pointsman_lab.torture.loop import MOMENT_SECONDS, VirtualLoop

IDEAL_DELAY_SECONDS = 0.0004
DELAY_MEANS_MAX = 12.0
DUPLICATE_SECONDS_MAX = 4.0
LATE_DUPLICATE_SECONDS_MAX = 15.0
RARE_DUPLICATES = 6.0

RARE = (
    InstanceJoined,
    InstanceLeft,
    InstanceSuspected,
    InstanceDraining,
    InstanceUndrained,
    InstanceRoleChanged,
    CacheSnapshot,
    CacheCleared,
    CacheGap,
)
"""Rare events, with a higher share of duplicates. Elections are never duplicated: the server compares before storing.
"""


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """`loss` and `duplication`: shares of all messages."""

    delay: EngineSeconds = IDEAL_DELAY_SECONDS
    loss: float = 0.0
    duplication: float = 0.0


IDEAL = LinkConditions()


@dataclass(frozen=True, slots=True)
class Stored:
    """One log entry. `event`: None if undecodable. `duplicate`: a second copy, or from an unknown writer. `first`:
    first entry of the log at that time."""

    sequence: Sequence
    at: EngineSeconds
    writer: str
    event: LogEvent | None
    duplicate: bool = False
    first: Sequence = 1
    subject: str = ""
    problem: str = ""

    @property
    def stamp(self) -> Stamp | None:
        return self.event.stamp if self.event is not None else None


class Endpoint(Protocol):
    conditions: LinkConditions

    @property
    def open(self) -> bool: ...
    @property
    def subscribed(self) -> bool: ...
    def connection_lost(self) -> None: ...
    def connection_reset(self) -> None: ...
    def connection_restored(self) -> None: ...
    def receive(self, answer: "asyncio.Future[bytes]", payload: bytes) -> None: ...
    def no_responders(self, subject: str, answer: "asyncio.Future[bytes]") -> None: ...


class Network:
    def __init__(self, pool: PoolName, loop: VirtualLoop, chance: Random) -> None:
        self.pool = pool
        self.loop = loop
        self.broker = MemoryBroker(pool)
        self.history: list[Stored] = []
        self.lost: list[Stored] = []
        self.losses = 0
        self.duplicates = 0.0
        self.write_seconds: EngineSeconds = 0.0
        """Of the log's disk, for one write; all writers share it."""
        self._at_disk: deque[tuple[tuple[str, int], Callable[..., None], tuple[Any, ...]]] = deque()
        self.quorum = True
        """Without it there is core NATS, and no JetStream: no entries, leases and checkpoints."""
        self.heartbeats: dict[InstanceId, LinkConditions] = {}
        """Of heartbeats and their answers, where they differ from all else."""
        self.damage = 0.0
        """Share of cache events that are stored corrupted."""
        self.checkpointed: Sequence = 1
        self.ambush: Callable[[str], None] = lambda _link: None
        self.reads: Callable[[str, Sequence], None] = lambda _link, _sequence: None
        self.links: list[Endpoint] = []
        self.chance = chance
        self._services: dict[str, list[tuple[Endpoint, CommandService]]] = {}
        self._written: dict[tuple[str, int], Sequence] = {}

    def server_down(self) -> None:
        self.broker.available = False
        for link in self.links:
            link.connection_lost()

    def server_up(self) -> None:
        self.broker.available = True
        for link in self.links:
            link.connection_restored()

    def lose_quorum(self) -> None:
        self.quorum = False

    def regain_quorum(self) -> None:
        self.quorum = True
        for link in self.links:
            link.connection_restored()

    def lose_newest(self, count: int) -> None:
        """Unflushed entries and in-memory leases are lost while the server is down. Their sequences are reused."""
        extent = self.broker.extent
        self.broker.lose_after(max(extent.first - 1, extent.last - count))
        for lease in (self.broker.lease, self.broker.scaler_lease):
            lease.forget()
        self._forget()
        for link in self.links:
            link.connection_reset()  # a machine that starts again knows no connection

    def note_restart(self) -> None:
        self.broker.recreate()
        self._forget()

    def _forget(self) -> None:
        last = self.broker.extent.last
        self.losses += 1
        self.lost += self.history[last:]
        del self.history[last:]
        self._written = {write: at for write, at in self._written.items() if at <= last}

    def expire(self, kept: int) -> None:
        """Retention: keeps the newest `kept` entries and everything after the newest checkpoint."""
        extent = self.broker.extent
        first = min(extent.last - kept + 1, self.checkpointed)
        if first > extent.first:
            self.broker.drop_before(first)

    def carry(
        self, conditions: LinkConditions, act: Callable[..., None], *arguments: Any, not_before: EngineSeconds = 0.0
    ) -> EngineSeconds:
        """Delivers a message once, twice, or never. Returns the time of the last delivery."""
        chance, now = self.chance, self.loop.time()
        if chance.random() < conditions.loss:
            return not_before
        arrives = not_before
        for _ in range(2 if chance.random() < conditions.duplication else 1):
            delay = min(chance.expovariate(1 / conditions.delay), DELAY_MEANS_MAX * conditions.delay)
            arrives = max(arrives + MOMENT_SECONDS, now + delay)
            self.loop.outside(arrives - now, act, *arguments)
        return arrives

    def when_written(self, writer: str, number: int, act: Callable[..., None], *arguments: Any) -> None:
        """Acts once the disk has taken the write, after those before it. A repetition costs it nothing."""
        self._at_disk.append(((writer, number), act, arguments))
        if len(self._at_disk) == 1:
            self._write_next()

    def _write_next(self) -> None:
        while self._at_disk:
            if self.write_seconds and self._at_disk[0][0] not in self._written:
                self.loop.outside(self.write_seconds, self._written_at_last)
                return
            self._leave_disk()

    def _written_at_last(self) -> None:
        self._leave_disk()
        self._write_next()

    def _leave_disk(self) -> None:
        _, act, arguments = self._at_disk[0]
        act(*arguments)
        self._at_disk.popleft()

    @property
    def is_behind(self) -> bool:
        """Whether writes wait for the disk, so that readers do not know of them yet."""
        return bool(self._at_disk)

    def disk_is_quick(self) -> None:
        self.write_seconds = 0.0

    def store(self, writer: str, event: LogEvent, number: int, *, elected_after: Sequence | None = None) -> Sequence:
        """Stores a write; `number` deduplicates the writer's repeats. `elected_after`: only if the newest LeaderElected
        is there. Raises ElectionLostError."""
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
                sequence = self.broker.store(event, writer)
            if sequence > last:
                self._note(sequence, writer, event)
        self._written[writer, number] = sequence
        return sequence

    def serve(self, subject: str, link: Endpoint, service: CommandService) -> None:
        self._services.setdefault(subject, []).append((link, service))

    def unserve(self, subject: str, link: Endpoint, service: CommandService) -> None:
        if (link, service) in self._services.get(subject, []):
            self._services[subject].remove((link, service))

    def ask(self, asker: Endpoint, subject: str, payload: bytes, answer: "asyncio.Future[bytes]") -> None:
        if not self.broker.available:
            return
        services = [*self._services.get(subject, ()), *self._services.get(any_actor(subject), ())]
        listening = [(link, service) for link, service in services if link.subscribed]
        if not listening:
            self.carry(asker.conditions, asker.no_responders, subject, answer)
        for link, service in listening:
            respond = partial(self._respond, subject, link, asker, answer)
            self.carry(self.way(subject, link), self._offer, link, service, subject, payload, respond)

    def _offer(self, link: Endpoint, service: CommandService, subject: str, payload: bytes, respond: Respond) -> None:
        if link.open:
            service.offer(subject, payload, respond)

    def _respond(
        self, subject: str, link: Endpoint, asker: Endpoint, answer: "asyncio.Future[bytes]", payload: bytes
    ) -> None:
        if link.open:
            self.carry(self.way(subject, link), self._pass_on, subject, asker, answer, payload)

    def _pass_on(self, subject: str, asker: Endpoint, answer: "asyncio.Future[bytes]", payload: bytes) -> None:
        if self.broker.available:
            self.carry(self.way(subject, asker), asker.receive, answer, payload)

    def way(self, subject: str, link: Endpoint) -> LinkConditions:
        """Of a command or its answer, between the server and a process."""
        own = self.heartbeats.get(InstanceId(instance_of(subject))) if self.is_heartbeat(subject) else None
        return own or link.conditions

    def is_heartbeat(self, subject: str) -> bool:
        return subject == heartbeat_subject(self.pool, instance_of(subject))

    def store_raw(self, subject: str, payload: bytes) -> None:
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
