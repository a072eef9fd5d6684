"""Renders a chat as vLLM and transformers do. In: messages in OpenAI's form. Out: the prompt text. Images and audio
raise UnsupportedContentError. Not reproduced: templates that print the date, around midnight or in another time zone.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

Message = Mapping[str, Any]
TextPart = dict[str, Any]

TEXT_FIELD_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

PART_FIELDS = frozenset({
    "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
    "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
})  # fmt: skip
"""Fields that vLLM removes from text parts; others reach the template."""
SYSTEM_LINE_LEFT_OUT = "x-anthropic-billing-header"
"""vLLM drops such a line of a system prompt: some clients change its number in every request."""
TOOL_FIELDS = ("name", "description", "parameters", "strict", "defer_loading")
"""Tool fields in vLLM's order; the last two appear only if set, others are dropped."""
CALL_FIELDS = ("id", "function", "type")
CALLED_FIELDS = ("arguments", "name")
"""Fields of a tool call in the order in which templates print them."""
ARGUMENT_MARKS_MAX = 200_000
"""Parsed without releasing the GIL, in some 50 ms."""
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""As in transformers; the trailing space shows whether the template trims."""


class ChatTemplateError(ValueError):
    """Invalid messages, or the template refused them."""


class TemplateRefusedError(ChatTemplateError):
    """The template refused the messages; another may take them."""


class UnsupportedContentError(ValueError):
    """Content other than text, or no template."""


class ChatTemplate:
    """A compiled chat template; immutable and thread-safe."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, Any]) -> None:
        """`special_tokens`: by name (`bos_token`...). Raises ChatTemplateError."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # copied at each rendering: a chain of maps is slow
            self._keeps_parts = _iterates_over_content(environment.parse(source))
            self._knows_developers = "'developer'" in source or '"developer"' in source
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.system_first = _takes_system_first_alone(source)
        """vLLM's check whether the template wants a system message first and nowhere else."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        conversation = [_template_message(message, keeps_parts=self._keeps_parts) for message in messages]
        if not self._knows_developers:
            conversation = _without_developers(conversation)
        continued = _mark_final_message(conversation) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            "documents": None,
            "tools": None if tools is None else [_template_tool(tool) for tool in _listed(tools, "tools")],
            **set_values(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "messages": conversation,
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
            raise TemplateRefusedError(f"the chat template refused the messages: {error}") from error
        _check_unicode(rendered)
        return _cut_at_mark(rendered, continued) if continue_final_message else rendered


def _check_unicode(rendered: str) -> None:
    """Escapes in the arguments of tool calls can hold half a character: tokenizers refuse it, so engines answer 400."""
    try:
        rendered.encode()
    except UnicodeEncodeError as error:
        raise ChatTemplateError("the rendered messages are no valid Unicode: a surrogate stands alone") from error


def set_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As in vLLM: null and "auto" mean unset."""
    return {name: value for name, value in arguments.items() if value is not None and value != "auto"}


def _template_message(message: Message, *, keeps_parts: bool) -> dict[str, Any]:
    role = _role(message)
    parts = _text_parts(message.get("content"))
    if role == "system":
        parts = [kept for part in parts if (kept := _without_left_out_line(part)) is not None]
    as_parts = keeps_parts and role != "tool"
    result: dict[str, Any] = {"role": role, "content": parts if as_parts else _joined(parts)}
    if role == "assistant":
        result |= _assistant_fields(message)
    if role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        result["tools"] = message.get("tools")
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            result[field] = message[field]
    return result


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise ChatTemplateError("each message must be an object with a role")
    return role


def _text_parts(content: Any) -> list[TextPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [_text_part(content)]
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        raise ChatTemplateError("content must be a string or a list of parts")
    return [kept for part in content if (kept := _kept_part(part)) is not None]


def _kept_part(part: Any) -> TextPart | None:
    if isinstance(part, str):
        return _text_part(part)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise ChatTemplateError("each content part must be a string or an object with a type")
    if kind not in TEXT_FIELD_OF_PART:
        raise UnsupportedContentError(f"content part of type {kind!r} is not text")
    text = part.get(TEXT_FIELD_OF_PART[kind])
    if text is None:
        return None
    if not isinstance(text, str):
        raise ChatTemplateError(f"the text of a content part must be a string, not {type(text).__name__}")
    return _text_part(text) | {name: value for name, value in part.items() if name not in PART_FIELDS}


def _text_part(text: str) -> TextPart:
    return {"type": "text", "text": text}


def _without_left_out_line(part: TextPart) -> TextPart | None:
    text: str = part["text"]
    if not text.startswith(SYSTEM_LINE_LEFT_OUT):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _joined(parts: Iterable[TextPart]) -> str:
    return "\n".join(part["text"] for part in parts)


def _assistant_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls:
        fields["tool_calls"] = [_template_tool_call(call) for call in _listed(calls, "tool_calls")]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    return fields


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ChatTemplateError(f"{name} must be a list")
    return list(value)


def _template_tool_call(call: Any) -> dict[str, Any]:
    """OpenAI sends arguments as a JSON string; templates expect an object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ChatTemplateError("each tool call must be an object with a function")
    function = {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}
    return _ordered({**call, "function": _ordered(function, CALLED_FIELDS)}, CALL_FIELDS)


def _arguments(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        if sum(map(arguments.count, "[{,")) > ARGUMENT_MARKS_MAX:
            raise ChatTemplateError("the arguments of a tool call have too many lists, objects or entries")
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _template_tool(tool: Any) -> dict[str, Any]:
    """A tool with the fields and order of vLLM's request model."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise ChatTemplateError("each tool must be an object with a function")
    later = {"defer_loading": tool["defer_loading"]} if tool.get("defer_loading") is not None else {}
    given = {name: value for name, value in tool["function"].items() if value is not None}
    function = {"name": None, "description": None, "parameters": None, **later, **given}
    return {"type": "function", "function": {name: function[name] for name in TOOL_FIELDS if name in function}, **later}


def _ordered(values: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    return {**{name: values[name] for name in first if name in values}, **values}


def _without_developers(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template without developer role: merge developer and system messages into a first system message."""
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    renamed = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]
    systems = [message for message in renamed if message["role"] == "system"]
    if len(systems) == 1 and renamed[0] is systems[0]:
        return renamed
    contents = [message["content"] for message in systems]
    texts = [text for c in contents if (text := c if isinstance(c, str) else _joined(c))]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _mark_final_message(conversation: list[dict[str, Any]]) -> str:
    content = conversation[-1]["content"] if conversation else []
    if isinstance(content, str):
        conversation[-1]["content"] = content + CONTINUE_MARK
        return content
    if not content:
        raise ChatTemplateError("continue_final_message needs a final message with text")
    text: str = content[-1]["text"]
    content[-1]["text"] = text + CONTINUE_MARK
    return text


def _cut_at_mark(rendered: str, continued: str) -> str:
    mark = rendered.rfind(CONTINUE_MARK.strip())
    if mark < 0 or continued.strip() not in rendered:
        raise TemplateRefusedError(
            "continue_final_message is set, but the chat template does not show the final message as it is"
        )
    trimmed = not rendered.startswith(CONTINUE_MARK, mark)
    return rendered[:mark].rstrip() if trimmed else rendered[:mark]


def _takes_system_first_alone(source: str) -> bool:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError):
        return True
    return False


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; only its content is rendered."""

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
    """JSON without HTML escapes, unlike Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the engine prints its local time too


