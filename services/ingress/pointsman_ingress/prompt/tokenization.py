"""Tokenizes prompts as the engine does, by the local tokenizer and chat template or an engine's `/render` or
`/tokenize`. If all fail, tokens are guessed and marked inexact. Of a chat with images only the part before the first is
known; their tokens are estimated. Encoding costs 1 ms per 1,000 characters; long prompts and what comes of large bodies
run in threads."""

import asyncio
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ParamSpec, TypeVar

import msgspec
import structlog

from pointsman.adapters.tokenizer import TemplateRefusedError, Tokenizer, UnsupportedContentError
from pointsman.ports import Clock
from pointsman.primitives import Epoch, InstanceId, Tokens, WallSeconds
from pointsman.runtime.telemetry import TOKENIZATION_SECONDS
from pointsman.runtime.tracing import NO_SPAN, Span
from pointsman.state.fleet import NO_DEMAND, Demand, Instance
from pointsman_ingress.engine.answer import EngineFailedError
from pointsman_ingress.engine.client import EngineClient, EngineRequest
from pointsman_ingress.engine.refusals import lacks_endpoint, reason_in
from pointsman_ingress.http.errors import bad_request, prompt_too_long
from pointsman_ingress.http.json_form import LIGHT_BYTES_MAX
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.prompt.content_parts import Message, text_parts, texts
from pointsman_ingress.prompt.media_tokens import media_tokens
from pointsman_ingress.prompt.parsed_request import (
    Chat,
    Embeddings,
    ParsedRequest,
    Prompt,
    SizedRequest,
    Texts,
    TokenIds,
)
from pointsman_ingress.token_ids import token_ids
from pointsman_ingress.work_threads import WorkThreads

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

Prompts = Sequence[Sequence[int]]

