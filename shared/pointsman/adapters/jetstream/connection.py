"""Protocol of a NATS connection, implemented in `client`."""

from collections.abc import Callable
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


class PayloadTooLargeError(UnsendableError):
    """The server takes no message of this size (`max_payload`)."""


class Message(Protocol):
    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, str] | None: ...


OnMessage = Callable[[Message], None]


class Subscription(Protocol):
    async def close(self) -> None: ...


class Connection(Protocol):
    @property
    def connected(self) -> bool: ...

    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None, room: int = 0
    ) -> None:
        """Send without waiting, in the order of the calls: what one turn of the event loop publishes is written together.
        `room`: bytes that must stay free of the server's `max_payload`. Raises NotConnectedError, UnsendableError."""
        ...

    def write_now(self) -> None:
        """Write what was published, before this turn ends."""
        ...

    async def subscribe(self, subject: str, on_message: OnMessage, *, queue: str = "") -> Subscription:
        """Deliver messages across reconnects, as they are read. Of the subscriptions of one `queue`, one gets each."""
        ...

    def on_forbidden(self, on_forbidden: Callable[[str, str], None]) -> None:
        """Call with operation (`publish`, `subscription`) and subject, in lower case, when the server refuses one."""
        ...

    def on_change(self, on_change: Callable[[bool], None]) -> Callable[[], None]: ...


def status_of(message: Message) -> str:
    if message.data:
        return ""
    headers = message.headers
    return headers.get(STATUS_HEADER, "") if headers else ""