def _iterates_over_content(template: nodes.Template) -> bool:
    """`message.content`, a macro parameter given that, or outside macros anything called `content`, as vLLM checks."""
    messages = set(_aliases(template, "messages"))
    loops = list(template.find_all(nodes.For))
    names = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name) and _name(loop.iter) in messages}
    if any(_content_owner(loop.iter) in names for loop in loops):
        return True
    macros = list(template.find_all(nodes.Macro))
    for macro in macros:
        given = _content_parameters(template, macro, names)
        if any(isinstance(loop.iter, nodes.Name) and loop.iter.name in given for loop in macro.find_all(nodes.For)):
            return True
    inside = {id(loop) for macro in macros for loop in macro.find_all(nodes.For)}
    return any(
        isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" for loop in loops if id(loop) not in inside
    )


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: Collection[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        by_place = zip(names, call.args, strict=False)
        by_name = ((keyword.key, keyword.value) for keyword in call.kwargs)
        given.update(name for name, value in (*by_place, *by_name) if _content_owner(value) in messages)
    return given & set(names)


def _aliases(template: nodes.Template, name: str) -> Iterator[str]:
    known = [name]
    for alias in known:
        yield alias
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and _name(assignment.node) == alias and target.name not in known:
                known.append(target.name)


def _source(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name(node: nodes.Node) -> str | None:
    source = _source(node)
    return source.name if isinstance(source, nodes.Name) else None


def _content_owner(node: nodes.Node) -> str | None:
    source = _source(node)
    if isinstance(source, nodes.Getattr):
        key: Any = source.attr
    elif isinstance(source, nodes.Getitem) and isinstance(source.arg, nodes.Const):
        key = source.arg.value
    else:
        return None
    return source.node.name if key == "content" and isinstance(source.node, nodes.Name) else None
