"""What routing needs of a request, whichever API it came by: its prompt, not yet as tokens, and its bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pointsman.primitives import Tokens
from pointsman_ingress.prompt.content_parts import ChatForm, Message


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Packed as 32 bits; several prompts if the client sent a batch."""

    prompts: list[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Texts:
    prompts: list[str]
    add_special_tokens: bool = True

    @property
    def length(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False
    unsupported: str = ""  # kind of the first part that is not text
    unsupported_message: int = 0
    template: str | None = None
    body: bytes = field(default=b"", compare=False, repr=False)
    """Whole request for `render_path`; empty if engines cannot render it."""
    render_path: str = field(default="", compare=False, repr=False)
    system_first: "Chat | None" = None  # variant for templates that take system messages only first
    without_thinking: bool = False

    @property
    def length(self) -> int:
        """Of all that a template may render: also the arguments of tool calls, tools and documents."""
        return len(msgspec.json.encode((self.messages, self.tools, self.chat_template_kwargs)))

    @classmethod
    def of(cls, form: ChatForm, **fields: Any) -> "Chat":
        return cls(
            form.messages,
            form.tools,
            unsupported=form.unsupported,
            unsupported_message=form.unsupported_message,
            **fields,
        )


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Prompt vectors: their tokens are unknown; `tokens` is an estimate."""

    prompts: int = 1
    tokens: Tokens = 0


@dataclass(frozen=True, slots=True)
class SizedRequest:
    """Input that is not tokenized; `tokens` is an estimate. `prompts_with_objects`: how many prompts it is, if it holds
    objects, such as images by URL: the estimate then bounds nothing."""

    tokens: Tokens
    prompts_with_objects: int = 0


Prompt = TokenIds | Texts | Chat | Embeddings | SizedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    model: str
    prompt: Prompt
    prompt_field: str
    stream: bool
    output_tokens: Tokens | None
    output_field: str = "max_tokens"  # where `output_tokens` stands
    output_demanded: bool  # set by the client: must fit with the prompt
    user: str
    cache_salt: str
    truncates: bool
    truncate_to: Tokens = 0  # 0: the engine decides
    truncation_side: str = ""
    reads_cache: bool = True  # False with prompt logprobs, which disable cache reads
    answers: int = 1  # to each prompt, as the engine computes them
    may_add_usage: bool = False  # a stream whose client did not ask for usage
    form_fields: frozenset[str] = frozenset()  # names in a form
    service_tier: Any = None  # as sent
    session: str = ""  # name of the conversation
    nulls: frozenset[str] = frozenset()  # names of fields that say nothing, and that engines may misread
    begins_late: bool = False  # a stream that may show nothing of hidden reasoning or a tool call
