"""A pool over a log in memory: its services are those of production, in the test's own process."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand, LogEvent, decode_event
from pointsman.contracts.subjects import AdminAction, SchedulerCommand, admin_subject, command_subject
from pointsman.ports import LogEntry
from pointsman.primitives import PoolName, WallSeconds
from pointsman_lab.memory.log import MemoryBroker
from pointsman_scheduler.service import SchedulerService
from tests.support.events import joined, route
from tests.support.log_reading import events_in, whole_log
from tests.support.services import running_ingress, running_scheduler
from tests.support.waiting import eventually

POOL = PoolName("default")
WAIT_SECONDS = 5.0


class LogView:
    """What a log in memory says, looked at from outside. It must not lose what was read."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self._next = broker.extent.first
        self._events: list[LogEvent] = []

    @property
    def events(self) -> list[LogEvent]:
        while (stored := self.broker.at(self._next)) is not None:
            self._events.append(decode_event(stored.payload))
            self._next += 1
        return self._events

    def of(self, kind: type[Any], instance: str = "") -> list[Any]:
        """The events of a kind; with `instance` only those about it."""
        found: list[Any] = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if not instance or event.instance == instance]


@dataclass
class MemoryPool:
    """`usual`: settings of schedulers. `client`: the test's own link."""

    broker: MemoryBroker = field(default_factory=lambda: MemoryBroker(POOL))
    clock: ScaledClock = field(default_factory=ScaledClock)
    usual: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = self.broker.client(self.clock, name="test")
        self.log = LogView(self.broker)

    def scheduler(
        self, name: str = "s", clock: ScaledClock | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[SchedulerService]:
        """As `running_scheduler`."""
        clock = clock or self.clock
        return running_scheduler(self.broker.client(clock, name=name), clock, name=name, **self.usual | settings)

    def ingress(self, **settings: Any) -> AbstractAsyncContextManager[str]:
        """Its URL, as of `running_ingress`."""
        return running_ingress(
            {self.broker.pool: self.broker.client(self.clock, name="ingress-1")}, self.clock, **settings
        )

    @asynccontextmanager
    async def leader(self, name: str = "s", **settings: Any) -> AsyncIterator[SchedulerService]:
        """A scheduler that leads; it resigns when the context ends."""
        async with self.scheduler(name, **settings) as service:
            await eventually(lambda: service.leading)
            yield service
            await service.resign()

    async def ask(self, command: AnyCommand, *, kind: SchedulerCommand, timeout: float = WAIT_SECONDS) -> Any:
        return await self._request(command_subject(self.broker.pool, kind), command, timeout)

    async def operate(
        self, command: AnyCommand, *, action: AdminAction, operator: str = "alice", timeout: float = WAIT_SECONDS
    ) -> Any:
        return await self._request(admin_subject(self.broker.pool, action, operator), command, timeout)

    async def _request(self, subject: str, command: AnyCommand, timeout: float) -> AnyCommand:
        return await self.client.commands.request(subject, command, timeout=WallSeconds(timeout))

    async def route(self, request: str, keys: list[int], *, timeout: float = WAIT_SECONDS, **fields: Any) -> Any:
        command = route(request, keys, **{"arrived_at": self.clock.now()} | fields)
        return await self.ask(command, kind="route", timeout=timeout)

    async def append(self, *events: LogEvent) -> None:
        for event in events:
            await self.client.log.append(event)

    def joined(self, instance: str, **fields: Any) -> LogEvent:
        return joined(instance, at=self.clock.now(), **fields)

    async def entries(self) -> list[LogEntry]:
        """Everything in the log."""
        return await whole_log(self.client.log)

    async def events(self) -> list[LogEvent]:
        return await events_in(self.client.log)

    async def kinds(self) -> list[str]:
        return [type(event).__name__ for event in await self.events()]
