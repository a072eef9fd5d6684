"""What a client asks for: the few fields of an OpenAI body that routing needs, checked.

Pure. Unknown fields are not looked at, the body itself is forwarded as it came. A body that cannot be served is
refused here, before anything is tokenised or logged.
"""

from array import array
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pointsman.primitives import Seconds, SessionId, Tenant, Tokens
from pointsman_ingress.openai_errors import Refusal, bad_request

COMPLETION_OUTPUT_TOKENS = 16
"""What /v1/completions gives when nothing is asked for, as OpenAI defines it."""

SALT_LENGTH_MAX = 256
NAME_LENGTH_MAX = 128
ANONYMOUS = Tenant("anonymous")

Headers = dict[bytes, bytes]
"""Lower-case names; of repeated headers the last counts."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


class _CompletionBody(_Body):
    prompt: str | list[int | str | list[int]] | None = None


class _ChatBody(_Body):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


F = TypeVar("F", bound=_Body)

_completion_body = msgspec.json.Decoder(_CompletionBody)
_chat_body = msgspec.json.Decoder(_ChatBody)


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A prompt that came as token ids: there is nothing left to do. Several where the client sent a batch."""

    prompts: list[list[int]]


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
    text_only: bool = True
    """Whether nothing but text and the model's own template decides the tokens."""

    @property
    def length(self) -> int:
        """Characters, about."""
        characters = sum(len(text) for message in self.messages for text in _texts(message))
        return characters + (1000 * len(self.tools) if self.tools else 0)


Prompt = Tokenised | Texts | Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as far as routing cares. `output_tokens` None: as many as fit."""

    model: str
    prompt: Prompt
    stream: bool
    output_tokens: Tokens | None
    output_demanded: bool
    """Whether the client named `output_tokens`; then prompt and output must fit the model together."""
    user: str
    cache_salt: str
    truncates: bool


@dataclass(frozen=True, slots=True)
class Objectives:
    """Engine seconds."""

    ttft: Seconds
    tpot: Seconds


def parse_completion(body: bytes) -> Asked:
    """A body of /v1/completions. Raises Refusal."""
    fields = _decode(_completion_body, body)
    prompt = _completion_prompt(fields)
    output_tokens = _positive(fields.max_tokens, "max_tokens")
    return _asked(fields, prompt, COMPLETION_OUTPUT_TOKENS if output_tokens is None else output_tokens, output_tokens)


def parse_chat(body: bytes) -> Asked:
    """A body of /v1/chat/completions. Raises Refusal."""
    fields = _decode(_chat_body, body)
    if not fields.messages:
        msg = "`messages` must hold at least one message."
        raise bad_request(msg, param="messages")
    output_tokens = _positive(fields.max_completion_tokens, "max_completion_tokens")
    older_name = _positive(fields.max_tokens, "max_tokens")
    if output_tokens is None:
        output_tokens = older_name
    prompt = Chat(
        messages=fields.messages,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message is True,
        chat_template_kwargs=fields.chat_template_kwargs,
        add_special_tokens=fields.add_special_tokens is True,
        text_only=fields.chat_template is None and all(map(_is_text, fields.messages)),
    )
    return _asked(fields, prompt, output_tokens, output_tokens)


def objectives(headers: Headers, defaults: Objectives) -> Objectives:
    """The client's objectives from `x-slo-ttft-ms` and `x-slo-tpot-ms` or their aliases. Raises Refusal."""
    ttft = _milliseconds(headers, b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
    tpot = _milliseconds(headers, b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
    if ttft is None and tpot is None:
        return defaults
    return Objectives(defaults.ttft if ttft is None else ttft, defaults.tpot if tpot is None else tpot)


def tenant_of(headers: Headers, user: str) -> Tenant:
    """Who a client without an API key says it is."""
    name = header_text(headers, b"x-llm-d-inference-fairness-id") or cleaned(user)
    return Tenant(name) if name else ANONYMOUS


def session_of(headers: Headers, user: str) -> SessionId:
    """The conversation that the client names, or the user in its place."""
    return SessionId(header_text(headers, b"x-session-id") or cleaned(user))


def header_text(headers: Headers, name: bytes) -> str:
    """A header's value, fit to be logged and sent back; empty where it is missing."""
    value = headers.get(name)
    return cleaned(value.decode("latin-1")) if value else ""


def cleaned(text: str) -> str:
    """Printable ASCII only, at most 128 characters."""
    if not text:
        return ""
    text = text[:NAME_LENGTH_MAX].strip()
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c.isascii() and c.isprintable())


def _decode(decoder: msgspec.json.Decoder[F], body: bytes) -> F:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        msg = f"The body does not fit: {error}."
        raise bad_request(msg, code="invalid_body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"The body is not valid JSON: {error}."
        raise bad_request(msg, code="malformed_body") from error


def _asked(fields: _Body, prompt: Prompt, output_tokens: Tokens | None, demanded: Tokens | None) -> Asked:
    salt = fields.cache_salt or ""
    if len(salt) > SALT_LENGTH_MAX:
        msg = f"`cache_salt` is longer than {SALT_LENGTH_MAX} characters."
        raise bad_request(msg, param="cache_salt")
    return Asked(
        model=fields.model or "",
        prompt=prompt,
        stream=fields.stream is True,
        output_tokens=output_tokens,
        output_demanded=demanded is not None,
        user=fields.user or "",
        cache_salt=salt,
        truncates=fields.truncate_prompt_tokens is not None,
    )


def _completion_prompt(fields: _CompletionBody) -> Prompt:
    prompt = fields.prompt
    special = fields.add_special_tokens is not False
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


def _token_ids(tokens: list[Any]) -> list[int]:
    try:
        fits = len(array("I", tokens)) > 0
    except (OverflowError, TypeError):
        fits = False
    if not fits:
        msg = "`prompt` must be a text, a list of texts, or token ids from 0 to 4294967295."
        raise bad_request(msg, param="prompt")
    return tokens


def _positive(value: int | None, name: str) -> Tokens | None:
    if value is not None and value < 1:
        msg = f"`{name}` must be at least 1, not {value}."
        raise bad_request(msg, param=name)
    return value


def _milliseconds(headers: Headers, *names: bytes) -> Seconds | None:
    for name in names:
        value = headers.get(name)
        if value is not None:
            return _seconds(value, name)
    return None


def _seconds(value: bytes, name: bytes) -> Seconds:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        raise _bad_objective(name.decode())
    return milliseconds / 1000


def _bad_objective(name: str) -> Refusal:
    return bad_request(f"The header {name} must be a positive number of milliseconds.", param=name)


def _is_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    if not isinstance(content, list):
        return True
    return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
