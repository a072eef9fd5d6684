"""Real engines that `up` did not choose: one that runs already, and one that somebody's own command line starts."""

import shlex
from pathlib import Path

from pointsman_cli.discovery import find_fleet
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.up import RunningUp, pointsman_up
from tests.support.vllm import BLOCK_TOKENS, BOOT_SECONDS_MAX, VERDICT_SECONDS_MAX, RealFleet, answer_of

TCP_EVENTS = (
    '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:{kv_port}",'
    '"replay_endpoint":"tcp://*:{replay_port}","topic":"kv"}'
)


def test_engines_that_run_already_are_joined_by_their_urls(
    real_fleet: RealFleet, vllm_home: EngineHome, unlike_any_other: str, tmp_path: Path
) -> None:
    """The two of the session, by a second fleet: engines know nothing of who stands in front of them."""
    urls = ",".join(engine.address for engine in real_fleet.engines)
    arguments = ["--engine", urls, "--block-tokens", str(BLOCK_TOKENS), "--tokenizer", str(vllm_home.model)]

    with pointsman_up(tmp_path, *arguments) as up:
        for number in (1, 2):
            up.wait_for(f"✓ engine-{number} .*: the keys of a chat agree", VERDICT_SECONDS_MAX)
        hits = cached_tokens_of_the_second_turn(up, real_fleet.model, unlike_any_other)

    assert hits > 0


def test_any_command_line_starts_engines_and_they_may_publish_over_tcp(
    vllm_home: EngineHome, unlike_any_other: str, tmp_path: Path
) -> None:
    flags = ["--port", "{port}", "--block-size", str(BLOCK_TOKENS), "--kv-events-config", TCP_EVENTS]
    command = shlex.join(vllm_home.serve_command(flags, served_model="mine"))
    arguments = ["--instances", "1", "--block-tokens", str(BLOCK_TOKENS), "--tokenizer", str(vllm_home.model)]

    with pointsman_up(tmp_path, *arguments, "--engine-command", command) as up:
        up.wait_for("✓ engine-1 .*: the keys of a chat agree", BOOT_SECONDS_MAX)
        served = find_fleet(data=up.data).model
        hits = cached_tokens_of_the_second_turn(up, served, unlike_any_other)

    assert served == "mine"
    assert hits > 0


def cached_tokens_of_the_second_turn(up: RunningUp, model: str, opening: str) -> int:
    """As the engine reports them."""
    url = f"{up.url}/v1/chat/completions"
    body = {"model": model, "max_tokens": 8, "temperature": 0}
    asked = [{"role": "user", "content": f"{opening} Which cities lie on the river Seine, and which on the Thames?"}]
    first = answer_of(url, body | {"messages": asked})
    said = first["choices"][0]["message"]["content"]
    asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    second = answer_of(url, body | {"messages": asked})
    return int(second["usage"]["prompt_tokens_details"]["cached_tokens"])
