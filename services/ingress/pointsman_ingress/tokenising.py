"""Prompts as the engine will see them: token ids, made once per request.

Three ways, best first: token ids as the client sent them; the model's own tokenizer and chat template, in this
process; the `/tokenize` of an engine. If all fail the prompt is guessed, so that the request is still served, and
marked as not exact: its keys then match nothing but other guesses.

Encoding costs about a millisecond for a thousand characters and must not hold up other requests, so long prompts go
to threads (the tokenizer releases the GIL); a short one is done in place, where the hop to a thread would cost more.
"""

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
import structlog

from pointsman.adapters.tokenizer import UnsupportedContentError
from pointsman.chassis.telemetry import TOKENISE_SECONDS
from pointsman.ports import Clock
from pointsman.primitives import Seconds
from pointsman.state.fleet import Instance
from pointsman_ingress.openai_errors import Refusal, bad_request
from pointsman_ingress.openai_requests import Asked, Chat, Texts, Tokenised

log = structlog.get_logger()

INLINE_CHARACTERS_MAX = 512
"""Prompts up to here are encoded in place."""

ENGINE_WALL_SECONDS_MAX: Seconds = 10.0
"""How long an engine's `/tokenize` may take before the prompt is guessed."""

T = TypeVar("T")


class TextTokenizer(Protocol):
    """The model's tokenizer and chat template. Thread-safe. Both raise ValueError for what they cannot take, of which
    UnsupportedContentError means that the engine can."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of each prompt in the request (nearly always one). `exact`: whether they are the engine's own."""

    prompts: list[list[int]]
    exact: bool

    @property
    def count(self) -> int:
        return sum(map(len, self.prompts))


class Tokenising:
    """Turns prompts into tokens, within the process where a tokenizer is given."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer | None,
        engine: Callable[[], Instance | None],
        session: aiohttp.ClientSession,
        engine_headers: dict[str, str],
        threads: int,
        clock: Clock,
    ) -> None:
        """`engine` gives an instance to ask where there is no `tokenizer`."""
        self._tokenizer = tokenizer
        self._engine = engine
        self._session = session
        self._engine_headers = engine_headers
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self._clock = clock

    async def tokens(self, asked: Asked) -> Tokens:
        """The request's tokens. Raises Refusal where the prompt itself is at fault."""
        prompt = asked.prompt
        if isinstance(prompt, Tokenised):
            return Tokens(prompt.prompts, exact=not asked.truncates)
        started = self._clock.wall()
        try:
            prompts = await self._encoded(prompt, asked.model)
        finally:
            TOKENISE_SECONDS.observe(self._clock.wall() - started)
        if prompts is None:
            return Tokens(_guesses(prompt), exact=False)
        return Tokens(prompts, exact=not asked.truncates and (isinstance(prompt, Texts) or prompt.text_only))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encoded(self, prompt: Texts | Chat, model: str) -> list[list[int]] | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return await self._ask_engine(prompt, model)
        try:
            return await self._aside(lambda: _encode(tokenizer, prompt), prompt.length)
        except UnsupportedContentError:
            return await self._ask_engine(prompt, model)
        except ValueError as error:
            msg = f"The prompt cannot be tokenised: {error}."
            raise bad_request(msg, param="messages") from error

    async def _aside(self, work: Callable[[], T], characters: int) -> T:
        if characters <= INLINE_CHARACTERS_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _ask_engine(self, prompt: Texts | Chat, model: str) -> list[list[int]] | None:
        engine = self._engine()
        if engine is None:
            return None
        try:
            async with asyncio.timeout(ENGINE_WALL_SECONDS_MAX):
                return [await self._ask(engine, question) for question in _questions(prompt, model)]
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, _NoTokenizeError) as error:
            log.warning("engine_tokenize_failed", instance=engine.id, reason=str(error) or type(error).__name__)
            return None

    async def _ask(self, engine: Instance, question: dict[str, Any]) -> list[int]:
        url = engine.url.rstrip("/") + "/tokenize"
        headers = {"content-type": "application/json", **self._engine_headers}
        async with self._session.post(url, data=msgspec.json.encode(question), headers=headers) as reply:
            body = await reply.read()
            if reply.status in (400, 422):
                raise _engine_refusal(body)
            if reply.status != 200:
                msg = f"status {reply.status}"
                raise _NoTokenizeError(msg)
            return msgspec.json.decode(body, type=_TokenizeAnswer).tokens


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[int]


class _NoTokenizeError(Exception):
    """The engine has no usable `/tokenize`."""


def _encode(tokenizer: TextTokenizer, prompt: Texts | Chat) -> list[list[int]]:
    if isinstance(prompt, Texts):
        return [tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens) for text in prompt.prompts]
    text = tokenizer.render_chat(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        chat_template_kwargs=prompt.chat_template_kwargs,
    )
    return [tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)]


def _questions(prompt: Texts | Chat, model: str) -> list[dict[str, Any]]:
    """Bodies for the engine's `/tokenize`, one a prompt."""
    named = {"model": model} if model else {}
    if isinstance(prompt, Texts):
        special = prompt.add_special_tokens
        return [{**named, "prompt": text, "add_special_tokens": special} for text in prompt.prompts]
    question = {
        **named,
        "messages": prompt.messages,
        "tools": prompt.tools,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": prompt.chat_template_kwargs,
        "add_special_tokens": prompt.add_special_tokens,
    }
    return [{name: value for name, value in question.items() if value is not None}]


def _engine_refusal(body: bytes) -> Refusal:
    """What the engine has against the prompt, for the client to read."""
    try:
        answer = msgspec.json.decode(body)
        error = answer.get("error", answer)
        message = str(error.get("message") or error.get("detail") or "it does not fit the model")
    except (msgspec.DecodeError, AttributeError):
        message = "it does not fit the model"
    return bad_request(f"The prompt cannot be tokenised: {message[:500]}.", param="messages")


def _guesses(prompt: Texts | Chat) -> list[list[int]]:
    """Stand-ins for tokens, four bytes of text each: equal prefixes stay equal, and the count is about right."""
    texts = prompt.prompts if isinstance(prompt, Texts) else [msgspec.json.encode(prompt.messages).decode()]
    return [_guess(text.encode(errors="replace")) for text in texts]


def _guess(data: bytes) -> list[int]:
    return list(array("I", data + bytes(-len(data) % 4)))
