"""An engine that does as a test says: answers like vLLM, or fails in one of the ways that engines fail.

Every request takes the next entry of `script`, or answers properly when the script is empty. What came in, and how
many requests were given up by their client, is there to be looked at.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web

OTHER_PATHS = (
    "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/detokenize", "/pooling", "/classify",
    "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
"""Beyond completions and chats."""


class Behaviour(StrEnum):
    ANSWERS = "answers"
    REFUSES = "refuses"
    """400 with an OpenAI error."""
    KNOWS_NO_KEY = "knows_no_key"
    """401."""
    KNOWS_NO_MODEL = "knows_no_model"
    """404 with an OpenAI error."""
    LINGERS = "lingers"
    """Streams to the end and keeps the connection open."""
    ERRS = "errs"
    """500."""
    RESETS = "resets"
    """Closes the connection instead of answering."""
    RESETS_AFTER_HEAD = "resets_after_head"
    """Sends the status and headers of a stream, then closes."""
    BREAKS_OFF = "breaks_off"
    """Closes in the middle of a stream, or of a body."""
    HANGS = "hangs"
    """Never says anything."""
    HANGS_AFTER_HEAD = "hangs_after_head"
    """Sends the status and headers of a stream and then nothing."""
    HANGS_AFTER_FIRST = "hangs_after_first"
    """Streams one chunk and then nothing."""
    ERRS_IN_STREAM = "errs_in_stream"
    """Streams an error in place of the first token, and the regular end, as vLLM does."""
    ERRS_IN_MID_STREAM = "errs_in_mid_stream"
    """Streams one chunk, an error, and the regular end."""
    BLAMES_IN_STREAM = "blames_in_stream"
    """Streams an error that is the request's fault."""
    PAUSES = "pauses"
    """Streams half an event, and the rest once `resumes` is set."""