TOKENIZE_PATH = "/tokenize"
INLINE_CHARACTERS_MAX = 512  # longer prompts go to a thread
ENGINE_WALL_SECONDS_MAX: WallSeconds = WallSeconds(10.0)
"""For an answer, and for those to further prompts; then all are guessed."""
PROMPTS_AT_ONCE_MAX = 8
TOKENS_BYTES_MAX = 16 * 1024 * 1024  # two million tokens
TOKENS_BYTES_MIN = 256 * 1024
"""Of an answer, in addition to TOKENS_TIMES_MAX times the body. An engine can send as much for each prompt."""
TOKENS_TIMES_MAX = 16
"""A token is written in at most eight bytes or so, and stands for one byte of text at least."""
PLACEHOLDERS = ("x", "\n\n.")
"""Placeholders for content that is not text: the common prefix of both renderings does not depend on it."""
GUESSED = "guessed"
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class TokenizeContext:
    """For requests to an engine that can serve `demand`."""

    headers: Headers
    request_id: str
    demand: Demand = NO_DEMAND
    owner: str = ""
    light: bool = False
    """Whether the body is small enough to be worked on in the event loop."""
    model_len: Tokens = 0
    """0: unknown."""
    span: Span = NO_SPAN


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Token ids per prompt. `exact`: whether they equal the engine's. `estimated`: further tokens of all prompts, of media or
    vectors."""

    prompts: Prompts
    exact: bool
    known: int | None = None  # exact leading tokens of the first prompt; None: all
    inexact_reason: str = ""
    estimated: Tokens = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.prompts)) + self.estimated

    @property
    def shortest(self) -> int:
        return min(map(len, self.prompts), default=0)

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts), default=0)

    @property
    def keyed(self) -> Sequence[int]:
        return self.prompts[0] if self.known is None else self.prompts[0][: self.known]

    @property
    def prefix_header(self) -> str:
        if not self.inexact_reason:
            return "exact"
        nothing = self.known == 0 or self.inexact_reason == GUESSED
        return f"{'none' if nothing else 'partial'}; {self.inexact_reason}"


@dataclass(eq=False)
class PromptTokenizer:
    tokenizer: Tokenizer | None
    engine: Callable[[Demand], Instance | None]
    engines: EngineClient
    clock: Clock
    failed: Callable[[InstanceId], None] = lambda _: None
    work: WorkThreads = field(default_factory=WorkThreads)
    _cannot_render: set[tuple[InstanceId, Epoch, str]] = field(default_factory=set, init=False)

    def forget_departed(self, present: Collection[Instance]) -> None:
        epochs = {(instance.id, instance.epoch) for instance in present}
        self._cannot_render = {known for known in self._cannot_render if known[:2] in epochs}

    async def tokens(self, request: ParsedRequest, context: TokenizeContext) -> PromptTokens:
        """Raises ApiError for an invalid prompt."""
        started = self.clock.wall()
        try:
            tokens = _truncated(_within(await self._tokens(request, context), context.model_len), request)
        except _InvalidPromptError as error:
            raise bad_request(f"The prompt does not fit this model: {error}.", param=request.prompt_field) from error
        except PromptTooLongError as error:
            raise prompt_too_long(error.tokens_min, context.model_len, param=request.prompt_field) from error
        finally:
            if not isinstance(request.prompt, TokenIds):
                TOKENIZATION_SECONDS.observe(float(self.clock.wall() - started))
        if not request.reads_cache:
            return replace(tokens, known=0, inexact_reason=tokens.inexact_reason or "prompt_logprobs")
        return tokens

    async def _tokens(self, request: ParsedRequest, context: TokenizeContext) -> PromptTokens:
        prompt = self._for_template(request.prompt)
        match prompt:
            case TokenIds():
                return PromptTokens(prompt.prompts, exact=True)
            case SizedRequest():
                return PromptTokens([range(prompt.tokens)], exact=False, known=0, inexact_reason="not looked at")
            case Embeddings():
                return PromptTokens(
                    [[]] * prompt.prompts,
                    exact=False,
                    known=0,
                    inexact_reason="prompt_embeds",
                    estimated=prompt.tokens,
                )
            case Chat() if prompt.template is not None:
                prompts = await self._from_engine(prompt, request.model, context)
            case Chat() if prompt.unsupported:
                return await self._text_prefix(prompt, request.model, context)
            case _:
                try:
                    prompts = await self._encoded(prompt, request.model, context)
                except PromptTooLongError:
                    if not request.truncates:
                        raise
                    prompts = None
        if prompts is None:
            known = 0 if request.truncates else None
            guesses, media = await self._run(context, _guesses, prompt), await self._run(context, _media, prompt)
            return PromptTokens(guesses, exact=False, known=known, inexact_reason=GUESSED, estimated=media)
        return PromptTokens(prompts, exact=True)

    def _for_template(self, prompt: Prompt) -> Prompt:
        tokenizer = self.tokenizer
        if tokenizer is None or not isinstance(prompt, Chat):
            return prompt
        chat = prompt.system_first if prompt.system_first and tokenizer.system_first else prompt
        if not chat.without_thinking:
            return replace(chat, system_first=None) if chat.system_first else chat
        effort = tokenizer.effort_without_thinking
        arguments = {
            "enable_thinking": effort != "none",
            **(chat.chat_template_kwargs or {}),
            "reasoning_effort": effort,
        }
        return replace(chat, system_first=None, without_thinking=False, chat_template_kwargs=arguments)

    async def _text_prefix(self, chat: Chat, model: str, context: TokenizeContext) -> PromptTokens:
        media = await self._run(context, _media, chat)
        variants = []
        for placeholder in PLACEHOLDERS:
            variant = await self._run(context, _with_placeholder, chat, placeholder)
            variants.append(await self._encoded(variant, model, context))
        if not all(variants):
            guesses = await self._run(context, _guesses, chat)
            return PromptTokens(guesses, exact=False, known=0, inexact_reason=chat.unsupported, estimated=media)
        (one, *_), (other, *_) = (prompts or [[]] for prompts in variants)
        known = await self._run(context, _common_length, one, other)
        return PromptTokens([one], exact=False, known=known, inexact_reason=chat.unsupported, estimated=media)

    async def _encoded(self, prompt: Texts | Chat, model: str, context: TokenizeContext) -> Prompts | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return await self._from_engine(prompt, model, context)
        try:
            if context.light and prompt.length <= INLINE_CHARACTERS_MAX:
                return _encode(tokenizer, prompt, context.model_len)
            return await self.work.run(context.owner, _encode, tokenizer, prompt, context.model_len)
        except (UnsupportedContentError, TemplateRefusedError):  # engines may have another template
            return await self._from_engine(prompt, model, context)
        except ValueError as error:
            raise _InvalidPromptError(str(error)) from error

    async def _from_engine(self, prompt: Texts | Chat, model: str, context: TokenizeContext) -> Prompts | None:
        engine = self.engine(context.demand)
        if engine is None:
            return None
        try:
            if isinstance(prompt, Chat) and (rendered := await self._rendered(engine, prompt, context)):
                return [rendered]
            if isinstance(prompt, Chat) and (prompt.system_first or prompt.without_thinking):
                return None  # depends on the engine's template
            first, *others = await self._run(context, _tokenize_bodies, prompt, model)
            tokens = await self._tokenized(engine, first, context, _tokenized)
            return [tokens, *map(range, await self._counts(engine, others, context))]
        except (EngineFailedError, TimeoutError, *_UNREADABLE) as error:
            log.warning("engine_tokenize_failed", instance=engine.id, reason=str(error) or type(error).__name__)
            if isinstance(error, TimeoutError) or (isinstance(error, EngineFailedError) and error.failure is not None):
                self.failed(engine.id)
            return None

    async def _rendered(self, engine: Instance, chat: Chat, context: TokenizeContext) -> Sequence[int]:
        """Empty if the engine cannot render. Raises _InvalidPromptError."""
        path = chat.render_path
        if not chat.body or (engine.id, engine.epoch, path) in self._cannot_render:
            return []
        try:
            status, answer = await self._post(engine, path, chat.body, context)
        except EngineFailedError:
            return []
        if status == 200:
            return await self._read(context, answer, _rendered)
        if lacks_endpoint(status, answer):
            self._cannot_render.add((engine.id, engine.epoch, path))
        return []

    async def _counts(self, engine: Instance, bodies: Sequence[bytes], context: TokenizeContext) -> list[Tokens]:
        """Of the further prompts, whose tokens have no keys. Raises EngineFailedError without a failure: an engine may be
        sound and take longer for so many."""
        counts: list[Tokens] = []
        try:
            async with asyncio.timeout(float(ENGINE_WALL_SECONDS_MAX)):
                for start in range(0, len(bodies), PROMPTS_AT_ONCE_MAX):
                    part = bodies[start : start + PROMPTS_AT_ONCE_MAX]
                    asked = [self._tokenized(engine, body, context, _token_count) for body in part]
                    answers = await asyncio.gather(*asked, return_exceptions=True)  # so that none goes on by itself
                    counts += [_raised(answer) for answer in answers]
        except (EngineFailedError, TimeoutError) as error:
            raise EngineFailedError(
                f"{len(counts)} of {len(bodies)} further prompts were counted: {str(error) or type(error).__name__}"
            ) from error
        return counts

    async def _tokenized(
        self, engine: Instance, body: bytes, context: TokenizeContext, read: Callable[[bytes], T]
    ) -> T:
        status, answer = await self._post(engine, TOKENIZE_PATH, body, context)
        if status != 200:
            raise EngineFailedError(f"its status was {status}")
        return await self._read(context, answer, read)

    async def _read(self, context: TokenizeContext, answer: bytes, read: Callable[[bytes], T]) -> T:
        return await self.work.run_unless(len(answer) <= LIGHT_BYTES_MAX, context.owner, read, answer)

    async def _run(self, context: TokenizeContext, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Its time grows with the body."""
        return await self.work.run_unless(context.light, context.owner, work, *arguments, **named)

    async def _post(self, engine: Instance, path: str, body: bytes, context: TokenizeContext) -> tuple[int, bytes]:
        """Raises EngineFailedError, TimeoutError and _InvalidPromptError."""
        request = EngineRequest(
            engine.id, engine.url, path, body, context.headers, context.request_id, span=context.span
        )
        async with asyncio.timeout(float(ENGINE_WALL_SECONDS_MAX)):
            bytes_max = min(TOKENS_BYTES_MIN + TOKENS_TIMES_MAX * len(body), TOKENS_BYTES_MAX)
            status, answer = await self.engines.ask(request, bytes_max=bytes_max)
        if status in (400, 422):
            raise _InvalidPromptError((reason_in(answer) or "the engine does not say why").rstrip("."))
        return status, answer


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


