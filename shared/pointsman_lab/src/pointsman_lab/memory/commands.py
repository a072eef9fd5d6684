"""Commands in memory, with the bounded queues of the NATS adapter: the first handler's answer is returned."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from typing_extensions import override

from pointsman.adapters.command_decoding import DecodingCommands
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import AnyCommand, encode
from pointsman.contracts.subjects import any_actor
from pointsman.ports import CommandTimeoutError, NoResponderError, PayloadHandler
from pointsman.primitives import WallSeconds

COMMANDS_WAITING_MAX = 4096

Respond = Callable[[bytes], None]


class CommandBus:
    def __init__(self, available: Callable[[], bool]) -> None:
        self.available = available
        self._services: dict[str, list[CommandService]] = {}

    def serve(self, subject: str, service: "CommandService") -> None:
        self._services.setdefault(subject, []).append(service)

    def unserve(self, subject: str, service: "CommandService") -> None:
        self._services[subject].remove(service)

    def request(self, subject: str, payload: bytes, respond: Respond) -> None:
        """Raises NoResponderError."""
        services = self._serving(subject) if self.available() else []
        if not services:
            raise NoResponderError(f"nobody serves {subject}")
        for service in services:
            service.offer(subject, payload, respond)

    def _serving(self, subject: str) -> "list[CommandService]":
        services = [*self._services.get(subject, ()), *self._services.get(any_actor(subject), ())]
        first = {service.queue: service for service in reversed(services)}
        return [service for service in services if not service.queue or first[service.queue] is service]


class CommandService:
    """One handler and what waits for it, in the order in which it came."""

    def __init__(self, subject: str, handler: PayloadHandler, listener: LogListener, queue: str = "") -> None:
        self.queue = queue
        self._subject = subject
        self._handler = handler
        self._listener = listener
        self._waiting: asyncio.Queue[tuple[str, bytes, Respond, float]] = asyncio.Queue(COMMANDS_WAITING_MAX)

    def offer(self, subject: str, payload: bytes, respond: Respond) -> None:
        try:
            self._waiting.put_nowait((subject, payload, respond, asyncio.get_running_loop().time()))
        except asyncio.QueueFull:
            self._listener.trouble("command dropped", f"{COMMANDS_WAITING_MAX} wait on {self._subject}")

    async def work(self) -> None:
        while True:
            subject, payload, respond, came_at = await self._waiting.get()
            waited = WallSeconds(asyncio.get_running_loop().time() - came_at)
            try:
                await self._handler(payload, _Answer(respond, subject, waited))
            except Exception as error:  # noqa: BLE001 - one bad command must not end the service
                self._listener.handler_failed(subject, error)


@dataclass(frozen=True, slots=True)
class _Answer:
    _respond: Respond
    subject: str
    waited: WallSeconds

    async def __call__(self, answer: AnyCommand | bytes) -> None:
        self._respond(answer if isinstance(answer, bytes) else encode(answer))


class MemoryCommands(DecodingCommands):
    def __init__(self, bus: CommandBus, listener: LogListener) -> None:
        super().__init__(listener)
        self._bus = bus

    @property
    @override
    def connected(self) -> bool:
        return self._bus.available()

    @override
    async def request_bytes(self, subject: str, payload: bytes, *, timeout: WallSeconds) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._bus.request(subject, payload, lambda told: None if answer.done() else answer.set_result(told))
        try:
            async with asyncio.timeout(float(timeout)):
                return await answer
        except TimeoutError as error:
            raise CommandTimeoutError(f"no answer on {subject} within {timeout:g} s") from error

    @override
    @asynccontextmanager
    async def serve_payloads(self, subject: str, handler: PayloadHandler, *, queue: str = "") -> AsyncIterator[None]:
        served = CommandService(subject, handler, self._listener, queue)
        work = asyncio.create_task(served.work())
        self._bus.serve(subject, served)
        try:
            yield
        finally:
            self._bus.unserve(subject, served)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
