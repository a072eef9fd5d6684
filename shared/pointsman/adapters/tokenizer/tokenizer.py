"""A model's tokenizer. Of its chat templates, the default and the one for tools are used, as in engines."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pointsman.adapters.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Message, UnsupportedContentError
from pointsman.adapters.tokenizer.prefix_cache import CACHED_TOKENS_MAX, PrefixCache

BUILTIN_DIRECTORY = Path(__file__).parent / "builtin"

NAMED_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

EFFORTS = ("low", "medium", "high", "xhigh", "max")


class TokenizerLoadError(Exception):
    pass


class Tokenizer:
    """Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        cached_tokens_max: int = CACHED_TOKENS_MAX,
    ) -> None:
        """Takes over `backend`. Raises TokenizerLoadError unless its post-processor adds a fixed prefix and suffix."""
        backend.no_truncation()
        backend.no_padding()
        self._before, self._after = _frame_of(backend)
        backend.post_processor = None
        self._backend = backend
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self._cache = PrefixCache(backend, cached_tokens_max=cached_tokens_max)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._longest_token = max(1, *map(len, backend.get_vocab(with_added_tokens=True)))
        self._counts_bytes = '"ByteLevel"' in backend.to_str()

    @classmethod
    def load(cls, directory: Path, *, cached_tokens_max: int = CACHED_TOKENS_MAX) -> Self:
        """Blocks, up to a second. Raises TokenizerLoadError."""
        path = directory / "tokenizer.json"
        if not os.path.isfile(path):  # noqa: PTH113 - its name may be too long
            raise TokenizerLoadError(f"there is no {path}: give the directory of the model, not its name on a hub")
        config = _json_file(directory / "tokenizer_config.json", missing={})
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the backend raises bare Exception
            raise TokenizerLoadError(f"cannot read {path}: {error}") from error
        _add_missing_tokens(backend, config.get("added_tokens_decoder", {}), path)
        special_tokens = _special_tokens(config)
        try:
            chats, tools = (
                ChatTemplate(source, special_tokens=special_tokens) if source else None
                for source in _chat_template_sources(directory, config)
            )
        except ChatTemplateError as error:
            raise TokenizerLoadError(f"{directory}: {error}") from error
        return cls(backend, chat_template=chats, tool_template=tools, cached_tokens_max=cached_tokens_max)

    @classmethod
    def builtin(cls) -> Self:
        return cls.load(BUILTIN_DIRECTORY)

    @property
    def system_first(self) -> bool:
        """Whether a system message must come first, by vLLM's check."""
        return any(template is None or template.system_first for template in (self._chat_template, self._tool_template))

    @cached_property
    def effort_without_thinking(self) -> str:
        """vLLM's `reasoning_effort` for "no thinking": "none", or "low" if the template treats that like any effort."""
        nothing = self._prompt_with_effort("none")
        same = any(self._prompt_with_effort(effort) == nothing for effort in EFFORTS)
        return "low" if nothing is None or same else "none"

    def _prompt_with_effort(self, effort: str) -> str | None:
        arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            return self.render_chat([{"role": "user", "content": "Hi"}], chat_template_kwargs=arguments)
        except ValueError:
            return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens in the text are recognised, as in the engine. Releases the GIL."""
        ids = self._cache.encode(text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def tokens_min(self, text: str) -> int:
        """Number of tokens if all were the longest; without encoding."""
        return (len(text.encode(errors="replace")) if self._counts_bytes else len(text)) // self._longest_token

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._chat_template if tools is None else self._tool_template
        if template is None:
            raise UnsupportedContentError("this model has no chat template")
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )


def _frame_of(backend: Backend) -> tuple[list[int], list[int]]:
    probe = "a b"
    bare = backend.encode(probe, add_special_tokens=False).ids
    framed = backend.encode(probe).ids
    for before in range(len(framed) - len(bare) + 1):
        if framed[before : before + len(bare)] == bare:
            return framed[:before], framed[before + len(bare) :]
    raise TokenizerLoadError("the tokenizer's post-processor changes the text's own ids")


def _add_missing_tokens(backend: Backend, listed: Mapping[str, Any], path: Path) -> None:
    present = backend.get_added_tokens_decoder().keys()
    for number, fields in sorted((int(number), fields) for number, fields in listed.items()):
        if number in present:
            continue
        known = {key: value for key, value in fields.items() if key not in ("content", "special", "__type")}
        token = AddedToken(fields["content"], special=bool(fields.get("special")), **known)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != number:
            raise TokenizerLoadError(f"{path} and tokenizer_config.json disagree about the id of {token.content!r}")


def _chat_template_sources(directory: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Default and tool template; "" if missing. A separate file overrides the config."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        tools = directory / "additional_chat_templates" / "tool_use.jinja"
        return jinja.read_text(encoding="utf-8"), tools.read_text(encoding="utf-8") if tools.is_file() else ""
    template = _json_file(directory / "chat_template.json", missing=config).get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("default", "")), str(named.get("tool_use", ""))
    return str(template), ""


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Unset tokens stay undefined, as in transformers."""
    tokens = {name: _content(config[name]) for name in NAMED_SPECIAL_TOKENS if config.get(name) is not None}
    additional = config.get("additional_special_tokens") or []
    return tokens | ({"additional_special_tokens": [_content(token) for token in additional]} if additional else {})


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _json_file(path: Path, *, missing: Mapping[str, Any]) -> Mapping[str, Any]:
    if not path.is_file():
        return missing
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerLoadError(f"{path} holds no JSON object")
    return content
