"""The API's port with a certificate: it serves TLS and nothing else, shows a renewed certificate at once, and says when the
files are of no use or the certificate ends soon."""

import asyncio
import contextlib
import gc
import json
import ssl
import warnings
import weakref
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from click.testing import CliRunner

from pointsman.runtime import tls_server
from pointsman.runtime.http_protocol import HttpLimits, HttpProtocol
from pointsman_ingress import servers
from pointsman_ingress.http import certificate
from pointsman_ingress.main import main
from tests.support.certificates import Authority, Certificate
from tests.support.ingress_world import IngressBench, world_with
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
MONTH = timedelta(days=30)
LARGE_READ_BYTES = 256 * 1024


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "LOOK_WALL_SECONDS", 0.05)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", "ours")


@contextlib.asynccontextmanager
async def served_with(shown: Certificate) -> AsyncIterator[IngressBench]:
    async with world_with(tls_certificate=str(shown.certificate), tls_key=str(shown.key)) as world:
        yield world


def trusting(ours: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ours.file))


async def shown_by(world: IngressBench, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection gets."""
    _, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(found, bytes)
    return found


async def test_answers_and_streams_come_by_tls_and_nothing_comes_without(ours: Authority) -> None:
    context = trusting(ours)
    async with served_with(ours.issue("api", ends=MONTH)) as world:
        async with world.client.post(world.url + CHAT, json=HELLO, ssl=context) as answer:
            whole = (answer.status, await answer.json())
        async with world.client.post(world.url + CHAT, json={**HELLO, "stream": True}, ssl=context) as answer:
            streamed = await answer.text()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await world.client.post(world.url + CHAT, json=HELLO)
        with pytest.raises(aiohttp.ClientError):
            await world.client.get(world.url.replace("https", "http") + "/health")
        old = trusting(ours)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown_by(world, old)
        async with world.client.get(world.admin_url + "/readyz") as ready:
            degraded = (await ready.json())["degraded"]

    assert whole[0] == 200
    assert whole[1]["choices"]
    assert streamed.rstrip().endswith("data: [DONE]")
    assert "tls" not in degraded


async def test_a_renewed_certificate_is_shown_and_half_of_one_is_not(ours: Authority) -> None:
    context, shown, renewed = (
        trusting(ours),
        ours.issue("api", ends=MONTH),
        ours.issue("new", ends=MONTH),
    )
    async with served_with(shown) as world:
        before = await shown_by(world, context)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port, ssl=context)
        shown.certificate.write_bytes(renewed.certificate.read_bytes())
        await eventually(lambda: "the last one is shown" in world.board.degraded_parts.get("tls", ""))
        between = await shown_by(world, context)
        shown.key.write_bytes(renewed.key.read_bytes())
        await eventually(lambda: "tls" not in world.board.degraded_parts)
        after = await shown_by(world, context)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        goes_on = await reader.readline()
        writer.close()

    assert before == between != after
    assert after == ssl.PEM_cert_to_DER_cert(renewed.certificate.read_text())
    assert goes_on == b"HTTP/1.1 200 OK\r\n"


async def test_a_certificate_that_ends_soon_is_told(ours: Authority) -> None:
    shown, soon = ours.issue("api", ends=MONTH), ours.issue("soon", ends=timedelta(days=5))
    async with served_with(shown) as world:
        shown.certificate.write_bytes(soon.certificate.read_bytes())
        shown.key.write_bytes(soon.key.read_bytes())
        await eventually(lambda: "ends on" in world.board.degraded_parts.get("tls", ""))

        assert world.board.ready


async def test_a_certificate_of_an_unknown_version_is_told_and_the_last_one_shown(ours: Authority) -> None:
    shown = ours.issue("api", ends=MONTH)
    der = ssl.PEM_cert_to_DER_cert(shown.certificate.read_text())
    async with served_with(shown) as world:
        before = await shown_by(world, trusting(ours))
        shown.certificate.write_text(
            ssl.DER_cert_to_PEM_cert(der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x04", 1))
        )
        await eventually(lambda: "version" in world.board.degraded_parts.get("tls", ""))

        assert await shown_by(world, trusting(ours)) == before


async def test_a_client_that_never_shakes_hands_is_cut(ours: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_server, "HANDSHAKE_SECONDS", 0.3)
    async with served_with(ours.issue("api", ends=MONTH)) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_handshakes_have_a_bound_and_who_floods_gives_up_its_own(
    ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_server, "HANDSHAKES_MAX", 4)
    context = trusting(ours)
    async with served_with(ours.issue("api", ends=MONTH)) as world:
        port = world.server.bound_port
        other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.3", 0))
        flood = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(10)]
        async with asyncio.timeout(3):  # sooner than their handshakes time out
            cut = [await _ends(reader) for reader, _ in flood[:7]]
            await shown_by(world, context)
            cut.append(await _ends(other[0]))  # it was the longest, and room was made for an address with few
        still = [reader.at_eof() for reader, _ in flood[7:]]
        for _, writer in (other, *flood):
            writer.close()

    assert cut == [True] * 8
    assert still == [False] * 3


@pytest.mark.parametrize(("tls", "stay"), [(True, 4), (False, 16)])
async def test_with_tls_a_quarter_of_the_connections_may_be_open(
    ours: Authority, monkeypatch: pytest.MonkeyPatch, tls: bool, stay: int
) -> None:
    """Each of another address, and idle: beyond the bound the longest idle one is closed."""
    monkeypatch.setattr(servers, "clients_max", lambda _: 16)
    shown = ours.issue("api", ends=MONTH)
    options: dict[str, Any] = {"tls_certificate": str(shown.certificate), "tls_key": str(shown.key)} if tls else {}
    context = trusting(ours) if tls else None
    async with world_with(**options) as world:
        opened = []
        for number in range(stay + 2):
            source = (f"127.0.0.{number + 2}", 0)
            connection = await asyncio.open_connection(
                "127.0.0.1", world.server.bound_port, ssl=context, local_addr=source
            )
            connection[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await connection[0].readuntil(b"\r\n\r\n")
            opened.append(connection)
        async with asyncio.timeout(10):
            closed = [await _ends(reader) for reader, _ in opened[:2]]
        for reader, writer in opened[2:]:
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for _, writer in opened:
            writer.close()

    assert closed == [True, True]


async def test_what_connections_keep_of_large_reads_has_a_bound_and_idle_ones_give_way(
    ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HttpLimits", partial(HttpLimits, large_tls_bytes=5 * LARGE_READ_BYTES // 2))
    context = trusting(ours)
    padded = json.dumps({**HELLO, "user": "u" * 1_000_000}).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

    async def sends(world: IngressBench, body: bytes, more: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """`more`: bytes of the body that are still to come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port, ssl=context)
        writer.write(head % (CHAT.encode(), len(body) + more) + body)
        await writer.drain()
        return reader, writer

    async with served_with(ours.issue("api", ends=MONTH)) as world, asyncio.timeout(20):
        served, uploading = await sends(world, padded, 0), await sends(world, padded, 1)
        assert b" 200 " in await served[0].readline()
        small = [await sends(world, json.dumps(HELLO).encode(), 1) for _ in range(5)]
        (connection, *_) = world.server.server_state.connections
        shared = cast("HttpProtocol", connection)._shared
        await eventually(lambda: shared.large_tls_bytes >= 2 * LARGE_READ_BYTES)
        third = await sends(world, padded, 1)
        assert await _ends(served[0])
        fourth = await sends(world, padded, 1)
        refused = await fourth[0].readline()
        await _ends(fourth[0])
        for reader, writer in (uploading, third, *small):
            writer.write(b" ")
            assert b" 200 " in await reader.readline()
        for _, writer in (served, uploading, *small, third, fourth):
            writer.close()
        await eventually(lambda: shared.large_tls_bytes == 0)

    assert b" 503 " in refused


