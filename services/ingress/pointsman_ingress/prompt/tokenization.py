"""Prompts as the engine will see them: token ids, made once per request.

Three ways, best first: token ids as the client sent them; the model's own tokenizer and chat template, in this
process; an engine, which is asked to render the request (`/v1/chat/completions/render`, `/v1/messages/render`) or at least
to tokenise it (`/tokenize`). If all fail the prompt is guessed, so that the request is still served, and marked as not exact: its
keys then match nothing but other guesses.

Of a chat with images and the like only the beginning is known: up to the message that holds the first of them. That
much is tokenised, and cut where the tokens no longer depend on the text alone. `Tokens.said` tells the client.

Encoding costs about a millisecond for a thousand characters and must not hold up other requests, so long prompts go
to threads (the tokenizer releases the GIL); a short one is done in place, where the hop to a thread would cost more.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import structlog

from pointsman.adapters.tokenizer import UnsupportedContentError
from pointsman.ports import Clock
from pointsman.primitives import Epoch, InstanceId, Seconds
from pointsman.runtime.telemetry import TOKENIZATION_SECONDS
from pointsman.state.fleet import NO_DEMAND, Demand, Instance
from pointsman_ingress.engine.proxy import EngineClient, EngineFailedError, lacks_endpoint
from pointsman_ingress.http.endpoints import TOKENIZE
from pointsman_ingress.http.openai_errors import bad_request
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.prompt.content_parts import text_parts, texts
from pointsman_ingress.prompt.openai_requests import (
    Chat,
    Embeddings,
    ParsedRequest,
    Prompt,
    SizedRequest,
    Texts,
    Tokenised,
)

log = structlog.get_logger()

TOKENIZE_THREADS = 2
"""Threads that tokenize long prompts."""

INLINE_CHARACTERS_MAX = 512
"""Prompts up to here are encoded in place."""

ENGINE_WALL_SECONDS_MAX: Seconds = 10.0
"""How long an engine's `/tokenize` may take before the prompt is guessed."""

TOKENS_BYTES_MAX = 16 * 1024 * 1024
"""Largest answer of an engine that is asked for tokens: two million of them."""

MARKS = ("x", "\n\n.")
"""Texts in place of content that is none: what stands before it has the same tokens whichever it is, or is not known."""

