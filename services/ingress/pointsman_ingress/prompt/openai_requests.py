"""What a client asks for in a body: the few fields of OpenAI's that routing needs, checked. `request_headers` has the rest.

Pure. Unknown fields are not looked at, the body itself is forwarded as it came. A body that cannot be served is
refused here, before anything is tokenised or logged.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from pointsman.primitives import Tokens
from pointsman_ingress.http.audio_form import read_form
from pointsman_ingress.http.openai_errors import bad_request
from pointsman_ingress.prompt.content_parts import first_foreign, texts
from pointsman_ingress.prompt.messages_input import has_system_messages, messages_form
from pointsman_ingress.prompt.responses_input import chat_form

COMPLETION_OUTPUT_TOKENS = 16
"""What /v1/completions gives when nothing is asked for, as OpenAI defines it."""

AUDIO_BYTES_A_TOKEN = 500
"""Whisper makes 50 tokens of a second of sound, which is 16 kB as MP3 and 32 kB as WAV."""

AUDIO_BYTES_A_WORD = 4000
"""Of a token that is written down: four a second."""

PAIRS_TOKENS_MAX: Tokens = 2**31
"""A long query times many documents is more than any engine reads, and more than the log can hold."""

SALT_LENGTH_MAX = 1024


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    n: int | None = None
    prompt_logprobs: int | None = None


class _CompletionBody(_Body):
    prompt: str | list[int | str | list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class _ChatBody(_Body):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class _ResponseBody(_Body):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    previous_input_messages: list[Any] | None = None
    prompt: Any = None
    reasoning: _Reasoning | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Thinking(msgspec.Struct):
    type: str | None = None


class _MessagesBody(_Body):
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None
    thinking: _Thinking | None = None
    output_config: _Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _EmbeddingsBody(_Body):
    input: Any = None
    messages: list[Any] | None = None


class _PairsBody(_Body):
    """Of either side of the pairs there is one; the others are its other names."""

    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


class _PooledBody(_Body):
    input: Any = None
    messages: Any = None
    data: Any = None


F = TypeVar("F", bound=_Body)

_completion_body = msgspec.json.Decoder(_CompletionBody)
_chat_body = msgspec.json.Decoder(_ChatBody)
_response_body = msgspec.json.Decoder(_ResponseBody)
_messages_body = msgspec.json.Decoder(_MessagesBody)
_embeddings_body = msgspec.json.Decoder(_EmbeddingsBody)
_pairs_body = msgspec.json.Decoder(_PairsBody)
_pooled_body = msgspec.json.Decoder(_PooledBody)
_any_body = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A prompt that came as token ids: there is nothing left to do. Several where the client sent a batch. Packed as 32 bits
    each, as they are hashed."""

    prompts: list[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as text, for /v1/completions."""

    prompts: list[str]
    add_special_tokens: bool = True

    @property
    def length(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, which the model's chat template turns into text."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False
    foreign: str = ""
    """The kind of the first content part that is no text; empty where all is text."""
    foreign_message: int = 0
    """Where it is."""
    template: str | None = None
    """The client's own chat template, where it brings one."""
    body: bytes = field(default=b"", compare=False, repr=False)
    """The request as the client sent it, which an engine can render; empty where it cannot."""
    render_path: str = field(default="", compare=False, repr=False)
    """Where it renders it."""
    system_first: "Chat | None" = None
    """The same for a template that takes a system message at the head alone; None where all templates are given the same."""
    without_thinking: bool = False
    """Whether the client wants no thinking. How a template is told so depends on the template."""

    @property
    def length(self) -> int:
        """Characters, about."""
        characters = sum(len(text) for message in self.messages for text in texts(message.get("content")))
        return characters + (1000 * len(self.tools) if self.tools else 0)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors in place of tokens, and perhaps texts beside them. Nobody can say what tokens they are."""


@dataclass(frozen=True, slots=True)
class SizedRequest:
    """A prompt that nobody reads on the way: of how many tokens, about, is all that counts."""

    tokens: Tokens


Prompt = Tokenised | Texts | Chat | Embeddings | SizedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One request, as far as routing cares. `output_tokens` None: as many as fit."""

    model: str
    prompt: Prompt
    prompt_field: str
    """Where in the body the prompt is."""
    stream: bool
    output_tokens: Tokens | None
    output_demanded: bool
    """Whether the client named `output_tokens`; then prompt and output must fit the model together."""
    user: str
    cache_salt: str
    truncates: bool
    truncate_to: Tokens = 0
    """How many tokens of the prompt are to be kept; 0 where that is not for us to say."""
    truncation_side: str = ""
    reads_cache: bool = True
    """Whether the engine may use its cache: not where the client wants to know how likely the prompt is."""
    answers: int = 1
    """Answers to each prompt."""
    usage_may_be_asked: bool = False
    """Whether it is a stream whose client did not ask for its usage, so that it can be asked for and kept from it."""


def parse_completion(body: bytes) -> ParsedRequest:
    """A body of /v1/completions. Raises Refusal."""
    fields = _decode(_completion_body, body)
    prompt = _completion_prompt(fields)
    output_tokens = _positive(fields.max_tokens, "max_tokens")
    echoes = fields.echo is True and fields.logprobs is not None
    return _asked(
        fields,
        prompt,
        COMPLETION_OUTPUT_TOKENS if output_tokens is None else output_tokens,
        output_tokens,
        prompt_field="prompt",
        reads_cache=fields.prompt_logprobs is None and not echoes,
    )


def parse_chat(body: bytes) -> ParsedRequest:
    """A body of /v1/chat/completions. Raises Refusal."""
    fields = _decode(_chat_body, body)
    if not fields.messages:
        msg = "`messages` must hold at least one message."
        raise bad_request(msg, param="messages")
    output_tokens = _positive(fields.max_completion_tokens, "max_completion_tokens")
    older_name = _positive(fields.max_tokens, "max_tokens")
    if output_tokens is None:
        output_tokens = older_name
    foreign, foreign_message = first_foreign(fields.messages)
    prompt = Chat(
        messages=fields.messages,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message is True,
        chat_template_kwargs=_template_arguments(fields),
        add_special_tokens=fields.add_special_tokens is True,
        foreign=foreign,
        foreign_message=foreign_message,
        template=fields.chat_template,
        body=body,
        render_path="/v1/chat/completions/render",
    )
    reads_cache = fields.prompt_logprobs is None
    return _asked(fields, prompt, output_tokens, output_tokens, prompt_field="messages", reads_cache=reads_cache)


def parse_response(body: bytes) -> ParsedRequest:
    """A body of /v1/responses. Raises Refusal."""
    fields = _decode(_response_body, body)
    if not fields.input and not fields.previous_input_messages:
        msg = "`input` must be a text or a list of items."
        raise bad_request(msg, param="input")
    elsewhere = [name for name in _KEPT_ELSEWHERE if getattr(fields, name)]
    form = chat_form(
        instructions=fields.instructions or "",
        given=fields.input or "",
        tools=fields.tools or [],
        kept_elsewhere=elsewhere[0] if elsewhere else "",
    )
    prompt = Chat(
        messages=form.messages,
        tools=form.tools,
        add_generation_prompt=not form.continues,
        continue_final_message=form.continues,
        chat_template_kwargs=_with_effort(fields.chat_template_kwargs, fields.reasoning),
        add_special_tokens=True,
        foreign=form.foreign,
        foreign_message=form.foreign_message,
    )
    output_tokens = _positive(fields.max_output_tokens, "max_output_tokens")
    asked = _asked(fields, prompt, output_tokens, output_tokens, prompt_field="input")
    truncates = fields.truncation not in (None, "disabled")
    return replace(asked, truncates=truncates, truncate_to=0, usage_may_be_asked=False)


def parse_messages(body: bytes) -> ParsedRequest:
    """A body of Anthropic's /v1/messages. Raises Refusal."""
    fields = _decode(_messages_body, body)
    if not fields.messages:
        msg = "`messages` must hold at least one message."
        raise bad_request(msg, param="messages")
    prompt = _chat_of_messages(fields, fields.messages, body, system_first=False)
    if has_system_messages(fields.messages):
        prompt = replace(prompt, system_first=_chat_of_messages(fields, fields.messages, body, system_first=True))
    output_tokens = _positive(fields.max_tokens, "max_tokens")
    asked = _asked(fields, prompt, output_tokens, output_tokens, prompt_field="messages")
    user = (fields.metadata or {}).get("user_id")
    return replace(
        asked,
        user=user if isinstance(user, str) else "",
        truncates=False,
        truncate_to=0,
        answers=1,
        usage_may_be_asked=False,
    )


def _chat_of_messages(
    fields: _MessagesBody, messages: list[dict[str, Any]], body: bytes, *, system_first: bool
) -> Chat:
    form = messages_form(system=fields.system or "", messages=messages, tools=fields.tools, system_first=system_first)
    return Chat(
        messages=form.messages,
        tools=form.tools,
        chat_template_kwargs=_with_effort(fields.chat_template_kwargs, fields.output_config),
        foreign=form.foreign,
        foreign_message=form.foreign_message,
        body=body,
        render_path="/v1/messages/render",
        without_thinking=fields.thinking is not None and fields.thinking.type == "disabled",
    )


def parse_embeddings(body: bytes) -> ParsedRequest:
    """A body of /v1/embeddings: only how much there is to read is looked at. Raises Refusal."""
    fields = _decode(_embeddings_body, body)
    given = fields.messages or fields.input
    if not given:
        msg = "`input` must be a text, a list of texts, or token ids."
        raise bad_request(msg, param="input")
    return replace(_asked(fields, SizedRequest(max(1, _size(given))), 0, 0, prompt_field="input"), stream=False)


def parse_pairs(body: bytes) -> ParsedRequest:
    """A body of /rerank or /score: each document is read together with the query. Raises Refusal."""
    fields = _decode(_pairs_body, body)
    query = fields.query or fields.queries or fields.text_1 or fields.data_1
    documents = fields.documents or fields.items or fields.text_2 or fields.data_2
    pairs = len(documents) if isinstance(documents, list) else 1
    # Several queries go with one document each, one query with all of them.
    read = _size(query) * (1 if isinstance(query, list) else pairs) + _size(documents)
    return replace(_asked(fields, SizedRequest(min(read, PAIRS_TOKENS_MAX)), 0, 0, prompt_field=""), stream=False)


def parse_pooled(body: bytes) -> ParsedRequest:
    """A body of /pooling or /classify: only how much there is to read is looked at. Raises Refusal."""
    fields = _decode(_pooled_body, body)
    given = fields.messages or fields.input or fields.data
    return replace(_asked(fields, SizedRequest(max(1, _size(given))), 0, 0, prompt_field=""), stream=False)


def parse_audio(body: bytes, content_type: bytes) -> ParsedRequest:
    """A form of /v1/audio/transcriptions or /v1/audio/translations. Raises Refusal."""
    form = read_form(body, content_type)
    fields = _Body(model=form.model, stream=form.stream, user=form.user)
    heard, written = 1 + form.file_bytes // AUDIO_BYTES_A_TOKEN, 64 + form.file_bytes // AUDIO_BYTES_A_WORD
    asked = _asked(fields, SizedRequest(heard), written, None, prompt_field="file")
    return replace(asked, usage_may_be_asked=False)


def parse_named(body: bytes) -> ParsedRequest:
    """A body of which only the model is looked at. Raises Refusal."""
    return _asked(_decode(_any_body, body), SizedRequest(0), 0, None, prompt_field="")


def _decode(decoder: msgspec.json.Decoder[F], body: bytes) -> F:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        msg = f"The body does not fit: {error}."
        raise bad_request(msg, code="invalid_body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"The body is not valid JSON: {error}."
        raise bad_request(msg, code="malformed_body") from error


def _asked(
    fields: _Body,
    prompt: Prompt,
    output_tokens: Tokens | None,
    demanded: Tokens | None,
    *,
    prompt_field: str,
    reads_cache: bool = True,
) -> ParsedRequest:
    salt = fields.cache_salt or ""
    if len(salt) > SALT_LENGTH_MAX:
        msg = f"`cache_salt` is longer than {SALT_LENGTH_MAX} characters."
        raise bad_request(msg, param="cache_salt")
    return ParsedRequest(
        model=fields.model or "",
        prompt=prompt,
        prompt_field=prompt_field,
        stream=fields.stream is True,
        output_tokens=output_tokens,
        output_demanded=demanded is not None,
        user=fields.user or "",
        cache_salt=salt,
        truncates=fields.truncate_prompt_tokens is not None,
        truncate_to=max(0, fields.truncate_prompt_tokens or 0),
        truncation_side=fields.truncation_side or "",
        reads_cache=reads_cache,
        answers=fields.n or 1,
        usage_may_be_asked=_usage_may_be_asked(fields),
    )


def _usage_may_be_asked(fields: _Body) -> bool:
    """Not where it shows in every chunk, which could not be kept from the client."""
    options = fields.stream_options
    if fields.stream is not True:
        return False
    return options is None or not (options.include_usage or options.continuous_usage_stats)


def _completion_prompt(fields: _CompletionBody) -> Prompt:
    prompt = fields.prompt
    special = fields.add_special_tokens is not False
    if fields.prompt_embeds:
        return Embeddings()
    if isinstance(prompt, str):
        return Texts([prompt], special)
    if not prompt:
        msg = "`prompt` must be a text, a list of texts, or token ids."
        raise bad_request(msg, param="prompt")
    kind = type(prompt[0])
    if kind is int:
        return Tokenised([_token_ids(prompt)])
    if any(type(part) is not kind for part in prompt):
        msg = "`prompt` must not mix texts and token ids."
        raise bad_request(msg, param="prompt")
    if kind is str:
        return Texts([part for part in prompt if isinstance(part, str)], special)
    return Tokenised([_token_ids(part) for part in prompt if isinstance(part, list)])


def _template_arguments(fields: _ChatBody) -> dict[str, Any]:
    """What the template is told beside messages and tools, as vLLM puts it together."""
    given = fields.chat_template_kwargs or {}
    named: dict[str, Any] = {"documents": fields.documents, "reasoning_effort": fields.reasoning_effort}
    if fields.reasoning_effort is not None and "enable_thinking" not in given:
        named["enable_thinking"] = fields.reasoning_effort != "none"
    return given | {name: value for name, value in named.items() if value is not None and value != "auto"}


_KEPT_ELSEWHERE = ("previous_response_id", "previous_input_messages", "prompt")
"""Fields that stand for a part of the conversation which the body does not hold in a form that we can read."""


def _with_effort(given: dict[str, Any] | None, reasoning: _Reasoning | None) -> dict[str, Any] | None:
    """What the template is told of a request that names an effort, as vLLM puts it together."""
    effort = reasoning.effort if reasoning is not None else None
    if effort is None:
        return given
    return {"enable_thinking": effort != "none", **(given or {}), "reasoning_effort": effort}


def _size(given: Any) -> Tokens:
    """Tokens, about: ids as they are, four characters of text each."""
    if isinstance(given, str):
        return len(given) // 4 + 1
    if isinstance(given, dict):
        return sum(map(_size, given.values()))
    return sum(map(_size, given)) if isinstance(given, list) else 1


def _token_ids(tokens: list[Any]) -> Sequence[int]:
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        packed = array("I")
    if not packed:
        msg = "`prompt` must be a text, a list of texts, or token ids from 0 to 4294967295."
        raise bad_request(msg, param="prompt")
    return packed


def _positive(value: int | None, name: str) -> Tokens | None:
    if value is not None and value < 1:
        msg = f"`{name}` must be at least 1, not {value}."
        raise bad_request(msg, param=name)
    return value
