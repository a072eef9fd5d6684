"""What reaches an engine: the paths, methods and headers of the list, whatever a client asks for."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from pointsman_ingress.endpoints import BY_PATH
from tests.security.hostile import ADMIN_PATHS, KEY_BAIT, MODEL, NAMES, TRICKS
from tests.security.live import conversation
from tests.support.ingress_world import ONE, TWO, world_with

AT_ONCE = 24
TO_ENGINES = {
    "host", "accept", "accept-encoding", "user-agent", "content-length", "content-type", "x-request-id", "traceparent", "tracestate", "connection",
}  # fmt: skip
"""Headers of ours, and those of a client that are passed on. Without a key ring the client's key is, too."""
NOT_TRIED = (
    b"te",
    b"origin",
    b"authorization",
    b"x-api-key",
    b"content-type",
    b"traceparent",
    b"x-slo-ttft-ms",
    b"x-slo-tpot-ms",
)
RENDERING = {"/tokenize", "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render"}
"""Asked by the ingress itself."""
BODY = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "messages": [{"role": "user", "content": "x"}]}).encode()


class Recorder:
    """An engine that answers everything, and remembers who asked what."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, str]] = set()
        self.headers: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.add((request.method, request.raw_path))
        self.headers |= {name.lower() for name in request.headers}
        await request.read()
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})


@asynccontextmanager
async def recording(recorder: Recorder) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


def asks(method: str, path: str, *more: bytes) -> bytes:
    head = [
        f"{method} {path} HTTP/1.1".encode(),
        b"host: x",
        b"connection: close",
        b"content-type: application/json",
        *more,
    ]
    return b"\r\n".join([*head, b"content-length: %d" % len(BODY), b"", b""]) + BODY


async def test_no_path_of_a_client_reaches_an_engine_but_those_of_the_list() -> None:
    recorder = Recorder()
    paths = [trick.format(path=path) for path in (*ADMIN_PATHS, *BY_PATH) for trick in ("{path}", *TRICKS)]
    requests = [asks(method, path) for path in paths for method in ("POST", "GET")]
    requests += [asks(method, path) for path in BY_PATH for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")]
    async with recording(recorder) as engine, world_with() as world:
        await world.grants({ONE: engine, TWO: engine})
        port, turns = int(world.url.rpartition(":")[2]), iter(requests)

        async def in_turn() -> None:
            for request in turns:
                assert await conversation(port, request)

        await asyncio.gather(*(in_turn() for _ in range(AT_ONCE)))

    assert ("POST", "/v1/completions") in recorder.asked
    assert {path for _, path in recorder.asked} <= {*BY_PATH, *RENDERING}
    assert {method for method, _ in recorder.asked} == {"POST"}


async def test_no_header_of_a_client_reaches_an_engine_but_those_of_the_list() -> None:
    recorder = Recorder()
    headers = [name + b": " + KEY_BAIT.encode() for name in NAMES if name not in NOT_TRIED]
    async with recording(recorder) as engine, world_with() as world:
        await world.grants({ONE: engine, TWO: engine})
        answer = await conversation(int(world.url.rpartition(":")[2]), asks("POST", "/v1/completions", *headers))

    assert answer.startswith(b"HTTP/1.1 200")
    assert recorder.headers <= TO_ENGINES
