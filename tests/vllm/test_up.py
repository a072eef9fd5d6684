"""`pointsman up --engine vllm` as a person uses it: ask twice, and the second answer comes from a cache."""

import json
import subprocess
import time
from typing import Any

import msgspec
import zmq

from tests.support.up import POINTSMAN
from tests.support.vllm import BLOCK_TOKENS, RealFleet, RunningEngine

RULES = "You answer questions about France in one short sentence and you never make anything up. " * 6


def turn(messages: list[dict[str, str]], model: str) -> dict[str, Any]:
    return {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}


def test_a_chat_is_answered_by_the_model_and_its_second_turn_from_the_cache_of_the_same_engine(
    real_fleet: RealFleet, unlike_any_other: str
) -> None:
    messages = [
        {"role": "system", "content": f"{unlike_any_other} {RULES}"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    first, placed_first = real_fleet.ask("/v1/chat/completions", turn(messages, real_fleet.model))
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And of which country is it?"}]
    second, placed_second = real_fleet.ask("/v1/chat/completions", turn(messages, real_fleet.model))

    assert "Paris" in answer
    assert placed_second["x-pointsman-instance"] == placed_first["x-pointsman-instance"]
    whole_blocks = first["usage"]["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole_blocks > 0
    assert placed_second["x-pointsman-knowledge"] == "exact"


def test_the_cached_tokens_that_pointsman_names_are_those_that_the_engine_reports(
    real_fleet: RealFleet, unlike_any_other: str
) -> None:
    conversations = [[{"role": "user", "content": f"{unlike_any_other} {number}: {RULES}"}] for number in range(4)]
    named, reported = [], []
    for _ in range(3):
        for messages in conversations:
            answer, headers = real_fleet.ask("/v1/chat/completions", turn(messages, real_fleet.model))
            named.append(int(headers["x-pointsman-cached-tokens"]))
            reported.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            messages.append({"role": "user", "content": "Say more."})

    assert named == reported
    assert sum(reported) > 0


def test_the_index_holds_as_many_blocks_of_each_engine_as_the_engine_told_of(
    real_fleet: RealFleet, unlike_any_other: str
) -> None:
    for number in range(4):
        messages = [{"role": "user", "content": f"{number} {unlike_any_other} {RULES * (number + 1)}"}]
        real_fleet.ask("/v1/chat/completions", turn(messages, real_fleet.model))

    for engine in real_fleet.engines:
        told = blocks_told_of(engine)
        assert told
        assert blocks_in_the_index(real_fleet, engine, wanted=len(told)) == len(told)


def test_an_engine_that_forgets_its_cache_is_known_to_have_forgotten_it(
    real_fleet: RealFleet, unlike_any_other: str
) -> None:
    messages = [{"role": "user", "content": f"{unlike_any_other} {RULES}"}]
    _, placed = real_fleet.ask("/v1/chat/completions", turn(messages, real_fleet.model))
    engine = real_fleet.engine(placed["x-pointsman-instance"])
    engine.reset_cache()
    engine.ask("/v1/completions", {"model": real_fleet.model, "prompt": unlike_any_other, "max_tokens": 1})
    told = blocks_told_of(engine)

    assert blocks_in_the_index(real_fleet, engine, wanted=len(told)) == len(told)
    again, headers = real_fleet.ask("/v1/chat/completions", turn(messages, real_fleet.model))
    assert int(headers["x-pointsman-cached-tokens"]) == again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def blocks_told_of(engine: RunningEngine) -> set[Any]:
    """The engine's hashes of what it holds, by a reading of all its events that has nothing of Pointsman in it."""
    held: set[Any] = set()
    for _, events, *_ in everything_published(engine):
        for event in events:
            match event["type"]:
                case "BlockStored":
                    held.update(event["block_hashes"])
                case "BlockRemoved":
                    held.difference_update(event["block_hashes"])
                case _:
                    held.clear()
    return held


def everything_published(engine: RunningEngine) -> list[Any]:
    """Every batch since the engine's start, from its replay socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(engine.replay)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = []
        while int.from_bytes((frames := socket.recv_multipart())[-2], "big", signed=True) >= 0:
            batches.append(msgspec.msgpack.decode(frames[-1]))
    return batches


def blocks_in_the_index(fleet: RealFleet, engine: RunningEngine, *, wanted: int) -> int:
    """As the scheduler says, once it is what is wanted or has had time to be."""
    deadline = time.monotonic() + 10
    while True:
        command = [POINTSMAN, "fleet", "--json", "--from", str(fleet.up.data)]
        said = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
        (blocks,) = (i["cached_blocks"] for i in said["instances"] if i["instance"] == engine.name)
        if blocks == wanted or time.monotonic() > deadline:
            return int(blocks)