class _Counted(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_BYTES_MAX)]


def _rendered(answer: bytes) -> Sequence[int]:
    return token_ids(bytes(msgspec.json.decode(answer, type=_Rendered).token_ids))


def _tokenized(answer: bytes) -> Sequence[int]:
    return token_ids(bytes(msgspec.json.decode(answer, type=_Tokenized).tokens))


def _token_count(answer: bytes) -> Tokens:
    return msgspec.json.decode(answer, type=_Counted).count


def _raised(answer: T | BaseException) -> T:
    if isinstance(answer, BaseException):
        raise answer
    return answer


class _InvalidPromptError(Exception):
    """The prompt is invalid."""


class PromptTooLongError(Exception):
    def __init__(self, tokens_min: Tokens) -> None:
        super().__init__()
        self.tokens_min = tokens_min


def _encode(tokenizer: Tokenizer, prompt: Texts | Chat, model_len: Tokens) -> "list[array[int]]":
    """Packed: a list takes ten times as much. Raises PromptTooLongError for texts that exceed the context even in the longest
    tokens."""
    if isinstance(prompt, Texts):
        given = prompt.prompts
    else:
        rendered = tokenizer.render_chat(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            chat_template_kwargs=prompt.chat_template_kwargs,
        )
        given = [rendered]
    for text in given if model_len else ():
        if (tokens_min := tokenizer.tokens_min(text)) > model_len:
            raise PromptTooLongError(tokens_min)
    return [array("I", tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)) for text in given]


