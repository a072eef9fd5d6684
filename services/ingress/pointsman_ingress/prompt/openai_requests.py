"""Parses OpenAI's request bodies into `ParsedRequest`, the fields that routing needs. Ignores unknown fields."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar, cast

import msgspec

from pointsman.primitives import Tokens
from pointsman_ingress.http.errors import ApiError, bad_request
from pointsman_ingress.http.json_form import ENTRIES_MAX, LIGHT_BYTES_MAX, TOKEN_IDS_MAX, check_form
from pointsman_ingress.http.request_headers import NAME_LENGTH_MAX
from pointsman_ingress.prompt.audio_form import read_form
from pointsman_ingress.prompt.body_fields import NULL
from pointsman_ingress.prompt.content_parts import Message, first_unsupported
from pointsman_ingress.prompt.media_tokens import (
    AUDIO_BYTES_A_TOKEN,
    data_url_tokens,
    is_data_url,
    tokens_of_kind,
    vector_tokens,
)
from pointsman_ingress.prompt.parsed_request import (
    Chat,
    Embeddings,
    ParsedRequest,
    Prompt,
    SizedRequest,
    Texts,
    TokenIds,
)
from pointsman_ingress.token_ids import token_lists

COMPLETION_OUTPUT_TOKENS = 16  # OpenAI's default
AUDIO_BYTES_A_WORD = 4000  # per output token: four a second
PAIRS_TOKENS_MAX: Tokens = 2**31  # bounds query length times documents, for the log
SALT_LENGTH_MAX = 1024
PROMPTS_MAX = 2048


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    session_id: Any = None
    prompt_cache_key: Any = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    service_tier: Any = None


class _CompletionBody(Body):
    prompt: msgspec.Raw = NULL
    prompt_embeds: str | list[str] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class _ChatBody(Body):
    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    echo: bool | None = None
    top_logprobs: int | None = 0  # vLLM's default


class _EmbeddingsBody(Body):
    input: msgspec.Raw = NULL
    messages: list[Any] | None = None


class _PooledBody(Body):
    input: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    data: msgspec.Raw = NULL


class _PairsBody(Body):
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


B = TypeVar("B", bound=Body)
T = TypeVar("T")


def lenient(kind: type[B]) -> msgspec.json.Decoder[B]:
    """Also takes `1024.0`, `"512"` and `"true"`, as engines do. They get what the client sent."""
    return msgspec.json.Decoder(kind, strict=False)


_completion_body = lenient(_CompletionBody)
_chat_body = lenient(_ChatBody)
_embeddings_body = lenient(_EmbeddingsBody)
_pooled_body = lenient(_PooledBody)
_pairs_body = lenient(_PairsBody)
_any_body = lenient(Body)
_prompt = msgspec.json.Decoder(str | list[int | str | list[int]] | None)
_any = msgspec.json.Decoder(Any)


def parse_chat(body: bytes) -> ParsedRequest:
    """Raises ApiError, as all parsers here."""
    fields = decoded(_chat_body, body)
    if not fields.messages:
        raise bad_request("`messages` must hold at least one message.", param="messages")
    newer = positive(fields.max_completion_tokens, "max_completion_tokens")
    older = positive(fields.max_tokens, "max_tokens")
    output_tokens, output_field = (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    unsupported, unsupported_message = first_unsupported(fields.messages)
    prompt = Chat(
        messages=fields.messages,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message is True,
        chat_template_kwargs=_template_arguments(fields),
        add_special_tokens=fields.add_special_tokens is True,
        unsupported=unsupported,
        unsupported_message=unsupported_message,
        template=fields.chat_template,
        body=body,
        render_path="/v1/chat/completions/render",
    )
    echoes = fields.echo is True and fields.top_logprobs is not None
    reads_cache = fields.prompt_logprobs is None and not echoes
    return parsed(fields, prompt, "messages", output_tokens, output_field=output_field, reads_cache=reads_cache)


def parse_completion(body: bytes) -> ParsedRequest:
    fields = decoded(_completion_body, body, entries_max=TOKEN_IDS_MAX)
    prompt = _completion_prompt(fields)
    output_tokens = _completion_output(fields)
    echoes = fields.echo is True and fields.logprobs is not None
    reads_cache = fields.prompt_logprobs is None and not echoes
    request = parsed(fields, prompt, "prompt", output_tokens, reads_cache=reads_cache)
    if output_tokens is not None:
        return request
    without_null = frozenset({"max_tokens"}) if b'"max_tokens"' in body else frozenset[str]()
    return replace(request, output_tokens=COMPLETION_OUTPUT_TOKENS, nulls=without_null)


def _completion_output(fields: _CompletionBody) -> Tokens | None:
    """An answer of the prompt alone (`echo`, for its log probabilities) counts as one token."""
    if fields.max_tokens == 0 and fields.echo is True:
        return 1
    return positive(fields.max_tokens, "max_tokens")


def parse_embeddings(body: bytes) -> ParsedRequest:
    fields = decoded(_embeddings_body, body, entries_max=TOKEN_IDS_MAX)
    given = _sized(fields.messages, prompts=1) if fields.messages else _raw_size(fields.input)
    if given is None:
        raise bad_request("`input` must be a text, a list of texts, or token ids.", param="input")
    return _without_output(fields, given, "input")


def parse_pooled(body: bytes) -> ParsedRequest:
    fields = decoded(_pooled_body, body, entries_max=TOKEN_IDS_MAX)
    messages = _raw_size(fields.messages, prompts=1)
    return _without_output(fields, messages or _raw_size(fields.input) or _raw_size(fields.data) or SizedRequest(1))


def parse_pairs(body: bytes) -> ParsedRequest:
    """/rerank and /score: the query is read with each document."""
    fields = decoded(_pairs_body, body)
    query = fields.query or fields.queries or fields.text_1 or fields.data_1
    documents = fields.documents or fields.items or fields.text_2 or fields.data_2
    pairs = len(documents) if isinstance(documents, list) else 1
    # Several queries pair with one document each.
    tokens = _size(query) * (1 if isinstance(query, list) else pairs) + _size(documents)
    objects = _has_objects(query) or _has_objects(documents)
    prompts = max(_prompts(query), _prompts(documents)) if objects else 0
    return _without_output(fields, SizedRequest(min(tokens, PAIRS_TOKENS_MAX), prompts))


def parse_audio(body: bytes, content_type: bytes) -> ParsedRequest:
    form = read_form(body, content_type)
    fields = Body(model=form.model, stream=form.stream, user=form.user)
    prompt = SizedRequest(1 + form.file_bytes // AUDIO_BYTES_A_TOKEN)
    output_tokens = 64 + form.file_bytes // AUDIO_BYTES_A_WORD
    request = parsed(fields, prompt, "file", output_tokens)
    return replace(request, output_demanded=False, may_add_usage=False, form_fields=form.names)


def parse_model_only(body: bytes) -> ParsedRequest:
    return replace(
        parsed(decoded(_any_body, body, entries_max=TOKEN_IDS_MAX), SizedRequest(0), "", 0), output_demanded=False
    )


def decoded(decoder: msgspec.json.Decoder[B], body: bytes, *, entries_max: int = ENTRIES_MAX) -> B:
    check_form(body, entries_max=entries_max)
    return _decoded(decoder, body)


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes, *, field: str = "") -> T:
    """`field`: of which `body` is the value."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        at = f"{problem} - at `$.{field}{place or '`'}" if field else str(error)
        raise bad_request(f"The body does not fit: {at}.", code="invalid_body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="malformed_body") from error


def parsed(
    fields: Body,
    prompt: Prompt,
    prompt_field: str,
    output_tokens: Tokens | None,
    *,
    output_field: str = "max_tokens",
    reads_cache: bool = True,
) -> ParsedRequest:
    salt, options = fields.cache_salt or "", fields.stream_options
    if len(salt) > SALT_LENGTH_MAX:
        raise bad_request(f"`cache_salt` is longer than {SALT_LENGTH_MAX} characters.", param="cache_salt")
    # `continuous_usage_stats` alone shows none in vLLM: the tenant would pay for a guess.
    shows_usage = options is not None and options.include_usage
    return ParsedRequest(
        model=fields.model or "",
        prompt=prompt,
        prompt_field=prompt_field,
        stream=fields.stream is True,
        output_tokens=output_tokens,
        output_field=output_field,
        output_demanded=output_tokens is not None,
        user=fields.user or "",
        session=session_name(fields.session_id, fields.prompt_cache_key, fields.user),
        cache_salt=salt,
        truncates=fields.truncate_prompt_tokens is not None,
        truncate_to=max(0, fields.truncate_prompt_tokens or 0),
        truncation_side=fields.truncation_side or "",
        reads_cache=reads_cache,
        answers=max(1, fields.n or 1, fields.best_of or 1),
        may_add_usage=fields.stream is True and not shows_usage,
        service_tier=fields.service_tier,
    )


def session_name(*given: Any) -> str:
    """The first that is a text; of a long one, whose end may tell conversations apart, its digest."""
    name = next((text for text in given if isinstance(text, str) and text), "")
    return name if len(name) <= NAME_LENGTH_MAX else sha256(name.encode(errors="replace")).hexdigest()


def positive(value: int | None, name: str) -> Tokens | None:
    if value is not None and value < 1:
        raise bad_request(f"`{name}` must be at least 1, not {value}.", param=name)
    return value


def with_effort(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any] | None:
    if effort is None:
        return given
    return {"enable_thinking": effort != "none", **(given or {}), "reasoning_effort": effort}


def _template_arguments(fields: _ChatBody) -> dict[str, Any]:
    given = fields.chat_template_kwargs or {}
    named: dict[str, Any] = {"documents": fields.documents, "reasoning_effort": fields.reasoning_effort}
    if fields.reasoning_effort is not None and "enable_thinking" not in given:
        named["enable_thinking"] = fields.reasoning_effort != "none"
    return given | {name: value for name, value in named.items() if value is not None and value != "auto"}


def _completion_prompt(fields: _CompletionBody) -> Prompt:
    special = fields.add_special_tokens is not False
    if fields.prompt_embeds:
        vectors = fields.prompt_embeds if isinstance(fields.prompt_embeds, list) else [fields.prompt_embeds]
        return Embeddings(len(vectors), sum(map(vector_tokens, vectors)))
    given = bytes(fields.prompt)
    if _is_long_run(given):
        return _long_prompt(given)
    prompt = _decoded(_prompt, given, field="prompt")
    if isinstance(prompt, str):
        return Texts([prompt], special)
    if not prompt:
        raise bad_request("`prompt` must be a text, a list of texts, or token ids.", param="prompt")
    kind = type(prompt[0])
    if kind is int:
        return TokenIds([_token_ids(prompt)])
    _check_prompts(len(prompt))
    if any(type(part) is not kind for part in prompt):
        raise bad_request("`prompt` must not mix texts and token ids.", param="prompt")
    if kind is str:
        return Texts([part for part in prompt if isinstance(part, str)], special)
    return TokenIds([_token_ids(part) for part in prompt if isinstance(part, list)])


def _token_ids(tokens: list[Any]) -> Sequence[int]:
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        packed = array("I")
    if not packed:
        raise _not_ids()
    return packed


def _long_prompt(given: bytes) -> TokenIds:
    _check_prompts(given.count(b"[", 1))
    try:
        prompts = token_lists(given)
    except ValueError as error:
        raise _not_ids() from error
    if not all(prompts):
        raise _not_ids()
    return TokenIds([*prompts])


def _check_prompts(prompts: int) -> None:
    if prompts > PROMPTS_MAX:
        raise bad_request(f"`prompt` must hold at most {PROMPTS_MAX} prompts.", param="prompt")


def _not_ids() -> ApiError:
    msg = "`prompt` must be a text, a list of texts, or token ids from 0 to 4294967295."
    return bad_request(msg, param="prompt")


def _is_long_run(given: bytes) -> bool:
    """Whether it can only be a long list of token ids. Other long lists have fewer entries. Raises ApiError."""
    if len(given) <= LIGHT_BYTES_MAX or given[:1] != b"[":
        return False
    if b'"' not in given:
        return True
    check_form(given)
    return False


def _without_output(fields: Body, given: SizedRequest, prompt_field: str = "") -> ParsedRequest:
    return replace(parsed(fields, given, prompt_field, 0), stream=False)


def _raw_size(given: msgspec.Raw, *, prompts: int = 0) -> SizedRequest | None:
    """None: nothing is given."""
    data = bytes(given)
    if _is_long_run(data):
        return SizedRequest(1 + data.count(b","))
    value = cast("list[Any] | dict[str, Any] | str | None", _decoded(_any, data))
    return _sized(value, prompts=prompts) if value else None


def _sized(value: Any, *, prompts: int = 0) -> SizedRequest:
    """`prompts`: how many it is; 0: each entry is one."""
    return SizedRequest(max(1, _size(value)), (prompts or _prompts(value)) if _has_objects(value) else 0)


def _prompts(given: Any) -> int:
    parts = given.get("content") if isinstance(given, dict) else given
    return max(1, len(parts)) if isinstance(parts, list) else 1


def _has_objects(given: Any) -> bool:
    return isinstance(given, dict) or (isinstance(given, list) and any(map(_has_objects, given)))


def _size(given: Any, *, in_object: bool = False) -> Tokens:
    """Estimate: token ids count one each, text one per four characters, media by their kind, which stand in objects only."""
    if isinstance(given, str):
        return data_url_tokens(given) if in_object and is_data_url(given) else len(given) // 4 + 1
    if isinstance(given, dict):
        media = tokens_of_kind(str(given.get("type")), given)
        return media or sum(_size(value, in_object=True) for value in given.values())
    return sum(_size(value, in_object=in_object) for value in given) if isinstance(given, list) else 1