async def _ends(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        await reader.read()
    return True


async def test_a_connection_that_is_gone_holds_no_memory_until_it_is_collected(ours: Authority) -> None:
    context = trusting(ours)
    async with served_with(ours.issue("api", ends=MONTH)) as world:
        gc.disable()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port, ssl=context)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readline()
            (connection,) = world.server.server_state.connections
            session = weakref.ref(connection.transport.get_extra_info("ssl_object"))
            del connection
            held = session() is not None
            writer.close()
            await eventually(lambda: session() is None)
        finally:
            gc.enable()

    assert held


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tls-certificate", "{cert}"], "need each other"),
        (["--tls-key", "{key}"], "need each other"),
        (["--tls-certificate", "{cert}", "--tls-key", "/no/such.key"], "/no/such.key"),
        (["--tls-certificate", "{cert}", "--tls-key", "{other}"], "cannot be used"),
        (["--tls-certificate", "{key}", "--tls-key", "{cert}"], "cannot be used"),
    ],
)
def test_files_that_are_of_no_use_end_the_process_with_a_line(
    ours: Authority, options: list[str], problem: str
) -> None:
    right, other = ours.issue("api"), ours.issue("other")
    files = {"cert": right.certificate, "key": right.key, "other": other.key}

    ended = CliRunner().invoke(
        main, [option.format_map(files) for option in options] + ["--port", "0", "--admin-port", "0"]
    )

    assert ended.exit_code in (1, 2)
    assert problem in ended.stderr
    assert "Traceback" not in ended.output
