"""Messages are split from a connection's bytes as nats-py splits them, however the bytes arrive."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from pointsman.adapters.jetstream.wire import MessageSplitter, WireMessage, publication

SUBJECTS = st.sampled_from(["a", "pm.default.request.x", "_INBOX.a.1"])
PAYLOADS = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"", b"\r\n", b"MSG a 1 2\r\nhi\r\n", b"PING\r\n", b"x" * 5000])
)
HEADS = st.sampled_from(
    [b"", b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0 100 Idle\r\nA: b\r\n\r\n"]
)


class Twin:
    """What nats-py's parser calls."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.found.append((sid, subject.decode(), reply.decode(), data, headers or b""))

    async def _process_ping(self) -> None:
        self.found.append("PING")

    async def _process_pong(self) -> None:
        self.found.append("PONG")


def sent(message: tuple[int, str, str, bytes, bytes] | str) -> bytes:
    if isinstance(message, str):
        return f"{message}\r\n".encode()
    sid, subject, reply, data, head = message
    to = f"{subject} {sid} {reply} " if reply else f"{subject} {sid} "
    if head:
        return f"HMSG {to}{len(head)} {len(head) + len(data)}\r\n".encode() + head + data + b"\r\n"
    return f"MSG {to}{len(data)}\r\n".encode() + data + b"\r\n"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 9), SUBJECTS, st.one_of(st.just(""), SUBJECTS), PAYLOADS, HEADS),
            st.sampled_from(["PING", "PONG"]),
        ),
        max_size=6,
    ),
    st.lists(st.integers(1, 60), max_size=40),
)
async def test_any_cut_of_the_bytes_gives_the_messages_of_nats_py_in_order(
    messages: list[Any], cuts: list[int]
) -> None:
    whole = b"".join(map(sent, messages))
    twin = Twin()
    await Parser(twin).parse(whole)
    found: list[Any] = []

    def on_message(sid: int, message: WireMessage) -> None:
        found.append((sid, message.subject, message.reply, message.data, message._head))

    splitter = MessageSplitter(on_message, lambda line: found.append(line.decode().strip()))
    at = 0
    for size in [*cuts, len(whole)]:
        splitter.feed(whole[at : at + size])
        at += size

    assert found == twin.found


@pytest.mark.parametrize("line", [b"MSG a\r\n", b"MSG a x 3\r\nabc\r\n", b"HMSG a 1 3\r\n", b"HMSG a 1 x 3\r\n"])
def test_a_line_that_is_no_message_goes_to_nats_py_with_all_that_follows(line: bytes) -> None:
    found: list[str] = []
    left: list[bytes] = []
    splitter = MessageSplitter(lambda _, message: found.append(message.subject), left.append)

    splitter.feed(b"MSG first 1 2\r\nhi\r\n" + line + b"MSG later 1 2\r\nhi\r\n")

    assert found == ["first"]
    assert b"".join(left) == line + b"MSG later 1 2\r\nhi\r\n"


def test_headers_are_read_with_their_status() -> None:
    message = WireMessage(b"s", b"", b"", b"NATS/1.0 409 Consumer Deleted\r\nNats-Pending-Messages: 7\r\n\r\n")

    assert message.headers == {"Status": "409", "Description": "Consumer Deleted", "Nats-Pending-Messages": "7"}
    assert WireMessage(b"s", b"", b"").headers is None
    mixed = WireMessage(b"s", b"", b"", b"NATS/1.0 \xff\r\nA: \xff\r\nNats-Sequence: 3\r\n\r\n")
    assert mixed.headers == {"A": "\\xff", "Nats-Sequence": "3"}


def test_a_subject_that_is_no_ascii_is_shown_and_never_answered() -> None:
    message = WireMessage(b"pm.\xff", b"_INBOX.\xff", b"")

    assert message.subject == "pm.\\xff"
    assert message.reply == ""


def test_a_value_never_becomes_a_further_header_nor_a_subject_a_command() -> None:
    published = publication("a", b"body", "r", {"Nats-Msg-Id": "1\r\nNats-Rollup: all"})

    head = published.partition(b"\r\n")[2].partition(b"\r\n\r\n")[0]
    assert head == b"NATS/1.0\r\nNats-Msg-Id: 1  Nats-Rollup: all"
    assert published.startswith(b"HPUB a r %d %d\r\n" % (len(head) + 4, len(head) + 8))
    for subject, reply in (("a b", ""), ("", ""), ("a\r\nPUB b 0", ""), ("a", "r\n")):
        with pytest.raises(ValueError, match="no subject"):
            publication(subject, b"", reply)
