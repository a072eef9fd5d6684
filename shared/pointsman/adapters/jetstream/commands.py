"""Request and reply over core NATS, for commands and JetStream API calls. Replies share one inbox, one token each."""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from pointsman.adapters.command_decoding import DecodingCommands
from pointsman.adapters.jetstream.connection import (
    NO_RESPONDERS,
    Connection,
    Message,
    NotConnectedError,
    PayloadTooLargeError,
    UnsendableError,
    status_of,
)
from pointsman.adapters.log_listener import LogListener
from pointsman.adapters.shared_timers import SharedTimers
from pointsman.adapters.turns import TURN_SECONDS_MAX, Turn
from pointsman.contracts.codec import EVENT_ROOM_BYTES, AnyCommand, encode
from pointsman.contracts.permissions import INBOX, JETSTREAM_API, MAPPED_REPLY, SERVICE_API
from pointsman.contracts.subjects import covers
from pointsman.ports import (
    CommandTimeoutError,
    CommandTooLargeError,
    ForbiddenError,
    NoResponderError,
    PayloadHandler,
    Reply,
)
from pointsman.primitives import Seconds, WallSeconds

OTHERS_REPLIES = f"{MAPPED_REPLY}."
REPLIES = (f"{INBOX}.", OTHERS_REPLIES)
COMMANDS_WAITING_MAX = 4096
COMMANDS_WAITING_BYTES_MAX = 64 * 2**20
"""Commands queued for a handler, of our own account and of others each, and their bytes. More are dropped; their senders time
out and retry."""
COMMANDS_A_TURN = 8
"""Then whatever else the process does has a turn: a leader behind its commands still renews its lease."""


