"""Renders a chat as vLLM and transformers render it, character for character.

Two steps, as in vLLM: messages in OpenAI's form become messages in the template's form (text parts joined, tool
arguments parsed), then the model's Jinja template runs in a sandbox. What cannot be rendered from text alone
(images, audio) is refused by name: the caller then asks the engine for the tokens.

The one thing that cannot be reproduced is a template that prints today's date (`strftime_now`) around midnight
or in another time zone than the engine's.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

Message = Mapping[str, Any]

TEXT_FIELD_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Content parts that are text, and where they keep it."""

CONTINUE_MARK = "POINTSMAN_CONTINUES_HERE "
"""Stands at the end of the final message while it is rendered; the trailing space shows whether the template trims."""


class ChatTemplateError(ValueError):
    """The template refused these messages, or they do not have the shape of a chat. The client's fault."""


class UnsupportedContentError(ValueError):
    """A message holds something other than text (an image, audio, ...): its tokens are the engine's to count."""


class ChatTemplate:
    """One compiled chat template. Immutable; rendering is safe from any thread."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, Any]) -> None:
        """`special_tokens`: what templates know by name (`bos_token`, `eos_token`, ...).

        Raises ChatTemplateError when the template does not compile.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._keeps_parts = _iterates_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            msg = f"the chat template does not compile: {error}"
            raise ChatTemplateError(msg) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The prompt as text. Raises ChatTemplateError and UnsupportedContentError."""
        if continue_final_message and add_generation_prompt:
            msg = "continue_final_message and add_generation_prompt exclude each other"
            raise ChatTemplateError(msg)
        conversation = [_template_message(message, keeps_parts=self._keeps_parts) for message in messages]
        continued = _mark_final_message(conversation) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(chat_template_kwargs or {}),
            "messages": conversation,
            "tools": [_template_tool(tool) for tool in _listed(tools, "tools")] if tools else None,
        }
        try:
            rendered = self._template.render(variables)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            msg = f"the chat template refused the messages: {error}"
            raise ChatTemplateError(msg) from error
        return _cut_at_mark(rendered, continued) if continue_final_message else rendered


def _template_message(message: Message, *, keeps_parts: bool) -> dict[str, Any]:
    role = _role(message)
    texts = _texts(message.get("content"))
    as_parts = keeps_parts and role != "tool"
    result: dict[str, Any] = {
        "role": role,
        "content": [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts),
    }
    if role == "assistant":
        result |= _assistant_fields(message)
    if role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        result["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    return result


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        msg = "each message must be an object with a role"
        raise ChatTemplateError(msg)
    return role


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        msg = "content must be a string or a list of parts"
        raise ChatTemplateError(msg)
    return [text for part in content if (text := _text_of_part(part)) is not None]


def _text_of_part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        msg = "each content part must be a string or an object with a type"
        raise ChatTemplateError(msg)
    if kind not in TEXT_FIELD_OF_PART:
        msg = f"content part of type {kind!r} is not text"
        raise UnsupportedContentError(msg)
    text = part.get(TEXT_FIELD_OF_PART[kind])
    if text is not None and not isinstance(text, str):
        msg = f"the text of a content part must be a string, not {type(text).__name__}"
        raise ChatTemplateError(msg)
    return text


def _assistant_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls:
        fields["tool_calls"] = [_template_tool_call(call) for call in _listed(calls, "tool_calls")]
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if reasoning is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    return fields


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        msg = f"{name} must be a list"
        raise ChatTemplateError(msg)
    return list(value)


def _template_tool_call(call: Any) -> dict[str, Any]:
    """Templates expect the arguments as an object, OpenAI sends them as a JSON string."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        msg = "each tool call must be an object with a function"
        raise ChatTemplateError(msg)
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    elif not isinstance(arguments, dict | list):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _template_tool(tool: Any) -> dict[str, Any]:
    """A tool with the fields and their order that vLLM's request model gives it, missing ones null."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        msg = "each tool must be an object with a function"
        raise ChatTemplateError(msg)
    function = {"name": None, "description": None, "parameters": None, **tool["function"]}
    return {
        "type": "function",
        "function": function,
        **{k: v for k, v in tool.items() if k not in ("type", "function")},
    }


def _mark_final_message(conversation: list[dict[str, Any]]) -> str:
    """Append the mark to the last text of the last message, and return that text."""
    content = conversation[-1]["content"] if conversation else ""
    if not content:
        msg = "continue_final_message needs a final message with text"
        raise ChatTemplateError(msg)
    if isinstance(content, str):
        conversation[-1]["content"] = content + CONTINUE_MARK
        return content
    text: str = content[-1]["text"]
    content[-1]["text"] = text + CONTINUE_MARK
    return text


def _cut_at_mark(rendered: str, continued: str) -> str:
    mark = rendered.rfind(CONTINUE_MARK.strip())
    if mark < 0 or continued.strip() not in rendered:
        msg = "continue_final_message is set, but the chat template does not show the final message as it is"
        raise ChatTemplateError(msg)
    trimmed = not rendered.startswith(CONTINUE_MARK, mark)
    return rendered[:mark].rstrip() if trimmed else rendered[:mark]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the assistant said; a prompt shows the content alone."""

    tags = {"generation"}

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100 - templates call it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the engine prints its local time too


def _iterates_over_content(template: nodes.Template) -> bool:
    """Whether the template loops over a message's content: then it wants parts, not one string."""
    messages = set(_aliases(template, "messages"))
    loops = list(template.find_all(nodes.For))
    names = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name) and _name(loop.iter) in messages}
    return any(_content_owner(loop.iter) in names for loop in loops)


def _aliases(template: nodes.Template, name: str) -> Iterator[str]:
    """`name` and all names that are assigned from it, directly or through filters and slices."""
    known = [name]
    for alias in known:
        yield alias
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and _name(assignment.node) == alias and target.name not in known:
                known.append(target.name)


def _source(node: nodes.Node | None) -> nodes.Node | None:
    """What a filtered, tested or sliced expression starts from."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name(node: nodes.Node) -> str | None:
    """The variable that an expression starts from, if it is one."""
    source = _source(node)
    return source.name if isinstance(source, nodes.Name) else None


def _content_owner(node: nodes.Node) -> str | None:
    """`m` for `m.content` and `m['content']`, else None."""
    source = _source(node)
    if isinstance(source, nodes.Getattr):
        key: Any = source.attr
    elif isinstance(source, nodes.Getitem) and isinstance(source.arg, nodes.Const):
        key = source.arg.value
    else:
        return None
    return source.node.name if key == "content" and isinstance(source.node, nodes.Name) else None