def _tokenize_bodies(prompt: Texts | Chat, model: str) -> list[bytes]:
    named = {"model": model} if model else {}
    if isinstance(prompt, Texts):
        special = prompt.add_special_tokens
        return [
            msgspec.json.encode({**named, "prompt": text, "add_special_tokens": special}) for text in prompt.prompts
        ]
    body = {
        **named,
        "messages": [_with_reasoning(message) for message in prompt.messages],
        "tools": prompt.tools,
        "chat_template": prompt.template,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": prompt.chat_template_kwargs,
        "add_special_tokens": prompt.add_special_tokens,
    }
    return [msgspec.json.encode({name: value for name, value in body.items() if value is not None})]


def _with_reasoning(message: Message) -> Message:
    """`/tokenize` accepts only the newer field name."""
    older = message.get("reasoning_content")
    if older is None or message.get("reasoning") is not None:
        return message
    return {**{name: value for name, value in message.items() if name != "reasoning_content"}, "reasoning": older}


def _with_placeholder(chat: Chat, placeholder: str) -> Chat:
    messages = [{**message, "content": text_parts(message.get("content"))} for message in chat.messages]
    at = messages[chat.unsupported_message]
    at["content"] = placeholder + "\n".join(texts(at["content"]))
    return replace(chat, messages=messages, unsupported="", body=b"")


def _truncated(tokens: PromptTokens, request: ParsedRequest) -> PromptTokens:
    """Truncates as the engine does. Without a side the tokenizer decides; most keep the beginning."""
    if not request.truncates:
        return tokens
    kept = request.truncate_to
    if kept and all(len(prompt) <= kept for prompt in tokens.prompts):
        return tokens
    if kept and request.truncation_side in ("left", "right") and tokens.exact:
        left = request.truncation_side == "left"
        return replace(tokens, prompts=[prompt[-kept:] if left else prompt[:kept] for prompt in tokens.prompts])
    known = kept if tokens.known is None and kept else tokens.known
    return replace(tokens, exact=False, known=known, inexact_reason=tokens.inexact_reason or "truncate_prompt_tokens")


def _within(tokens: PromptTokens, model_len: Tokens) -> PromptTokens:
    """No estimate exceeds what fits beside the known tokens."""
    if not model_len or not tokens.estimated:
        return tokens
    room = len(tokens.prompts) * model_len - sum(map(len, tokens.prompts))
    return replace(tokens, estimated=min(tokens.estimated, max(0, room)))


def _media(prompt: Texts | Chat) -> Tokens:
    return media_tokens(prompt.messages) if isinstance(prompt, Chat) and prompt.unsupported else 0


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shorter)


def _guesses(prompt: Texts | Chat) -> Prompts:
    """Four bytes per token: equal prefixes stay equal. Of a chat the text alone: an image's bytes are no tokens."""
    if isinstance(prompt, Texts):
        return [_guess(text.encode(errors="replace")) for text in prompt.prompts]
    messages = [
        {**message, "content": text_parts(message["content"])} if "content" in message else message
        for message in prompt.messages
    ]
    return [_guess(msgspec.json.encode(messages))]


def _guess(data: bytes) -> Sequence[int]:
    return array("I", data + bytes(-len(data) % 4))
