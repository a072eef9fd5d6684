"""What the rest of this package needs from a NATS connection: publish now, subscribe, watch the connection.

The one implementation is in `__init__`, the only module that imports the client library.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

STATUS_HEADER = "Status"
NO_RESPONDERS = "503"
"""Status of the empty message that the server sends for a subject without a listener."""


class NotConnectedError(Exception):
    """There is no connection at the moment. Nothing was sent."""


class UnsendableError(Exception):
    """The server would never take this message: too large, or no valid subject. Nothing was sent."""


class Message(Protocol):
    """A message that arrived."""

    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, str] | None: ...


OnMessage = Callable[[Message], Awaitable[None]]
"""Called for one message after the other. While it waits, the next message waits."""


class Subscription(Protocol):
    async def close(self) -> None:
        """No message is delivered any more. Never raises."""
        ...


class Connection(Protocol):
    @property
    def connected(self) -> bool: ...

    def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send without waiting, in the order of the calls. Raises NotConnectedError, UnsendableError."""
        ...

    async def subscribe(self, subject: str, on_message: OnMessage, *, waiting_max: int) -> Subscription:
        """Deliver what arrives on `subject`, across reconnects. At most `waiting_max` messages wait; more are dropped and reported."""
        ...

    def on_change(self, on_change: Callable[[bool], None]) -> Callable[[], None]:
        """Call `on_change` with each change of `connected`; call the result to end that."""
        ...


def status_of(message: Message) -> str:
    """The status of a message that the server made itself, else an empty string."""
    return message.headers.get(STATUS_HEADER, "") if message.headers and not message.data else ""
