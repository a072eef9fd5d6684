"""Request bodies, checked with vLLM's rules and messages. Several choices and echo are rejected; sampling parameters
have no effect."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from pointsman.primitives import Tokens

Body = TypeVar("Body")

COMPLETION_TOKENS_DEFAULT = 16
CHAT_TOKENS_DEFAULT = 128
"""vLLM generates until the model stops, which a simulated one never does."""
SALT_LENGTH_MAX = 128
MODEL_VOCABULARY = 152_064
"""Ids below this are accepted even if the tokenizer has fewer, as in vLLM."""


class ApiError(Exception):
    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)

    @property
    def wants_stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(Generate, frozen=True, kw_only=True):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    echo: bool | None = None


class ChatBody(Generate, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class AdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_path: str = ""


class FetchBody(msgspec.Struct, frozen=True):
    request: str
    done: bool = False
    tokens: Tokens = 0


class FetchAnswer(msgspec.Struct, frozen=True):
    """`seconds`: engine seconds until all tokens will have been sent."""

    seconds: float = 0.0


class TransferParams(msgspec.Struct, frozen=True, omit_defaults=True):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | str | None = None


_one_prompt: msgspec.json.Decoder[str | list[int] | None] = msgspec.json.Decoder(str | list[int] | None)
_several_texts = msgspec.json.Decoder(list[str])
_several_token_prompts = msgspec.json.Decoder(list[list[int]])


def parse_completion(body: bytes) -> CompletionBody:
    """Raises ApiError."""
    parsed = decoded(body, CompletionBody)
    check_sampling(parsed)
    if parsed.echo:
        raise ApiError(400, "echo is not supported by the simulated engine", param="echo")
    return parsed


def parse_chat(body: bytes) -> ChatBody:
    """Raises ApiError."""
    parsed = decoded(body, ChatBody)
    check_sampling(parsed)
    if parsed.max_completion_tokens is not None:
        _check_at_least_one("max_completion_tokens", parsed.max_completion_tokens)
    return parsed


def parse_tokenize(body: bytes) -> TokenizeBody:
    """Raises ApiError."""
    parsed = decoded(body, TokenizeBody)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise ApiError(400, "give either prompt or messages", kind="Bad Request")
    return parsed


def transfer_params(given: dict[str, Any]) -> TransferParams:
    """Raises ApiError."""
    try:
        return msgspec.convert(given, TransferParams)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"kv_transfer_params: {error}", param="kv_transfer_params") from error


def prompt_of(body: CompletionBody) -> str | list[int]:
    """Raises ApiError."""
    try:
        prompt = _one_prompt.decode(body.prompt)
    except msgspec.DecodeError:
        return _only(body.prompt)
    if prompt is None:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, list) and not prompt:
        raise _empty_prompt()
    return prompt


def check_tokens(tokens: list[int], *, vocab_size: int) -> None:
    """Raises ApiError for an empty prompt or unknown ids."""
    if not tokens:
        raise _empty_prompt()
    highest = max(tokens)
    if min(tokens) < 0 or highest >= max(vocab_size, MODEL_VOCABULARY):
        raise ApiError(400, f"Token id {min(tokens) if min(tokens) < 0 else highest} is out of vocabulary")


def output_tokens(*, requested: Tokens | None, default: Tokens, prompt: Tokens, max_model_len: Tokens) -> Tokens:
    """Number of tokens to generate: at most what the prompt leaves. Raises ApiError if either alone exceeds the model."""
    wanted = requested or 0
    if wanted > max_model_len:
        message = (
            f"max_tokens={wanted} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens. "
            f"(parameter=max_tokens, value={wanted})"
        )
        raise ApiError(400, message, param="max_tokens")
    if prompt >= max_model_len:
        message = (
            f"The decoder prompt (length {prompt}) plus the number of requested output tokens (at least 1) is longer than the "
            f"maximum model length of {max_model_len}."
        )
        raise ApiError(400, message, param="input_tokens")
    return min(wanted or default, max_model_len - prompt)


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model `{name}` does not exist.", kind="NotFoundError", param="model")


def decoded(data: bytes, kind: type[Body]) -> Body:
    """Raises ApiError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, str(error), kind="Bad Request") from error


@contextmanager
def well_formed(param: str) -> Iterator[None]:
    """A part that is missing or of another type within is the client's fault. Raises ApiError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ApiError(400, f"malformed {param}: {type(error).__name__} {error}", param=param) from error


def _only(raw: msgspec.Raw) -> str | list[int]:
    prompts: list[str] | list[list[int]]
    try:
        prompts = _several_texts.decode(raw)
    except msgspec.DecodeError:
        try:
            prompts = _several_token_prompts.decode(raw)
        except msgspec.DecodeError as error:
            message = "prompt must be a string or a list of token ids"
            raise ApiError(400, message, kind="Bad Request", param="prompt") from error
    if len(prompts) != 1:
        message = f"the simulated engine takes one prompt a request, not {len(prompts)}"
        raise ApiError(400, message, param="prompt")
    return prompts[0]


def check_sampling(body: Generate) -> None:
    """Raises ApiError for invalid parameters and for several choices."""
    if (body.n or 1) != 1 or (body.best_of or 1) != 1:
        raise ApiError(400, "the simulated engine gives one choice: n and best_of must be 1", param="n")
    if body.max_tokens is not None:
        _check_at_least_one("max_tokens", body.max_tokens)
    if body.min_tokens is not None and body.min_tokens < 0:
        message = f"min_tokens must be greater than or equal to 0, got {body.min_tokens}."
        raise ApiError(400, message, param="min_tokens")
    if body.temperature is not None and body.temperature < 0:
        message = f"temperature must be non-negative, got {body.temperature}."
        raise ApiError(400, message, param="temperature")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise ApiError(400, f"top_p must be in (0, 1], got {body.top_p}.", param="top_p")
    if body.stream_options is not None and not body.stream:
        message = "Stream options can only be defined when `stream=True`."
        raise ApiError(400, message, kind="Bad Request")


def check_salt(salt: str | None) -> None:
    """Raises ApiError."""
    if salt is None:
        return
    if not salt:
        message = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise ApiError(400, message, kind="Bad Request", param="cache_salt")
    if len(salt) > SALT_LENGTH_MAX or any(mark in salt for mark in "@/\\\0"):
        message = f"Parameter 'cache_salt' must be at most {SALT_LENGTH_MAX} characters and must not contain '@', '/', '\\\\', or NUL."
        raise ApiError(400, message, kind="Bad Request", param="cache_salt")


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ApiError(400, f"{name} must be at least 1, got {value}.", param=name)


def _empty_prompt() -> ApiError:
    return ApiError(400, "The decoder prompt cannot be empty")
