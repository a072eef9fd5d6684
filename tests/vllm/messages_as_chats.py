"""A program for the engine's own Python: the chat that vLLM makes of each Messages body in a JSON list on standard input.

Prints a list of `{"messages": ..., "tools": ..., "told": ...}`, once as for templates that take system messages anywhere and
once as for others, and which of the templates given it takes for which. No model and no engine is needed for it.
"""

import json
import sys
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Serving


def chat_of(body: dict[str, Any], *, system_first: bool) -> dict[str, Any]:
    request = AnthropicMessagesRequest.model_validate({"model": "m", "max_tokens": 9, **body})
    chat = Serving.to_chat_completion_request(request, merge_inline_system=system_first)
    tools = None if chat.tools is None else [tool.model_dump(exclude_none=True) for tool in chat.tools]
    return {"messages": chat.messages, "tools": tools, "effort": chat.reasoning_effort}


asked = json.load(sys.stdin)
found = {
    "chats": [[chat_of(body, system_first=first) for first in (False, True)] for body in asked["bodies"]],
    "system_first": [Serving._detect_merge_inline_system(template) for template in asked["templates"]],
}
print(json.dumps(found, default=dict))
