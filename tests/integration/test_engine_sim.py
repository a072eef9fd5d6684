"""The simulated engine as its clients see it: over HTTP and ZMQ, with nothing known of its inside but in assertions."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from pointsman.adapters.tcp_ports import free_ports
from pointsman_engine_sim.server import EngineServer
from tests.support.engine_sim import WAIT_SECONDS, EventReader, HeldBlocks, running_engine
from tests.support.waiting import eventually

BLOCK = 16


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url, data=data, headers=headers) as answer:
        return answer.status, json.loads(await answer.read())


async def stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a streamed answer, `[DONE]` checked and left out."""
    async with http.post(url, json=body | {"stream": True}) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = (await answer.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def test_a_conversation_hits_its_own_prefix_and_the_events_tell_what_the_engine_holds(
    http: aiohttp.ClientSession,
) -> None:
    async with running_engine(num_gpu_blocks_override=40) as engine, EventReader(engine) as reader:
        chat, tokenize = f"{engine.url}/v1/chat/completions", f"{engine.url}/tokenize"
        messages = [{"role": "user", "content": "Tell the story of the river and the mountain. " * 6}]

        first = await stream(http, chat, {"messages": messages, "max_tokens": 60})
        said = "".join(chunk["choices"][0]["delta"]["content"] for chunk in first)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        _, second = await post(http, chat, {"messages": messages, "max_tokens": 40})

        _, tokenized = await post(http, tokenize, {"messages": messages})
        _, prompt = await post(http, tokenize, {"messages": messages[:1]})
        assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [chunk["choices"][0]["finish_reason"] for chunk in first[-2:]] == [None, "length"]
        assert second["usage"]["prompt_tokens"] == tokenized["count"]
        assert second["usage"]["completion_tokens"] == 40
        computed = prompt["count"] + 60 - 1
        assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": computed // BLOCK * BLOCK}

        for number in range(4):  # the cache has room for less: blocks are evicted
            await post(http, f"{engine.url}/v1/completions", {"prompt": [number] * 300, "max_tokens": 20})
        batches = await reader.replay()
        held = HeldBlocks()
        held.apply(batches)
        assert [batch.sequence for batch in batches] == list(range(len(batches)))
        assert all(batch.rank == 0 for batch in batches)
        assert set(held.tokens) == engine.model.cache.cached()
        assert all(len(tokens) == BLOCK for tokens in held.tokens.values())

        events = [event for batch in batches for event in batch.events]
        assert {event["type"] for event in events} == {"BlockStored", "BlockRemoved"}
        stored = events[0]
        assert stored["parent_block_hash"] is None
        assert stored["token_ids"] == tokenized["tokens"][: len(stored["token_ids"])]
        assert stored["medium"] == "GPU"
        assert stored["group_idx"] == 0
        assert stored["extra_keys"] == [None] * len(stored["block_hashes"])

        async with http.post(f"{engine.url}/reset_prefix_cache") as answer:
            assert answer.status == 200
        (last,) = await reader.replay(len(batches))
        assert last.events == [{"type": "AllBlocksCleared"}]


async def test_a_message_of_claude_code_finds_the_one_before_whatever_its_first_line_says(
    http: aiohttp.ClientSession,
) -> None:
    """vLLM drops `x-anthropic-billing-header`, and an ingress expects that."""
    told = {"type": "text", "text": "You are an agent. " * 20}
    turns = [{"role": "user", "content": "hello"}, {"role": "system", "content": [told]}]
    async with running_engine() as engine:
        usages = []
        for version in ("a1", "b2"):
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version};"}
            body = {"messages": turns, "system": [billing, told], "max_tokens": 2}
            usages.append((await post(http, f"{engine.url}/v1/messages", body))[1]["usage"])
        plain = {"messages": turns, "system": told["text"], "max_tokens": 2}
        _, counted = await post(http, f"{engine.url}/v1/messages/count_tokens", plain)

    first, second = usages
    assert first["input_tokens"] == counted["input_tokens"]
    assert second["cache_read_input_tokens"] > 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == counted["input_tokens"]


