"""vLLM's HTTP interface over the simulated engine, as one plain ASGI application.

A generation route reads and checks the body, turns the prompt into tokens, submits them, and then writes what the
engine hands out, whole or as server-sent events. A client that hangs up aborts its request in the engine.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from pointsman.adapters.tokenizer import ChatTemplateError, Tokenizer, UnsupportedContentError
from pointsman.primitives import Tokens
from pointsman.runtime.health import Receive, Scope, Send, send_whole
from pointsman.simulation.block_cache import PromptIdentity
from pointsman_engine_sim import answers, embeddings, messages, openai_bodies, responses, scores
from pointsman_engine_sim.engine import (
    EngineStoppedError,
    Generation,
    RequestAbortedError,
    SimulatedEngine,
    prompt_hash,
)
from pointsman_engine_sim.kv_transfer import TRANSFER_PATH, KvTransfer
from pointsman_engine_sim.metrics import EngineMetrics
from pointsman_engine_sim.openai_bodies import ApiError, ChatBody, CompletionBody, TokenizeBody

log = structlog.get_logger()

VERSION = "0.32.0+pointsman-sim"
BODY_BYTES_MAX = 64 * 2**20
INLINE_TEXT_MAX = 2048
"""Characters of text that are tokenised on the event loop; longer ones go to a thread."""

JSON = "application/json"
_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    max_model_len: Tokens
    stream_interval: Tokens = 1
    prompt_tokens_details: bool = True
    api_key: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters that are there from the start: path by name."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """How one generation is written: the parts in which completions and chats differ."""

    generation: Generation
    prompt_tokens: Tokens
    frames: answers.Frames
    whole: Callable[[answers.Heading, str, dict[str, object], dict[str, object] | None], bytes]
    heading: answers.Heading
    stream: bool
    stream_usage: bool
    held: bool = False
    """Whether its blocks are kept for another engine, which the answer tells where they are."""
    usage: Callable[..., dict[str, object]] = answers.usage


class EngineApp:
    """The ASGI application."""

    def __init__(
        self,
        engine: SimulatedEngine,
        *,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        served: ServedModel,
        transfer: KvTransfer | None = None,
    ) -> None:
        """`transfer`: the engine's connector; without one `kv_transfer_params` mean nothing, as with vLLM."""
        self._engine = engine
        self._transfer = transfer
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._served = served
        self._adapters = dict(served.adapters)
        self._started = int(time.time())
        self._answered = 0
        side_channel: dict[str, dict[str, Handler]] = {TRANSFER_PATH: {"POST": self._blocks_asked}} if transfer else {}
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": self._completion},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/responses": {"POST": self._response},
            "/v1/messages": {"POST": self._anthropic(self._messages)},
            "/v1/messages/count_tokens": {"POST": self._anthropic(self._count_tokens)},
            "/v1/embeddings": {"POST": self._embeddings},
            **{path: {"POST": self._rerank} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
            **{path: {"POST": self._score} for path in ("/score", "/v1/score")},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics_page},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
            **side_channel,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        methods = self._routes.get(scope["path"])
        handler = None if methods is None else methods.get(scope["method"])
        if handler is None:
            status, detail = (404, "Not Found") if methods is None else (405, "Method Not Allowed")
            await send_whole(send, status, answers.encode({"detail": detail}), JSON)
            return
        if not self._authorised(scope):
            await send_whole(send, 401, b'{"error":"Unauthorized"}', JSON)
            return
        try:
            await handler(scope, receive, send)
        except ApiError as error:
            await send_whole(send, error.status, error.body, JSON)
        except RequestAbortedError:
            log.debug("client_gone", path=scope["path"])

    # Generation

    async def _completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_completion(await _read(receive))
        self._check_model(body.model)
        prompt = openai_bodies.prompt_of(body)
        tokens = await self._encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        heading = self._heading(scope, "cmpl", body.model)
        generation, held = await self._submit(body, tokens, body.max_tokens, openai_bodies.COMPLETION_TOKENS_DEFAULT)
        frames, whole = answers.completion_frames(heading), answers.whole_completion
        await self._answer(
            receive,
            send,
            _Answer(generation, len(tokens), frames, whole, heading, body.wants_stream, body.wants_stream_usage, held),
        )

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_chat(await _read(receive))
        self._check_model(body.model)
        tokens = await self._encode(self._rendered(body), add_special_tokens=False)
        heading = self._heading(scope, "chatcmpl", body.model)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        generation, held = await self._submit(body, tokens, asked, openai_bodies.CHAT_TOKENS_DEFAULT)
        frames, whole = answers.chat_frames(heading), answers.whole_chat
        await self._answer(
            receive,
            send,
            _Answer(generation, len(tokens), frames, whole, heading, body.wants_stream, body.wants_stream_usage, held),
        )

    async def _response(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = responses.parse_response(await _read(receive))
        self._check_model(body.model)
        chat = ChatBody(
            messages=responses.messages_of(body),
            tools=responses.tools_of(body),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        tokens = await self._encode(self._rendered(chat), add_special_tokens=True)
        heading = self._heading(scope, "resp", body.model)
        generation, _ = await self._submit(body, tokens, body.max_output_tokens, openai_bodies.CHAT_TOKENS_DEFAULT)
        frames, whole = responses.ResponseFrames(heading), responses.whole_response
        stream = body.wants_stream
        await self._answer(
            receive,
            send,
            _Answer(generation, len(tokens), frames, whole, heading, stream, stream, usage=responses.usage),
        )

    def _anthropic(self, handler: Handler) -> Handler:
        """The same, but what is refused is told in Anthropic's shape."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await handler(scope, receive, send)
            except ApiError as error:
                await send_whole(send, error.status, messages.error(error), JSON)

        return wrapped

    async def _messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = messages.parse_messages(await _read(receive))
        self._check_model(body.model)
        tokens = await self._encode(self._rendered(messages.chat_of(body)), add_special_tokens=False)
        heading = self._heading(scope, "chatcmpl", body.model)
        generation, _ = await self._submit(body, tokens, body.max_tokens, openai_bodies.CHAT_TOKENS_DEFAULT)
        frames, whole, stream = messages.MessageFrames(heading), messages.whole_message, body.wants_stream
        await self._answer(
            receive,
            send,
            _Answer(generation, len(tokens), frames, whole, heading, stream, stream, usage=messages.usage),
        )

    async def _count_tokens(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = messages.parse_messages(await _read(receive))
        self._check_model(body.model)
        tokens = await self._encode(self._rendered(messages.chat_of(body)), add_special_tokens=False)
        await send_whole(send, 200, messages.counted(len(tokens)), JSON)

    async def _rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scores.parse_rerank(await _read(receive))
        tokens = await self._read_pairs(receive, body.model, body.query, body.documents)
        heading = self._heading(scope, "rerank", body.model)
        await send_whole(send, 200, scores.whole_rerank(heading, body, tokens), JSON)

    async def _score(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scores.parse_score(await _read(receive))
        tokens = await self._read_pairs(receive, body.model, body.text_1, body.documents)
        heading = self._heading(scope, "score", body.model)
        await send_whole(send, 200, scores.whole_scores(heading, body, tokens), JSON)

    async def _read_pairs(self, receive: Receive, model: str | None, query: str, documents: list[str]) -> Tokens:
        """Prefill each document behind the query. Returns how many tokens that were."""
        self._check_model(model)
        total = 0
        for document in documents:
            tokens = await self._encode(f"{query}\n{document}", add_special_tokens=True)
            await self._prefill(receive, model, tokens)
            total += len(tokens)
        return total

    async def _embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What an engine does for a prompt until its first token is what an embedding takes."""
        body = embeddings.parse_embeddings(await _read(receive))
        self._check_model(body.model)
        vectors, total = [], 0
        for prompt in embeddings.prompts_of(body):
            tokens = await self._encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
            await self._prefill(receive, body.model, tokens)
            vectors.append(embeddings.vector(prompt_hash(tokens), body.dimensions))
            total += len(tokens)
        heading = self._heading(scope, "embd", body.model)
        await send_whole(send, 200, embeddings.whole_embeddings(heading, vectors, body.encoding_format, total), JSON)

    async def _prefill(self, receive: Receive, model: str | None, tokens: list[int]) -> None:
        """Raises ApiError."""
        generation, _ = await self._submit(CompletionBody(model=model), tokens, 1, 1)
        try:
            async with self._aborted_when_gone(receive, generation):
                await generation.reached(1)
        except EngineStoppedError as error:
            raise ApiError(503, str(error), kind="ServiceUnavailableError") from error
        finally:
            self._engine.abort(generation)

    async def _submit(
        self, body: openai_bodies.Generate, tokens: list[int], asked: Tokens | None, default: Tokens
    ) -> tuple[Generation, bool]:
        """The generation, and whether its blocks are held for another engine."""
        openai_bodies.check_tokens(tokens, vocab_size=self._tokenizer.vocab_size)
        max_tokens = openai_bodies.output_tokens(
            asked=asked, default=default, prompt=len(tokens), max_model_len=self._served.max_model_len
        )
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}."
            raise ApiError(400, message, param="min_tokens")
        lora = body.model if body.model in self._adapters else ""
        identity = PromptIdentity(lora=lora or "", cache_salt=body.cache_salt or "")
        if self._transfer is None or not body.kv_transfer_params:
            return self._engine.submit(tokens, max_tokens=max_tokens, identity=identity), False
        params = openai_bodies.transfer_params(body.kv_transfer_params)
        received = 0
        if params.do_remote_prefill:
            missing = max(0, len(tokens) - self._engine.cached_tokens(tokens, identity))
            await self._transfer.fetch(params, missing)
            received = len(tokens)
        held = bool(params.do_remote_decode) and not body.wants_stream
        generation = self._engine.submit(tokens, max_tokens=max_tokens, identity=identity, received=received, held=held)
        return generation, held

    async def _answer(self, receive: Receive, send: Send, answer: _Answer) -> None:
        generation = answer.generation
        try:
            async with self._aborted_when_gone(receive, generation):
                await (self._stream(send, answer) if answer.stream else self._send_when_finished(send, answer))
        except EngineStoppedError as error:
            await self._fail(send, answer, ApiError(503, str(error), kind="ServiceUnavailableError"))
        finally:
            self._engine.abort(generation)

    async def _send_when_finished(self, send: Send, answer: _Answer) -> None:
        generation = answer.generation
        await generation.reached(_EVERYTHING)
        text = generation.passage.text(0, generation.tokens)
        place = None
        if answer.held and self._transfer is not None:
            place = self._transfer.offer(generation.request, answer.prompt_tokens)
        await send_whole(send, 200, answer.whole(answer.heading, text, self._usage(answer), place), JSON)

    async def _stream(self, send: Send, answer: _Answer) -> None:
        """One chunk for what is new whenever there is enough of it; the first token and the end never wait."""
        generation, frames = answer.generation, answer.frames
        await send(_STREAM_START)
        if frames.before:
            await send({"type": "http.response.body", "body": frames.before, "more_body": True})
        sent, opening = 0, frames.opening
        while not generation.finished or sent == 0:
            await generation.reached(sent + self._served.stream_interval if sent else 1)
            known, last = generation.tokens, generation.finished
            chunk = opening + frames.text(generation.passage.json_text(sent, known), last=last)
            if last:
                chunk += self._stream_end(answer)
            await send({"type": "http.response.body", "body": chunk, "more_body": not last})
            sent, opening = known, b""

    def _stream_end(self, answer: _Answer) -> bytes:
        generation = answer.generation
        text = generation.passage.text(0, generation.tokens)
        return answer.frames.ending(text, self._usage(answer) if answer.stream_usage else None)

    def _usage(self, answer: _Answer) -> dict[str, object]:
        generation = answer.generation
        cached = generation.cached_tokens if self._served.prompt_tokens_details else None
        return answer.usage(prompt=answer.prompt_tokens, completion=generation.tokens, cached=cached)

    async def _fail(self, send: Send, answer: _Answer, error: ApiError) -> None:
        if answer.stream:
            await send({"type": "http.response.body", "body": answers.error_event(error.body)})
        else:
            await send_whole(send, error.status, error.body, JSON)

    @contextlib.asynccontextmanager
    async def _aborted_when_gone(self, receive: Receive, generation: Generation) -> AsyncIterator[None]:
        """While the context is open, a client that hangs up aborts the generation."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._engine.abort(generation)

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    # Everything else

    async def _models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        served = self._served
        body = answers.model_list(
            served.name, created=self._started, max_model_len=served.max_model_len, adapters=self._adapters
        )
        await send_whole(send, 200, body, JSON)

    async def _tokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_tokenize(await _read(receive))
        self._check_model(body.model)
        text = self._rendered(body) if body.prompt is None else body.prompt
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        tokens = await self._encode(text, add_special_tokens=special)
        strings = [self._tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": self._served.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
        await send_whole(send, 200, answers.encode(answer), JSON)

    async def _detokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_detokenize(await _read(receive))
        self._check_model(body.model)
        openai_bodies.check_tokens(body.tokens, vocab_size=self._tokenizer.vocab_size)
        await send_whole(send, 200, answers.encode({"prompt": self._tokenizer.decode(body.tokens)}), JSON)

    async def _health(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, 200, b"", JSON)

    async def _version(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, 200, answers.encode({"version": VERSION}), JSON)

    async def _metrics_page(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, 200, self._metrics.exposition(), "text/plain; version=0.0.4; charset=utf-8")

    async def _reset_prefix_cache(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """200 either way, as vLLM: with requests running nothing is dropped, and the log says so."""
        if not self._engine.reset_prefix_cache():
            log.warning("prefix_cache_not_reset", reason="requests are running")
        await send_whole(send, 200, b"", JSON)

    async def _blocks_asked(self, _scope: Scope, receive: Receive, send: Send) -> None:
        assert self._transfer is not None
        held = self._transfer.asked(openai_bodies.parse_fetch(await _read(receive)))
        await send_whole(send, 200 if held else 404, b"", JSON)

    async def _load_adapter(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_adapter(await _read(receive))
        if not body.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if body.lora_name in self._adapters:
            message = f"The lora adapter '{body.lora_name}' has already been loaded."
            raise ApiError(400, message, kind="InvalidUserInput")
        self._adapters[body.lora_name] = body.lora_path
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        await send_whole(send, 200, text.encode(), "text/plain; charset=utf-8")

    async def _unload_adapter(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_adapter(await _read(receive))
        if self._adapters.pop(body.lora_name, None) is None:
            raise ApiError(404, f"The lora adapter '{body.lora_name}' cannot be found.", kind="NotFoundError")
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        await send_whole(send, 200, text.encode(), "text/plain; charset=utf-8")

    # Parts of the above

    def _authorised(self, scope: Scope) -> bool:
        if not self._served.api_key or not scope["path"].startswith("/v1"):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self._served.api_key.encode())

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name and name not in self._adapters:
            raise openai_bodies.unknown_model(name)

    def _heading(self, scope: Scope, prefix: str, model: str | None) -> answers.Heading:
        """Named after the client's `x-request-id` where there is one."""
        self._answered += 1
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        identity = given.decode("latin-1") or f"{self._started:x}{self._answered:08x}"
        return answers.Heading(f"{prefix}-{identity}", int(time.time()), model or self._served.name)

    def _rendered(self, body: ChatBody | TokenizeBody) -> str:
        if not body.messages:
            raise ApiError(400, "messages must not be empty", param="messages")
        try:
            return self._tokenizer.render_chat(
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
        except (ChatTemplateError, UnsupportedContentError) as error:
            raise ApiError(400, str(error), param="messages") from error

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_TEXT_MAX:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)


_EVERYTHING = 1 << 62


async def _read(receive: Receive) -> bytes:
    """The whole body. Raises ApiError when it is too large, RequestAbortedError when the client hangs up."""
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestAbortedError
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise ApiError(413, f"the body has more than {BODY_BYTES_MAX} bytes", kind="Request Entity Too Large")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
