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


class CommandBus:
    def __init__(self, available: Callable[[], bool]) -> None:
        self.available = available
        self._handlers: dict[str, list[_Service]] = {}

    def serve(self, subject: str, served: "_Service") -> None:
        self._handlers.setdefault(subject, []).append(served)

    def unserve(self, subject: str, served: "_Service") -> None:
        self._handlers[subject].remove(served)

    def request(self, subject: str, payload: bytes, answer: asyncio.Future[bytes]) -> None:
        """Raises NoResponderError."""
        services = self._serving(subject) if self.available() else []
        if not services:
            raise NoResponderError(f"nobody serves {subject}")
        for service in services:
            service.offer(subject, payload, answer)

    def _serving(self, subject: str) -> "list[_Service]":
        services = [*self._handlers.get(subject, ()), *self._handlers.get(any_actor(subject), ())]
        first = {service.queue: service for service in reversed(services)}
        return [service for service in services if not service.queue or first[service.queue] is service]


class _Service:
    def __init__(self, subject: str, handler: PayloadHandler, listener: LogListener, queue: str) -> None:
        self.queue = queue
        self._subject = subject
        self._handler = handler
        self._listener = listener
        self._waiting: asyncio.Queue[tuple[str, bytes, asyncio.Future[bytes], float]] = asyncio.Queue(
            COMMANDS_WAITING_MAX
        )

    def offer(self, subject: str, payload: bytes, answer: asyncio.Future[bytes]) -> None:
        try:
            self._waiting.put_nowait((subject, payload, answer, asyncio.get_running_loop().time()))
        except asyncio.QueueFull:
            self._listener.trouble("command dropped", f"{COMMANDS_WAITING_MAX} wait on {self._subject}")

    async def work(self) -> None:
        while True:
            subject, payload, answer, came_at = await self._waiting.get()
            waited = WallSeconds(asyncio.get_running_loop().time() - came_at)
            try:
                await self._handler(payload, _Answer(answer, subject, waited))
            except Exception as error:  # noqa: BLE001 - one bad command must not end the service
                self._listener.handler_failed(subject, error)


@dataclass(frozen=True, slots=True)
class _Answer:
    _answer: asyncio.Future[bytes]
    subject: str
    waited: WallSeconds

    async def __call__(self, answer: AnyCommand | bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(answer if isinstance(answer, bytes) else encode(answer))


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
        self._bus.request(subject, payload, answer)
        try:
            async with asyncio.timeout(float(timeout)):
                return await answer
        except TimeoutError as error:
            raise CommandTimeoutError(f"no answer on {subject} within {timeout:g} s") from error

    @override
    @asynccontextmanager
    async def serve_payloads(self, subject: str, handler: PayloadHandler, *, queue: str = "") -> AsyncIterator[None]:
        served = _Service(subject, handler, self._listener, queue)
        work = asyncio.create_task(served.work())
        self._bus.serve(subject, served)
        try:
            yield
        finally:
            self._bus.unserve(subject, served)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