@dataclass(frozen=True)
class Received:
    path: str
    body: bytes
    headers: dict[str, str]

    @property
    def fields(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


@dataclass
class FakeEngine:
    """Use with `running_engine`. Tokens of a text are its bytes; each answer has `output_tokens` tokens."""

    url: str = ""
    output_tokens: int = 3
    cached_tokens: int = 64
    has_tokenize: bool = True
    renders: bool = False
    """Whether it has /v1/chat/completions/render: the tokens are then the bytes of the body."""
    objection: str = ""
    """What it has against every prompt, where it is asked for the tokens."""
    key: str = ""
    """Who does not show it is turned away; empty: everybody may ask."""
    says: dict[str, dict[str, Any] | list[bytes]] = field(default_factory=dict)
    """By path, in place of the usual: a whole answer, or the pieces of a stream. Paths beyond those of completions and
    chats are only there where something is said on them."""
    script: deque[Behaviour] = field(default_factory=deque)
    received: list[Received] = field(default_factory=list)
    questions: list[Received] = field(default_factory=list)
    """What came to /tokenize and /render."""
    pause: asyncio.Event | None = None
    """Answers nothing before this is set."""
    goes_on: asyncio.Event | None = None
    """Sends no second piece of what a test says before this is set."""
    first_piece: bytes = b'data: {"choices": [{"text": "first"}]}\n\n'
    """What it streams before it breaks off or hangs."""
    dies: bool = False
    """Closes connections instead of answering, after the pause."""
    given_up: int = 0
    resumes: asyncio.Event = field(default_factory=asyncio.Event)
    transfer_params: dict[str, Any] | None = None
    """What it says of its KV cache where it is asked to prefill for another."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._take(request, self.received)
        behaviour = self.script.popleft() if self.script else Behaviour.ANSWERS
        try:
            if self.pause is not None:
                await self.pause.wait()
            asked = json.loads(body) if request.content_type == "application/json" else {}
            return await self._behave(Behaviour.RESETS if self.dies else behaviour, request, asked)
        except asyncio.CancelledError:
            self.given_up += 1
            raise

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = json.loads(await self._take(request, self.questions))
        if not self.has_tokenize:
            return _no_such_path()
        if self.objection:
            return web.json_response({"error": {"message": self.objection, "code": 400}}, status=400)
        text = asked.get("prompt") or "".join(f"{m['role']}:{m['content']}" for m in asked["messages"])
        tokens = list(text.encode())
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 1000})

    async def render(self, request: web.Request) -> web.Response:
        body = await self._take(request, self.questions)
        if not self.renders:
            return _no_such_path()
        return web.json_response({"request_id": "r", "token_ids": list(body), "features": None})

    async def _take(self, request: web.Request, received: list[Received]) -> bytes:
        body = await request.read()
        headers = {k.lower(): v for k, v in request.headers.items()}
        received.append(Received(request.path, body, headers))
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized
        return body

    async def _behave(self, behaviour: Behaviour, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        match behaviour:
            case Behaviour.PAUSES:
                stream = await self._head(request)
                whole = _event({"choices": [{"text": "first"}]})
                await stream.write(whole + whole[:10])
                await self.resumes.wait()
                await stream.write(whole[10:] + b"data: [DONE]\n\n")
                return stream
            case Behaviour.ANSWERS if request.path in self.says:
                return await self._say(request, self.says[request.path])
            case Behaviour.ANSWERS if request.path not in ("/v1/completions", "/v1/chat/completions"):
                return _no_such_path()
            case Behaviour.ANSWERS if asked.get("stream"):
                return await self._stream(request, asked)
            case Behaviour.ANSWERS:
                answer = {"id": "x", "choices": [{"text": "answer"}], "usage": self._usage(asked)}
                return web.json_response(answer | {"kv_transfer_params": self.transfer_params})
            case Behaviour.ERRS_IN_STREAM | Behaviour.ERRS_IN_MID_STREAM | Behaviour.BLAMES_IN_STREAM:
                code = 400 if behaviour is Behaviour.BLAMES_IN_STREAM else 500
                stream = await self._head(request)
                if behaviour is Behaviour.ERRS_IN_MID_STREAM:
                    await stream.write(self.first_piece)
                    await asyncio.sleep(0.05)
                failure = _event({"error": {"message": "CUDA error", "type": "InternalServerError", "code": code}})
                await stream.write(failure[:20])
                await asyncio.sleep(0.05)
                await stream.write(failure[20:] + b"data: [DONE]\n\n")
                return stream
            case Behaviour.REFUSES:
                return web.json_response({"error": {"message": "the engine says no", "code": 400}}, status=400)
            case Behaviour.LINGERS:
                await self._stream(request, asked)
                await asyncio.Event().wait()
            case Behaviour.KNOWS_NO_KEY:
                return web.json_response({"error": "Unauthorized"}, status=401)
            case Behaviour.KNOWS_NO_MODEL:
                error = {"message": "The model `m` does not exist.", "type": "NotFoundError", "code": 404}
                return web.json_response({"error": error}, status=404)
            case Behaviour.ERRS:
                return web.Response(status=500, text="engine down")
            case Behaviour.HANGS:
                await asyncio.Event().wait()
            case Behaviour.HANGS_AFTER_HEAD:
                await self._head(request)
                await asyncio.Event().wait()
            case Behaviour.RESETS:
                _transport(request).abort()
            case Behaviour.RESETS_AFTER_HEAD:
                await self._head(request)
                _transport(request).abort()
            case Behaviour.BREAKS_OFF if not asked.get("stream"):
                half = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
                await half.prepare(request)
                await half.write(b'{"choices": [')
                _transport(request).abort()
            case Behaviour.BREAKS_OFF | Behaviour.HANGS_AFTER_FIRST:
                stream = await self._head(request)
                await stream.write(self.first_piece)
                if behaviour is Behaviour.HANGS_AFTER_FIRST:
                    await asyncio.Event().wait()
                _transport(request).abort()
        return web.Response(status=500)

    async def _say(self, request: web.Request, answer: dict[str, Any] | list[bytes]) -> web.StreamResponse:
        if isinstance(answer, dict):
            return web.json_response(answer)
        stream = await self._head(request)
        for piece in answer:
            await stream.write(piece)
            await asyncio.sleep(0)
            if self.goes_on is not None:
                await self.goes_on.wait()
        return stream

    async def _stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        stream = await self._head(request)
        for number in range(self.output_tokens):
            await stream.write(_event({"choices": [{"text": f"t{number}"}]}))
            await asyncio.sleep(0)
        if (asked.get("stream_options") or {}).get("include_usage"):
            await stream.write(_event({"choices": [], "usage": self._usage(asked)}))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _head(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        return stream

    def _usage(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = asked.get("prompt") or asked.get("messages")
        return {
            "prompt_tokens": len(prompt or ""),
            "completion_tokens": min(self.output_tokens, asked.get("max_tokens") or self.output_tokens),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@asynccontextmanager
async def running_engine() -> AsyncIterator[FakeEngine]:
    """A fake engine on a free port of the loopback."""
    engine = FakeEngine()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_post("/v1/chat/completions", engine.complete)
    for path in OTHER_PATHS:
        app.router.add_post(path, engine.complete)
    app.router.add_post("/tokenize", engine.tokenize)
    for path in ("/v1/chat/completions", "/v1/messages"):
        app.router.add_post(f"{path}/render", engine.render)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    engine.url = f"http://{host}:{port}"
    try:
        yield engine
    finally:
        await runner.cleanup()


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _no_such_path() -> web.Response:
    return web.json_response({"detail": "Not Found"}, status=404)


def _transport(request: web.Request) -> asyncio.Transport:
    transport = request.transport
    assert isinstance(transport, asyncio.Transport)
    return transport
