"""A program for the engine's own Python: the chat that vLLM makes of each Responses body in a JSON list on standard input.

Prints a list of `{"messages": ..., "tools": ..., "continues": ...}`. No model and no engine is needed for it.
"""

import json
import sys
from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
    should_continue_final_message,
)


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    request = ResponsesRequest.model_validate({"model": "m", **body})
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    return {
        "messages": messages,
        "tools": construct_tool_dicts(request.tools, request.tool_choice),
        "continues": should_continue_final_message(request.input),
    }


print(json.dumps([chat_of(body) for body in json.load(sys.stdin)], default=dict))
