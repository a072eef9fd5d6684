"""Generation for all routes. A client that disconnects aborts its request."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from pointsman.adapters.tokenizer import ChatTemplateError, Tokenizer, UnsupportedContentError
from pointsman.primitives import Tokens
from pointsman.runtime.health import Receive, Scope, Send, send_whole
from pointsman.simulation.block_cache import PromptIdentity
from pointsman_engine_sim import answers, openai_bodies
from pointsman_engine_sim.engine import EngineStoppedError, Generation, LiveEngine
from pointsman_engine_sim.metrics import EngineMetrics
from pointsman_engine_sim.openai_bodies import ApiError, ChatBody, CompletionBody, TokenizeBody

if TYPE_CHECKING:
    from pointsman_engine_sim.kv_transfer import KvTransfer

log = structlog.get_logger()

INLINE_TEXT_MAX = 2048
_EVERYTHING = 1 << 62
JSON = "application/json"
_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    max_model_len: Tokens
    stream_interval: Tokens = 1
    api_key: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    generation: Generation
    prompt_tokens: Tokens
    frames: answers.Frames
    whole: Callable[[answers.Heading, str, dict[str, object], dict[str, object] | None], bytes]
    heading: answers.Heading
    stream: bool
    stream_usage: bool
    usage: Callable[..., dict[str, object]] = answers.usage


class Generator:
    def __init__(
        self,
        engine: LiveEngine,
        *,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        served: ServedModel,
        transfer: "KvTransfer | None" = None,
    ) -> None:
        """`transfer`: the engine's connector; without one `kv_transfer_params` are ignored, as in vLLM."""
        self._engine = engine
        self._transfer = transfer
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._served = served
        self._adapters = dict(served.adapters)
        self._started = int(time.time())
        self._answered = 0

    async def _submit(
        self, body: openai_bodies.Generate, tokens: list[int], requested: Tokens | None, default: Tokens
    ) -> Generation:
        openai_bodies.check_salt(body.cache_salt)
        openai_bodies.check_tokens(tokens, vocab_size=self._tokenizer.vocab_size)
        max_tokens = openai_bodies.output_tokens(
            requested=requested, default=default, prompt=len(tokens), max_model_len=self._served.max_model_len
        )
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}."
            raise ApiError(400, message, param="min_tokens")
        lora = body.model if body.model in self._adapters else ""
        identity = PromptIdentity(lora=lora or "", cache_salt=body.cache_salt or "")
        if self._transfer is None or not body.kv_transfer_params:
            return self._engine.submit(tokens, max_tokens=max_tokens, identity=identity)
        params = openai_bodies.transfer_params(body.kv_transfer_params)
        received = 0
        if params.do_remote_prefill:
            missing = max(0, len(tokens) - self._engine.cached_tokens(tokens, identity))
            await self._transfer.fetch(params, missing)
            received = len(tokens)
        held = bool(params.do_remote_decode) and not body.wants_stream
        return self._engine.submit(tokens, max_tokens=max_tokens, identity=identity, received=received, held=held)

    async def _prefill(self, receive: Receive, model: str | None, tokens: list[int], salt: str | None) -> None:
        generation = await self._submit(CompletionBody(model=model, cache_salt=salt), tokens, 1, 1)
        try:
            async with self._aborted_when_gone(receive, generation):
                await generation.reached(1)
        except EngineStoppedError as error:
            raise ApiError(503, str(error), kind="ServiceUnavailableError") from error
        finally:
            self._engine.abort(generation)

    async def _answer(self, receive: Receive, send: Send, answer: Answer) -> None:
        generation = answer.generation
        try:
            async with self._aborted_when_gone(receive, generation):
                await (self._stream(send, answer) if answer.stream else self._send_when_finished(send, answer))
        except EngineStoppedError as error:
            await self._fail(send, answer, ApiError(503, str(error), kind="ServiceUnavailableError"))
        finally:
            self._engine.abort(generation)

    async def _send_when_finished(self, send: Send, answer: Answer) -> None:
        generation = answer.generation
        await generation.reached(_EVERYTHING)
        text = generation.passage.text(0, generation.tokens)
        place = None
        if generation.held and self._transfer is not None:
            place = self._transfer.offer(generation.request, answer.prompt_tokens)
        await send_whole(send, 200, answer.whole(answer.heading, text, self._usage(answer), place), JSON)

    async def _stream(self, send: Send, answer: Answer) -> None:
        """A chunk whenever enough is new; the first token and the end are sent at once."""
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

    def _stream_end(self, answer: Answer) -> bytes:
        generation = answer.generation
        text = generation.passage.text(0, generation.tokens)
        return answer.frames.ending(text, self._usage(answer) if answer.stream_usage else None)

    def _usage(self, answer: Answer) -> dict[str, object]:
        generation = answer.generation
        return answer.usage(prompt=answer.prompt_tokens, completion=generation.tokens, cached=generation.cached_tokens)

    async def _fail(self, send: Send, answer: Answer, error: ApiError) -> None:
        if answer.stream:
            await send({"type": "http.response.body", "body": b"data: " + error.body + b"\n\n"})
        else:
            await send_whole(send, error.status, error.body, JSON)

    @contextlib.asynccontextmanager
    async def _aborted_when_gone(self, receive: Receive, generation: Generation) -> AsyncIterator[None]:
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

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name and name not in self._adapters:
            raise openai_bodies.unknown_model(name)

    def _heading(self, scope: Scope, prefix: str, model: str | None) -> answers.Heading:
        self._answered += 1
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        identity = given.decode("latin-1") or f"{self._started:x}{self._answered:08x}"
        log.debug("request_received", request=identity)
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
