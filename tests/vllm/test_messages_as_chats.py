"""The chats that vLLM makes of Anthropic's Messages requests are those that were recorded (`tests/golden/test_messages.py` holds
ours against them). Asked of vLLM's own functions, without an engine: a template shows every difference, but only where it
looks."""

import json
import subprocess
from pathlib import Path

from pointsman_cli.vllm_cpu.home import EngineHome
from tests.golden.test_messages import RECORDED


def test_vllm_makes_the_chats_that_were_recorded(vllm_home: EngineHome) -> None:
    bodies = [recorded["body"] for recorded in RECORDED["conversations"]]
    templates = [recorded["source"] for recorded in RECORDED["templates"]]
    program = Path(__file__).with_name("messages_as_chats.py")
    asked = json.dumps({"bodies": bodies, "templates": templates})
    run = subprocess.run([vllm_home.python, program], input=asked, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]

    found = json.loads(run.stdout.splitlines()[-1])
    for recorded, (anywhere, first) in zip(RECORDED["conversations"], found["chats"], strict=True):
        assert recorded["anywhere"] == anywhere, recorded["body"]
        assert recorded.get("first", recorded["anywhere"]) == first, recorded["body"]
    assert found["system_first"] == [recorded["system_first"] for recorded in RECORDED["templates"]]
