"""NATS's wire format for messages, without tasks and queues. In: the bytes of a connection. Out: each message at once and
in order; all other lines (INFO, PING, errors) go on to nats-py, whose own way costs three tasks a message."""

import re
from collections.abc import Callable, Mapping
from functools import cached_property

from pointsman.adapters.jetstream.connection import STATUS_HEADER

VERSION = b"NATS/1.0"
DESCRIPTION_HEADER = "Description"
_END = b"\r\n"
_not_subject = re.compile(r"[ \t\r\n]")
_line_ends = str.maketrans("\r\n", "  ")


class WireMessage:
    def __init__(self, subject: bytes, reply: bytes, data: bytes, head: bytes = b"") -> None:
        """`head`: with its version line; read when asked for."""
        self.subject = subject.decode("ascii", "backslashreplace")
        self.reply = reply.decode() if reply.isascii() else ""
        self.data = data
        self._head = head

    @cached_property
    def headers(self) -> dict[str, str] | None:
        """Bytes that are no text are shown: beside a writer's headers the server's own are needed."""
        first, *lines = self._head.decode(errors="backslashreplace").split("\r\n")
        found = {}
        status, _, description = first[len(VERSION) :].strip().partition(" ")
        if status.isdigit():
            found[STATUS_HEADER] = status
            if description:
                found[DESCRIPTION_HEADER] = description
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                found[name] = value.strip()
        return found or None


class MessageSplitter:
    def __init__(
        self, on_message: Callable[[int, WireMessage], None], on_other: Callable[[bytes], None], left: bytes = b""
    ) -> None:
        """`on_message` receives the number of the subscription, too. `left`: read already."""
        self._on_message = on_message
        self._on_other = on_other
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = 0
        self.feed(left)

    def feed(self, data: bytes) -> None:
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data, self._parts = b"".join(self._parts), []
        at = self._split(data)
        if at < len(data):
            self._parts = [data[at:]]
            self._size = len(data) - at

    def _split(self, data: bytes) -> int:
        """Returns where the first incomplete message or line begins."""
        at, self._needed = 0, 0
        while (line_end := data.find(_END, at)) >= 0:
            start = line_end + 2
            if data.startswith(b"MSG ", at):
                has_head = False
            elif data.startswith(b"HMSG ", at):
                has_head = True
            else:
                self._on_other(data[at:start])
                at = start
                continue
            try:
                _, subject, number, *reply, size = data[at:line_end].split()
                head_end = start + int(reply.pop()) if has_head else start
                end, subscription = start + int(size), int(number)
            except (ValueError, IndexError):
                self._on_other(data[at:])  # nats-py refuses it and connects again
                return len(data)
            if end + 2 > len(data):
                self._needed = end + 2 - at
                return at
            message = WireMessage(subject, reply[0] if reply else b"", data[head_end:end], data[start:head_end])
            at = end + 2
            self._on_message(subscription, message)
        return at


def publication(subject: str, payload: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> bytes:
    """Raises ValueError if a subject would be read as something else."""
    if not subject or _not_subject.search(subject) or _not_subject.search(reply):
        raise ValueError(f"{subject!r} or {reply!r} is no subject")
    if not headers:
        return f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + _END
    lines = _header_lines(headers)
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        lines = _header_lines({name: value.translate(_line_ends) for name, value in headers.items()})
    head = f"NATS/1.0\r\n{lines}\r\n".encode()
    size = len(head)
    return b"".join((f"HPUB {subject} {reply} {size} {size + len(payload)}\r\n".encode(), head, payload, _END))


def _header_lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
