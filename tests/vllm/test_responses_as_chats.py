"""The chat that we take a Responses request for is the one that vLLM renders. Asked of vLLM's own functions, without an
engine: a template shows every difference, but only where it looks."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

from pointsman_cli.vllm_cpu.home import EngineHome
from pointsman_ingress.prompt.responses_input import chat_form, continues

WEATHER = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
ASKS = {"role": "user", "content": "How is the weather?"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
SKY = {"type": "namespace", "name": "sky", "description": "of the sky", "tools": [{"type": "function", **WEATHER}]}
NOTE = {"type": "custom_tool_call", "call_id": "c1", "name": "note", "input": "für später"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
THOUGHT = {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def said(*texts: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"id": "m1", "type": "message", "role": "assistant", "status": status, "content": content}


BODIES: list[dict[str, Any]] = [
    {"input": "hello"},
    {"input": "hello", "instructions": "Be brief."},
    {"input": [ASKS, {"role": "assistant", "content": "Good."}, {"role": "user", "content": "And tomorrow?"}]},
    {"input": [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}, ASKS]},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]},
    {"input": [ASKS, said("Good.", "Really."), ASKS]},
    {"input": [ASKS, said("It is", status="incomplete")]},
    {"input": [ASKS, said("one"), said("two")]},
    {"input": [ASKS, CALL, RESULT]},
    {"input": [ASKS, CALL, {**CALL, "call_id": "c2"}, RESULT, {**RESULT, "call_id": "c2"}, said("Rain."), ASKS]},
    {"input": [ASKS, said("Let me see."), CALL, RESULT, CALL]},
    {"input": [ASKS, CALL, {"role": "assistant", "content": "Wait."}, RESULT]},
    {"input": [ASKS, THOUGHT, said("Rain."), ASKS, THOUGHT, CALL, RESULT]},
    {"input": "hello", "tools": [{"type": "function", **WEATHER, "strict": True}]},
    {"input": "hello", "tools": [{"type": "function", **WEATHER}], "tool_choice": "none"},
    {"input": "hello", "tools": [{"type": "web_search"}]},
    {"input": "hello", "tools": [{"type": "web_search"}, {"type": "function", **WEATHER}]},
    {"input": "hello", "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}, SKY]},
    {"input": [ASKS, {**CALL, "namespace": "sky"}, RESULT], "tools": [SKY, {"type": "function", **WEATHER}]},
    {"input": "hello", "tools": [{"type": "custom", "name": "note", "description": "A note."}]},
    {"input": [ASKS, NOTE, {"type": "custom_tool_call_output", "call_id": "c1", "output": "kept"}]},
]


def test_a_responses_request_becomes_the_chat_that_vllm_makes_of_it(vllm_home: EngineHome) -> None:
    program = Path(__file__).with_name("responses_as_chats.py")
    run = subprocess.run(
        [vllm_home.python, program], input=json.dumps(BODIES), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]

    for body, theirs in zip(BODIES, json.loads(run.stdout.splitlines()[-1]), strict=True):
        fields = copy.deepcopy(body)
        form = chat_form(
            instructions=fields.get("instructions", ""),
            given=fields["input"],
            tools=fields.get("tools", []),
            kept_by_engine="",
        )

        ours = {"messages": form.messages, "tools": form.tools, "continues": continues(fields["input"])}
        assert form.unsupported == ""
        assert ours == theirs, body