GUESSED = "guessed"
"""What is said of a prompt that nobody could tokenise."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding an engine's answer may raise."""

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

    @property
    def system_first(self) -> bool:
        """Whether a system message must be the first."""
        ...

    @property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` by which the template is told that there shall be no thinking."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizeContext:
    """In whose name an engine is asked, should one have to be, and which of them can tell."""

    headers: Headers
    request_id: str
    demand: Demand = NO_DEMAND
    """What the request needs: an engine that cannot serve it may not even know the model's name."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of each prompt in the request (nearly always one). `exact`: whether they are the engine's own."""

    prompts: Sequence[Sequence[int]]
    exact: bool
    known: int | None = None
    """Leading tokens of the first prompt that are the engine's own and found in its cache; None: all of them."""
    doubt: str = ""
    """What keeps the rest from being known."""

    @property
    def count(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def keyed(self) -> Sequence[int]:
        """What block keys are made of."""
        return self.prompts[0] if self.known is None else self.prompts[0][: self.known]

    @property
    def said(self) -> str:
        """For the header x-pointsman-prefix."""
        if not self.doubt:
            return "exact"
        nothing = self.known == 0 or self.doubt == GUESSED
        return f"{'none' if nothing else 'partial'}; {self.doubt}"


class Tokenizing:
    """Turns prompts into tokens, within the process where a tokenizer is given."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer | None,
        engine: Callable[[Demand], Instance | None],
        engines: EngineClient,
        clock: Clock,
        failed: Callable[[InstanceId], None] = lambda _: None,
    ) -> None:
        """`engine` gives an instance to ask where there is no `tokenizer`; `failed` is told of one that did not answer."""
        self._tokenizer = tokenizer
        self._engine = engine
        self._engines = engines
        self._failed = failed
        self._threads = ThreadPoolExecutor(TOKENIZE_THREADS, thread_name_prefix="tokenise")
        self._clock = clock
        self._renders_not: set[tuple[InstanceId, Epoch, str]] = set()
        """Engines that were asked to render and cannot, and where."""

    async def tokens(self, asked: ParsedRequest, inquiry: TokenizeContext) -> Tokens:
        """The request's tokens. Raises Refusal where the prompt itself is at fault."""
        started = self._clock.wall()
        try:
            tokens = _truncated(await self._understood(asked, inquiry), asked)
        except _ImpossibleError as error:
            msg = f"The prompt does not fit this model: {error}."
            raise bad_request(msg, param=asked.prompt_field) from error
        finally:
            if not isinstance(asked.prompt, Tokenised):
                TOKENIZATION_SECONDS.observe(self._clock.wall() - started)
        if not asked.reads_cache:
            return replace(tokens, known=0, doubt=tokens.doubt or "prompt_logprobs")
        return tokens

    async def _understood(self, asked: ParsedRequest, inquiry: TokenizeContext) -> Tokens:
        prompt = self._for_this_template(asked.prompt)
        match prompt:
            case Tokenised():
                return Tokens(prompt.prompts, exact=True)
            case SizedRequest():
                return Tokens([[0] * prompt.tokens], exact=False, known=0, doubt="not looked at")
            case Embeddings():
                return Tokens([[0]], exact=False, known=0, doubt="prompt_embeds")
            case Chat() if prompt.template is not None:
                prompts = await self._ask_engine(prompt, asked.model, inquiry)
            case Chat() if prompt.foreign:
                return await self._beginning(prompt, asked.model, inquiry)
            case _:
                prompts = await self._encoded(prompt, asked.model, inquiry)
        if prompts is None:
            return Tokens(_guesses(prompt), exact=False, known=0 if asked.truncates else None, doubt=GUESSED)
        return Tokens(prompts, exact=True)

    def _for_this_template(self, prompt: Prompt) -> Prompt:
        """As this model's template is given it, where templates are given different things for the same request."""
        tokenizer = self._tokenizer
        if tokenizer is None or not isinstance(prompt, Chat):
            return prompt
        chat = prompt.system_first if prompt.system_first and tokenizer.system_first else prompt
        if not chat.without_thinking:
            return replace(chat, system_first=None) if chat.system_first else chat
        effort = tokenizer.effort_without_thinking
        told = {"enable_thinking": effort != "none", **(chat.chat_template_kwargs or {}), "reasoning_effort": effort}
        return replace(chat, system_first=None, without_thinking=False, chat_template_kwargs=told)

    async def _beginning(self, chat: Chat, model: str, inquiry: TokenizeContext) -> Tokens:
        """Of a chat that is not only text: the tokens before the message that is not, as far as no text in its place
        could change them."""
        variants = [await self._encoded(_in_words(chat, mark), model, inquiry) for mark in MARKS]
        if not all(variants):
            return Tokens(_guesses(chat), exact=False, known=0, doubt=chat.foreign)
        (one, *_), (other, *_) = (prompts or [[]] for prompts in variants)
        known = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        return Tokens([one], exact=False, known=known, doubt=chat.foreign)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encoded(self, prompt: Texts | Chat, model: str, inquiry: TokenizeContext) -> list[list[int]] | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return await self._ask_engine(prompt, model, inquiry)
        try:
            return await self._aside(lambda: _encode(tokenizer, prompt), prompt.length)
        except UnsupportedContentError:
            return await self._ask_engine(prompt, model, inquiry)
        except ValueError as error:
            raise _ImpossibleError(str(error)) from error

    async def _aside(self, work: Callable[[], T], characters: int) -> T:
        if characters <= INLINE_CHARACTERS_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _ask_engine(self, prompt: Texts | Chat, model: str, inquiry: TokenizeContext) -> list[list[int]] | None:
        engine = self._engine(inquiry.demand)
        if engine is None:
            return None
        try:
            async with asyncio.timeout(ENGINE_WALL_SECONDS_MAX):
                if isinstance(prompt, Chat) and (rendered := await self._rendered(engine, prompt, inquiry)):
                    return [rendered]
                if isinstance(prompt, Chat) and (prompt.system_first or prompt.without_thinking):
                    return None  # it depends on the template, which only the engine has
                return [await self._tokenised(engine, question, inquiry) for question in _questions(prompt, model)]
        except (EngineFailedError, TimeoutError, *_UNREADABLE) as error:
            log.warning("engine_tokenize_failed", instance=engine.id, reason=str(error) or type(error).__name__)
            if isinstance(error, TimeoutError) or (isinstance(error, EngineFailedError) and error.failure is not None):
                self._failed(engine.id)
            return None

    async def _rendered(self, engine: Instance, chat: Chat, inquiry: TokenizeContext) -> list[int]:
        """What the engine makes of the very same request; nothing where it does not, which `/tokenize` may do all the
        same. Raises _ImpossibleError."""
        path = chat.render_path
        if not chat.body or (engine.id, engine.epoch, path) in self._renders_not:
            return []
        try:
            status, answer = await self._ask(engine, path, chat.body, inquiry)
        except EngineFailedError:
            return []
        if status == 200:
            return msgspec.json.decode(answer, type=_Rendered).token_ids
        if lacks_endpoint(status, answer):
            self._renders_not.add((engine.id, engine.epoch, path))
        return []

    async def _tokenised(self, engine: Instance, question: dict[str, Any], inquiry: TokenizeContext) -> list[int]:
        """Raises as `_ask`."""
        status, answer = await self._ask(engine, TOKENIZE.path, msgspec.json.encode(question), inquiry)
        if status != 200:
            msg = f"its status was {status}"
            raise EngineFailedError(msg)
        return msgspec.json.decode(answer, type=_TokenizeAnswer).tokens

    async def _ask(self, engine: Instance, path: str, body: bytes, inquiry: TokenizeContext) -> tuple[int, bytes]:
        """Raises EngineFailedError, and _ImpossibleError where the engine says that the prompt is at fault."""
        async with await self._engines.send(engine.url, path, body, inquiry.headers, inquiry.request_id) as reply:
            status, answer = reply.status, await reply.whole(bytes_max=TOKENS_BYTES_MAX)
        if status in (400, 422):
            raise _ImpossibleError(_complaint(answer))
        return status, answer


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Rendered(msgspec.Struct):
    token_ids: list[_TokenId]


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[_TokenId]


class _ImpossibleError(Exception):
    """The prompt itself is at fault; says why."""


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
        "messages": [_with_reasoning(message) for message in prompt.messages],
        "tools": prompt.tools,
        "chat_template": prompt.template,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": prompt.chat_template_kwargs,
        "add_special_tokens": prompt.add_special_tokens,
    }
    return [{name: value for name, value in question.items() if value is not None}]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """With reasoning under its newer name, the only one that `/tokenize` knows."""
    older = message.get("reasoning_content")
    if older is None or message.get("reasoning") is not None:
        return message
    return {**{name: value for name, value in message.items() if name != "reasoning_content"}, "reasoning": older}


def _in_words(chat: Chat, mark: str) -> Chat:
    """The chat with `mark` at the start of the message that holds the first part which is no text, and without any such
    part."""
    messages = [{**message, "content": text_parts(message.get("content"))} for message in chat.messages]
    at = messages[chat.foreign_message]
    at["content"] = mark + "\n".join(texts(at["content"]))
    return replace(chat, messages=messages, foreign="", body=b"")


def _truncated(tokens: Tokens, asked: ParsedRequest) -> Tokens:
    """Cut as the engine cuts. Where the client does not say from which side, the tokenizer decides: most keep the
    beginning."""
    if not asked.truncates:
        return tokens
    kept = asked.truncate_to
    if kept and all(len(prompt) <= kept for prompt in tokens.prompts):
        return tokens
    if kept and asked.truncation_side in ("left", "right") and tokens.exact:
        left = asked.truncation_side == "left"
        return replace(tokens, prompts=[prompt[-kept:] if left else prompt[:kept] for prompt in tokens.prompts])
    known = kept if tokens.known is None and kept else tokens.known
    return replace(tokens, exact=False, known=known, doubt=tokens.doubt or "truncate_prompt_tokens")


def _complaint(body: bytes) -> str:
    """What the engine has against the prompt, for the client to read."""
    try:
        answer = msgspec.json.decode(body)
        error = answer.get("error", answer)
        message = error.get("message") or error.get("detail")
    except (*_UNREADABLE, AttributeError):
        message = None
    return (message if isinstance(message, str) and message else "the engine does not say why")[:500].rstrip(".")


def _guesses(prompt: Texts | Chat) -> list[list[int]]:
    """Stand-ins for tokens, four bytes of text each: equal prefixes stay equal, and the count is about right."""
    texts = prompt.prompts if isinstance(prompt, Texts) else [msgspec.json.encode(prompt.messages).decode()]
    return [_guess(text.encode(errors="replace")) for text in texts]


def _guess(data: bytes) -> list[int]:
    return list(array("I", data + bytes(-len(data) % 4)))
