"""Protocol of a NATS connection, implemented in `client`."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

SERVER_VERSION_MIN = (2, 12, 7)
"""Older servers have CVE-2026-33222 and CVE-2026-33246, among others."""
STATUS_HEADER = "Status"
NO_RESPONDERS = "503"
STREAM_NOT_FOUND = 10059


class ApiError(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class NotConnectedError(Exception):
    """Nothing was sent."""


class UnsendableError(Exception):
    """Message too large or subject invalid; nothing was sent."""


class Message(Protocol):
    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, str] | None: ...


OnMessage = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    async def close(self) -> None: ...


class Connection(Protocol):
    @property
    def connected(self) -> bool: ...

    def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send without waiting, in the order of the calls. Raises NotConnectedError, UnsendableError."""
        ...

    async def subscribe(
        self, subject: str, on_message: OnMessage, *, waiting_max: int, waiting_bytes_max: int = 0, queue: str = ""
    ) -> Subscription:
        """Deliver messages across reconnects. At most `waiting_max` are queued, and `waiting_bytes_max` (0: any); more
        are dropped and reported. Of the subscriptions of one `queue`, one gets each message."""
        ...

    def on_forbidden(self, on_forbidden: Callable[[str, str], None]) -> None:
        """Call with operation (`publish`, `subscription`) and subject, in lower case, when the server refuses one."""
        ...

    def on_change(self, on_change: Callable[[bool], None]) -> Callable[[], None]: ...


def status_of(message: Message) -> str:
    return message.headers.get(STATUS_HEADER, "") if message.headers and not message.data else ""