class Requests:
    def __init__(self, connection: Connection, *, inbox: str = INBOX, api: str = JETSTREAM_API) -> None:
        """`inbox`: first tokens of all replies; `api`: of JetStream's API."""
        self._connection = connection
        self.api = api
        self._inbox_prefix = inbox
        self._inbox = f"{self.new_inbox()}."
        self._request_count = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[Message]]] = {}
        self._timers = SharedTimers()

    def new_inbox(self) -> str:
        return f"{self._inbox_prefix}.{secrets.token_hex(11)}"

    def subject_of_value(self, subject: str) -> str:
        """Where to write a value. A leaf node passes `$KV` on to another domain only within its API (measured)."""
        return subject if self.api in (JETSTREAM_API, SERVICE_API) else self.api + subject

    async def open(self) -> None:
        await self._connection.subscribe(self._inbox + "*", self._on_answer)
        self._connection.on_change(self._on_change)
        self._connection.on_forbidden(self._on_forbidden)

    async def request(
        self, subject: str, payload: bytes, timeout: Seconds, headers: dict[str, str] | None = None, room: int = 0
    ) -> bytes:
        """Raises NoResponderError, ForbiddenError, CommandTooLargeError, CommandTimeoutError."""
        self._request_count += 1
        reply = f"{self._inbox}{self._request_count}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = subject, answer
        timer = self._timers.of(timeout)
        deadline = timer.set(partial(_time_out, answer, subject, timeout))
        try:
            self._connection.publish(subject, payload, reply=reply, headers=headers, room=room)
            message = await answer
        except PayloadTooLargeError as error:
            raise CommandTooLargeError(str(error)) from error
        except (NotConnectedError, UnsendableError) as error:
            raise NoResponderError(str(error)) from error
        finally:
            timer.cancel(deadline)
            del self._waiting[reply]
        if status_of(message) == NO_RESPONDERS:
            raise NoResponderError(f"nobody serves {subject}")
        return message.data

    def _on_answer(self, message: Message) -> None:
        _, answer = self._waiting.get(message.subject, ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _on_change(self, connected: bool) -> None:
        if not connected:
            for _, answer in self._waiting.values():
                _fail(answer, "the connection broke before an answer came")

    def _on_forbidden(self, operation: str, refused: str) -> None:
        for subject, answer in self._waiting.values():
            if operation == "publish" and subject.lower() == refused.lower() and not answer.done():
                answer.set_exception(ForbiddenError(f"our credentials do not allow {subject}"))


def _time_out(answer: asyncio.Future[Message], subject: str, seconds: Seconds) -> None:
    _fail(answer, f"no answer on {subject} within {seconds:g} s")


def _fail(answer: asyncio.Future[Message], reason: str) -> None:
    if not answer.done():
        answer.set_exception(CommandTimeoutError(reason))


class JetStreamCommands(DecodingCommands):
    """Handles the commands of a subject one at a time."""

    def __init__(self, connection: Connection, requests: Requests, listener: LogListener) -> None:
        super().__init__(listener)
        self._connection = connection
        self._requests = requests

    @property
    @override
    def connected(self) -> bool:
        return self._connection.connected

    @override
    async def request_bytes(self, subject: str, payload: bytes, *, timeout: WallSeconds) -> bytes:
        return await self._requests.request(subject, payload, float(timeout), room=EVENT_ROOM_BYTES)

    @override
    @asynccontextmanager
    async def serve_payloads(self, subject: str, handler: PayloadHandler, *, queue: str = "") -> AsyncIterator[None]:
        waiting = _WaitingCommands()

        def on_message(message: Message) -> None:
            if not covers(subject, message.subject):  # a stored message that somebody had delivered here
                self._listener.undecodable(message.subject, f"not sent to {subject}")
            elif not waiting.put(message):
                self._listener.trouble("command dropped", f"too many wait on {subject}")

        async def handle_all() -> None:
            turn = Turn(COMMANDS_A_TURN, TURN_SECONDS_MAX)
            while True:
                if not waiting:
                    await waiting.come()
                    turn.begin()
                await turn.take_message()
                message, waited = waiting.take()
                reply = _Reply(message, self._connection, self._listener, waiting, waited)
                await self._handle(message.subject, handler(message.data, reply))

        handling = asyncio.create_task(handle_all())
        try:
            subscription = await self._connection.subscribe(subject, on_message, queue=queue)
            try:
                yield
            finally:
                await subscription.close()
        finally:
            handling.cancel()

    async def _handle(self, subject: str, handling: Awaitable[None]) -> None:
        try:
            await handling
        except Exception as error:  # noqa: BLE001 - one bad command must not end the service
            self._listener.handler_failed(subject, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._listener.handler_failed(subject, RuntimeError(f"something it waited for was cancelled: {error}"))


class _WaitingCommands:
    """For one reader. Those of our own account first, each oldest first: people who ask much hold up no service."""

    def __init__(self) -> None:
        self._own, self._others = _CommandQueue(), _CommandQueue()
        self._wakeup: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._own.messages or self._others.messages)

    def put(self, message: Message) -> bool:
        """False if too many wait."""
        queue = self._others if message.reply.startswith(OTHERS_REPLIES) else self._own
        if not queue.put(message):
            return False
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
        return True

    async def come(self) -> None:
        while not self:
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup

    def take(self) -> tuple[Message, WallSeconds]:
        """And for how long it waited."""
        return (self._own if self._own.messages else self._others).take()


class _CommandQueue:
    def __init__(self) -> None:
        self.messages: deque[tuple[Message, float]] = deque()
        self._bytes = 0

    def put(self, message: Message) -> bool:
        """False if too many wait."""
        size = self._bytes + len(message.data)
        if len(self.messages) >= COMMANDS_WAITING_MAX or size > COMMANDS_WAITING_BYTES_MAX:
            return False
        self.messages.append((message, asyncio.get_running_loop().time()))
        self._bytes = size
        return True

    def take(self) -> tuple[Message, WallSeconds]:
        message, came_at = self.messages.popleft()
        self._bytes -= len(message.data)
        return message, WallSeconds(asyncio.get_running_loop().time() - came_at)


@dataclass(frozen=True, slots=True)
class _Reply(Reply):
    message: Message
    connection: Connection
    listener: LogListener
    waiting: _WaitingCommands
    waited: WallSeconds

    @property
    @override
    def subject(self) -> str:
        return self.message.subject

    @override
    async def __call__(self, answer: AnyCommand | bytes) -> None:
        """Only to an inbox: the answer must not become somebody's command or entry."""
        if not self.message.reply.startswith(REPLIES):
            return
        try:
            self.connection.publish(self.message.reply, answer if isinstance(answer, bytes) else encode(answer))
            if not self.waiting:  # else their answers go with this one
                self.connection.write_now()
        except (NotConnectedError, UnsendableError) as error:
            self.listener.trouble("answer not sent", str(error))
