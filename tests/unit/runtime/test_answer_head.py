"""The head of an answer is written with the first bytes of its body, and never kept back."""

import asyncio
from typing import Any, cast

from pointsman.runtime.http_protocol import JOINED_BYTES_MAX, _OpenTransport

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def opened() -> tuple[Wire, _OpenTransport]:
    wire = Wire()
    return wire, _OpenTransport(cast(Any, wire), asyncio.get_running_loop(), lambda: None)


async def test_a_head_and_the_first_bytes_are_one_write() -> None:
    wire, transport = opened()
    for data in (HEAD, b"body", b"more"):
        transport.write(data)
    await asyncio.sleep(0)

    assert wire.written == [HEAD + b"body", b"more"]


async def test_a_head_without_a_body_leaves_with_the_turn_of_the_loop() -> None:
    wire, transport = opened()
    transport.write(HEAD)
    await asyncio.sleep(0)

    assert wire.written == [HEAD]


async def test_closing_writes_a_head_first_and_drops_what_comes_later() -> None:
    wire, transport = opened()
    transport.write(HEAD)
    transport.close()
    transport.write(b"late")
    await asyncio.sleep(0)

    assert wire.written == [HEAD]
    assert wire.closed


async def test_a_large_body_is_not_copied_behind_its_head() -> None:
    wire, transport = opened()
    body = b"x" * (JOINED_BYTES_MAX + 1)
    transport.write(HEAD)
    transport.write(body)

    assert wire.written[0] == HEAD
    assert wire.written[1] is body