async def test_an_engine_told_to_forget_computes_again_and_no_event_says_that_its_cache_is_empty(
    http: aiohttp.ClientSession,
) -> None:
    body = {"prompt": list(range(400, 912)), "max_tokens": 2}
    async with running_engine() as engine, EventReader(engine) as reader:
        cached = []
        for faults in ([], [], ["forget"], []):
            for kind in faults:
                assert (await post(http, f"{engine.url}/sim/misbehave", {"kind": kind}))[0] == 200
            _, answer = await post(http, f"{engine.url}/v1/completions", body)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        events = [event for batch in await reader.replay() for event in batch.events]

    assert {event["type"] for event in events} == {"BlockStored"}
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 400


async def test_completions_take_text_and_token_ids_and_count_what_they_cost(http: aiohttp.ClientSession) -> None:
    async with running_engine(model="tiny", api_key="key") as engine:
        url, key = f"{engine.url}/v1/completions", {"authorization": "Bearer key"}
        body = {"model": "tiny", "prompt": list(range(100)), "max_tokens": 7, "cache_salt": "tenant"}

        status, whole = await post(http, url, body, **key)
        _, again = await post(http, url, body, **key)
        _, other = await post(http, url, body | {"cache_salt": "another"}, **key)
        _, text = await post(http, url, {"prompt": "Once upon a time"}, **key)
        refused, _ = await post(http, url, body)
        http.headers.update(key)
        streamed = await stream(http, url, body | {"stream_options": {"include_usage": True}})

        assert status == 200
        assert refused == 401
        assert whole["object"] == "text_completion"
        assert whole["model"] == "tiny"
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"] == {
            "prompt_tokens": 100,
            "total_tokens": 107,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert again["choices"] == whole["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert text["usage"]["completion_tokens"] == 16
        assert streamed[-1]["choices"] == []
        assert streamed[-1]["usage"] == again["usage"]
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == whole["choices"][0]["text"]


REFUSALS = [
    (b"{", 400, "Bad Request", None),
    ({"prompt": "x", "model": "another"}, 404, "NotFoundError", "model"),
    ({"prompt": "x", "max_tokens": -1}, 400, "BadRequestError", "max_tokens"),
    ({"prompt": "x", "max_tokens": 641}, 400, "BadRequestError", "max_tokens"),
    ({"prompt": [7] * 640}, 400, "BadRequestError", "input_tokens"),
    ({"prompt": []}, 400, "BadRequestError", None),
    ({"prompt": [1, 10**9]}, 400, "BadRequestError", None),
    ({"prompt": [-1]}, 400, "BadRequestError", None),
    ({"prompt": ["a", "b"]}, 400, "BadRequestError", "prompt"),
    ({"prompt": {"text": "x"}}, 400, "Bad Request", "prompt"),
    ({}, 400, "BadRequestError", "prompt"),
    ({"prompt": "x", "n": 2}, 400, "BadRequestError", "n"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "Bad Request", None),
    ({"prompt": "x", "max_tokens": 4, "min_tokens": 5}, 400, "BadRequestError", "min_tokens"),
]


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": [{"role": "user"}]}),
    ("/v1/messages", {"messages": [{"content": "x"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [7]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "system": [{}]}),
    ("/v1/responses", {"input": [7]}),
    ("/v1/responses", {"input": [{"role": "assistant", "content": [7]}]}),
    ("/v1/responses", {"input": "x", "tools": [7]}),
]


async def test_bad_requests_are_refused_in_the_openai_shape_and_leave_no_trace(http: aiohttp.ClientSession) -> None:
    async with running_engine(num_gpu_blocks_override=40) as engine:
        for body, status, kind, param in REFUSALS:
            answer = await post(http, f"{engine.url}/v1/completions", body)
            error = answer[1]["error"]
            assert (answer[0], error["type"], error["param"], error["code"]) == (status, kind, param, status), body
        status, _ = await post(http, f"{engine.url}/v1/chat/completions", {"messages": []})
        assert status == 400
        for path, part in MALFORMED:
            status, answered = await post(http, f"{engine.url}{path}", {"max_tokens": 4, **part})
            assert (status, answered.get("error") is not None) == (400, True), (path, part, answered)
        status, _ = await post(http, f"{engine.url}/v1/nothing", {})
        assert status == 404

        assert engine.model.idle
        assert engine.model.counts.prompt_tokens == 0


async def test_an_answer_has_what_the_prompt_leaves_of_the_context(http: aiohttp.ClientSession) -> None:
    async with running_engine(num_gpu_blocks_override=40) as engine:
        body = {"prompt": [7] * 630, "max_tokens": 640}
        status, answer = await post(http, f"{engine.url}/v1/completions", body)

        assert (status, answer["usage"]["completion_tokens"]) == (200, 10)
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_hangs_up_frees_the_engine(http: aiohttp.ClientSession, *, streamed: bool) -> None:
    async with running_engine(speed=1.0) as engine:
        body = {"prompt": "x", "max_tokens": 5000, "stream": streamed}
        request = asyncio.create_task(post(http, f"{engine.url}/v1/completions", body))
        await eventually(lambda: engine.model.counts.generation_tokens > 0)

        request.cancel()

        await eventually(lambda: engine.model.idle)
        assert engine.model.cache.blocks_held == 0


async def test_time_passes_as_the_engine_model_says_divided_by_the_speed(http: aiohttp.ClientSession) -> None:
    async with running_engine(speed=4.0) as engine:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await post(http, f"{engine.url}/v1/completions", {"prompt": [5] * 2000, "max_tokens": 60})
        took = loop.time() - started

        async with http.get(f"{engine.url}/metrics") as answer:
            metrics = await answer.text()
        ttft = metric(metrics, "vllm:time_to_first_token_seconds_sum")
        e2e = metric(metrics, "vllm:e2e_request_latency_seconds_sum")
        assert ttft == pytest.approx(0.225, rel=0.3)
        assert e2e == pytest.approx(ttft + 59 * 0.0314, rel=0.1)
        assert took == pytest.approx(e2e / 4, abs=1.0)
        assert metric(metrics, "vllm:prefix_cache_queries_total") == 2000
        assert metric(metrics, "vllm:num_requests_running") == 0
        assert metric(metrics, "vllm:num_requests_waiting") == 0
        assert metric(metrics, "vllm:kv_cache_usage_perc") == 0
        assert 'block_size="16"' in metrics


async def test_a_clock_that_is_set_back_does_not_stop_an_engine(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(speed=1.0) as engine, asyncio.timeout(2 * WAIT_SECONDS):
        body = {"prompt": "one", "max_tokens": 20}
        answering = asyncio.create_task(post(http, f"{engine.url}/v1/completions", body))
        await eventually(lambda: not engine.model.idle)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        status, _ = await answering

    assert status == 200


async def test_faults_lose_event_batches_from_the_wire_and_from_the_replay_buffer(http: aiohttp.ClientSession) -> None:
    faults = {"fault_drop_event_batches": 3, "fault_lose_event_batches": 4}
    async with running_engine(**faults) as engine, EventReader(engine) as reader:
        await subscribed(http, engine, reader)
        for number in range(24):
            await post(http, f"{engine.url}/v1/completions", {"prompt": [number] * 20, "max_tokens": 1})
        replayed = [batch.sequence for batch in await reader.replay()]
        kept = [sequence for sequence in range(replayed[-1] + 1) if (sequence + 1) % 4]
        sent = [sequence for sequence in kept if (sequence + 1) % 3]
        received = [batch.sequence for batch in await reader.up_to(sent[-1])]

    assert replayed == kept
    assert received == [sequence for sequence in sent if sequence >= received[0]]
    assert len(received) >= 10


async def test_the_command_serves_until_it_is_told_to_stop(http: aiohttp.ClientSession) -> None:
    (port,) = free_ports(1)
    module = "pointsman_engine_sim.main"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, "--port", str(port), "--kv-events-config", '{"enable_kv_cache_events": false}'
    )
    try:
        url = f"http://127.0.0.1:{port}"

        async def running() -> bool:
            async with http.get(f"{url}/metrics") as answer:
                return metric(await answer.text(), "vllm:num_requests_running") > 0

        models = await served_models(http, url)
        _, answer = await post(http, f"{url}/v1/completions", {"prompt": "Go", "max_tokens": 2})
        request = asyncio.create_task(post(http, f"{url}/v1/completions", {"prompt": "Go", "max_tokens": 9999}))
        await eventually(running)
    finally:
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), WAIT_SECONDS)

    assert models["data"][0]["max_model_len"] == 131_072
    assert answer["usage"]["completion_tokens"] == 2
    assert (await request)[0] == 503
    assert code == 0


async def subscribed(http: aiohttp.ClientSession, engine: EngineServer, reader: EventReader) -> None:
    """Cause events until some arrive: a subscription takes effect a moment after it was made."""
    async with asyncio.timeout(WAIT_SECONDS):
        number = 1000
        while not await reader.arrived(quiet_seconds=0.05):
            number += 1
            await post(http, f"{engine.url}/v1/completions", {"prompt": [number] * 20, "max_tokens": 1})


async def served_models(http: aiohttp.ClientSession, url: str) -> Any:
    async with asyncio.timeout(3 * WAIT_SECONDS):
        while True:
            try:
                async with http.get(f"{url}/v1/models") as answer:
                    return await answer.json()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


def metric(exposition: str, name: str) -> float:
    return float(next(line.rpartition(" ")[2] for line in exposition.splitlines() if line.startswith(f"{name}{{")))


async def test_an_engine_told_to_answer_errors_or_to_hang_stays_well_to_those_who_ask_for_its_health(
    http: aiohttp.ClientSession,
) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    async with running_engine() as engine:
        inference, told = f"{engine.url}/v1/completions", f"{engine.url}/sim/misbehave"

        await post(http, told, {"kind": "errors"})
        failed, _ = await post(http, inference, body)
        async with http.get(f"{engine.url}/health") as health, http.get(f"{engine.url}/metrics") as metrics:
            well = health.status, metrics.status

        await post(http, told, {"kind": "hang"})
        hanging = asyncio.create_task(post(http, inference, body))
        async with http.get(f"{engine.url}/health") as health:
            await health.read()
        hung = not hanging.done()
        hanging.cancel()

        await post(http, told, {"kind": ""})
        served, _ = await post(http, inference, body)
        refused, _ = await post(http, told, {"kind": "sulk"})

    assert (failed, well, hung, served, refused) == (500, (200, 200), True, 200, 400)


async def test_an_engine_told_to_be_slow_takes_so_many_times_as_long(http: aiohttp.ClientSession) -> None:
    body = {"prompt": list(range(400, 912)), "max_tokens": 40}

    async def engine_seconds() -> float:
        """How long requests have taken together, by the engine's own count."""
        async with http.get(f"{engine.url}/metrics") as page:
            lines = (await page.text()).splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:e2e_request_latency_seconds_sum")]
        return float(line.split()[-1])

    async with running_engine(speed=5.0) as engine:
        for _ in range(2):
            await post(http, f"{engine.url}/v1/completions", body)
        usual = await engine_seconds() / 2
        await post(http, f"{engine.url}/sim/misbehave", {"kind": "slow", "factor": 8})
        await post(http, f"{engine.url}/v1/completions", body)
        slow = await engine_seconds() - 2 * usual

    assert 5 * usual < slow < 12 * usual
