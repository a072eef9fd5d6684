"""The ingress over HTTP: real server, real sockets, engines and a scheduler that do as the test says."""

import asyncio
import gc
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from shutil import copytree
from typing import Any, Literal

import msgspec
import pytest
from openai import AsyncOpenAI
from typing_extensions import override
from yarl import URL

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tokenizer import Tokenizer
from pointsman.adapters.tokenizer.tokenizer import BUILTIN_DIRECTORY
from pointsman.contracts.block_keys import KEY_BYTES, KeyChain, pack_keys
from pointsman.contracts.cache import BlocksStored, Run
from pointsman.contracts.commands import SentRequest
from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.fleet import InstanceLeft, InstanceProbed
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.ports import UnconfirmedWrites
from pointsman.primitives import Epoch, InstanceId, Term, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.http_protocol import HttpLimits
from pointsman.state.fleet import Instance
from pointsman_ingress import key_probe, servers, service
from pointsman_ingress.endpoints import BY_PATH
from pointsman_ingress.engine.prefix_fetch import PrefixPrompt
from pointsman_ingress.http import call
from pointsman_ingress.openapi import openapi_document
from pointsman_ingress.placement import in_flight, scheduler_client
from pointsman_lab.gateway.connection import Target
from pointsman_lab.gateway.measurements import Setup, measure
from pointsman_lab.memory.log import MemoryLog
from tests.support.events import joined, reported
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONE,
    POOL,
    STREAM,
    TOKENS,
    TWO,
    IngressBench,
    eventually_listed,
    world_with,
)
from tests.support.log_reading import events_in
from tests.support.raw_engine import running_raw_engine, whole
from tests.support.waiting import eventually


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with world_with() as opened:
        yield opened


# An answer


async def test_the_body_reaches_the_engine_byte_for_byte_and_its_answer_the_client(world: IngressBench) -> None:
    body = b' {"model" : "m",  "prompt":[1,2,3], "max_tokens":2, "structured_outputs": {"x": [null]} }\n'
    async with world.post(COMPLETIONS, body, X_Request_Id="mine") as answer:
        content = await answer.json()

    assert answer.status == 200
    assert content["choices"] == [{"text": "answer"}]
    assert world.one.received[0].body == body
    assert answer.headers["x-request-id"] == "mine"
    own = answer.headers["x-pointsman-request-id"]
    assert own == world.one.received[0].headers["x-request-id"] != "mine"
    assert answer.headers["x-pointsman-instance"] == ONE
    assert answer.headers["x-pointsman-cached-tokens"] == "128", "what was known before, not the 64 that the engine had"
    assert answer.headers["x-pointsman-predicted-ttft-ms"] == "250.0"
    assert answer.headers["x-pointsman-knowledge"] == "exact"
    (end,) = await world.events()
    assert isinstance(end, RequestFinished)
    # The engine says 64 of 3 tokens.
    assert (end.request, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (own, 3, 2, 3)


async def test_a_body_of_megabytes_passes_whole(world: IngressBench) -> None:
    body = json.dumps({**TOKENS, "suffix": "x" * 3_000_000}).encode()
    async with world.post(COMPLETIONS, body) as answer:
        await answer.read()

    assert answer.status == 200
    assert world.one.received[0].body == body


async def test_a_stream_passes_through_and_its_first_and_last_bytes_are_in_the_log(world: IngressBench) -> None:
    async with world.post(COMPLETIONS, STREAM) as answer:
        content = await answer.text()

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [line[:20] for line in content.split("\n\n")][:3] == ['data: {"choices": [{'] * 3
    assert content.endswith("data: [DONE]\n\n")
    first, end = await world.events()
    assert isinstance(first, PrefillFinished)
    assert isinstance(end, RequestFinished)
    assert first.instance == end.instance == ONE
    assert 0 < first.ttft <= end.e2e
    assert first.ttft == end.ttft
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (200, 3, 64)


@pytest.mark.parametrize("step", [3_600.0, -3_600.0])
async def test_an_ingress_whose_clock_is_set_dates_requests_of_before_as_before(
    world: IngressBench, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Once before the first token and once behind it."""
    now, steps = ScaledClock.now, list[float]()
    monkeypatch.setattr(ScaledClock, "now", lambda clock: now(clock) + sum(steps))
    world.one.pause = asyncio.Event()
    world.one.script.append(Behaviour.PAUSES)
    began = now(ScaledClock())

    asking = asyncio.ensure_future(world.post(COMPLETIONS, STREAM))
    await eventually(lambda: world.one.received)
    steps.append(step)
    world.one.pause.set()
    async with await asking as answer:
        await answer.content.readline()
        steps.append(step)
        world.one.resumes.set()
        await answer.read()

    first, end = await world.events()
    assert isinstance(first, PrefillFinished)
    assert isinstance(end, RequestFinished)
    took = now(ScaledClock()) - began
    for event in (first, end):
        assert 0 < event.at - began < took
    for measured in (first.ttft, first.prefill, end.ttft, end.e2e):
        assert 0 < measured < took
    assert 0 <= end.tpot < took

    async with world.post(COMPLETIONS, TOKENS) as answer:
        await answer.read()
    later = (await world.events())[-1]
    assert later.request != end.request
    assert round((later.at - began) / step) == 2


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False, "of_tomorrow": 1}])
async def test_the_usage_of_a_stream_is_learned_without_the_client_seeing_it(world: IngressBench, options: Any) -> None:
    body = {**TOKENS, "stream": True, "stream_options": options, "text": "né\u0301"}
    async with world.post(COMPLETIONS, body if options is not None else {**TOKENS, "stream": True}) as answer:
        content = await answer.text()

    assert (content.count("data: "), "usage" in content) == (4, False)
    assert content.endswith("data: [DONE]\n\n")
    sent = world.one.received[0].fields
    assert sent.pop("stream_options") == {**(options or {}), "include_usage": True}
    assert sent == {name: value for name, value in body.items() if name in sent}
    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (200, 3, 64)


async def test_a_stream_whose_usage_is_not_asked_for_finishes_with_unknown_counts() -> None:
    async with world_with(stream_usage=False) as world:
        async with world.post(COMPLETIONS, {**TOKENS, "stream": True}) as answer:
            await answer.read()

        end = (await world.events())[-1]
        assert "stream_options" not in world.one.received[0].fields
    assert isinstance(end, RequestFinished)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (-1, -1, -1)


@pytest.mark.parametrize(("granted", "predicted"), [({}, 128), ({"prefilled_by": TWO}, -1)])
async def test_an_end_says_what_hit_was_predicted_where_that_can_be_compared(
    world: IngressBench, granted: dict[str, Any], predicted: int
) -> None:
    world.scheduler.grant_fields = granted
    async with world.post(COMPLETIONS, TOKENS) as answer:
        await answer.read()

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert (end.predicted_cached_tokens, end.cached_tokens) == (predicted, 64)


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": ["one", "two"]}, {"prompt": [[1, 2], [3]]}])
async def test_of_several_answers_or_prompts_nobody_can_say_whose_hit_the_engine_reports(
    world: IngressBench, several: dict[str, Any]
) -> None:
    async with world.post(COMPLETIONS, {**TOKENS, **several}) as answer:
        await answer.read()

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.predicted_cached_tokens == -1


async def test_the_time_between_the_parts_of_a_stream_is_in_the_log(world: IngressBench) -> None:
    class Pause(asyncio.Event):
        @override
        async def wait(self) -> Literal[True]:
            await asyncio.sleep(0.02)
            return True

    world.one.goes_on = Pause()
    world.one.says[COMPLETIONS] = [b'data: {"choices": [{"text": "t"}]}\n\n'] * 5 + [b"data: [DONE]\n\n"]
    async with world.post(COMPLETIONS, STREAM) as answer:
        await answer.read()

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert 0.015 < end.tbt_p90 <= end.e2e - end.ttft


async def test_the_time_between_tokens_of_several_answers_is_that_of_each(world: IngressBench) -> None:
    measured = telemetry.TIME_PER_OUTPUT_TOKEN_SECONDS.labels(POOL, "m")._sum
    before = measured.get()
    async with world.post(COMPLETIONS, {**TOKENS, "n": 2, "stream": True}) as answer:
        await answer.read()

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.completion_tokens == 3, "two of one and one of the other"
    assert measured.get() - before == pytest.approx(2 * end.tpot) != 0.0


async def test_a_grant_for_one_rank_of_an_engine_names_the_rank(world: IngressBench) -> None:
    world.scheduler.grant_fields = {"dp_rank": 1}
    async with world.post(COMPLETIONS, TOKENS) as answer:
        await answer.read()

    assert world.one.received[0].headers["x-data-parallel-rank"] == "1"


async def test_the_openai_client_works_with_it(world: IngressBench) -> None:
    async with AsyncOpenAI(base_url=world.url + "/v1", api_key="unused", max_retries=0) as client:
        models = await client.models.list()
        stream = await client.completions.create(model="m", prompt="hello", stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]

    assert [model.id for model in models.data] == ["m"]
    assert texts == ["t0", "t1", "t2"]


async def test_what_routing_needs_reaches_the_scheduler(world: IngressBench) -> None:
    headers = {
        "x-slo-ttft-ms": "750",
        "x-llm-d-slo-tpot-ms": "40",
        "x-llm-d-inference-fairness-id": "team",
        "x-session-id": "s-1",
    }
    async with world.post(COMPLETIONS, {**TOKENS, "user": "bob", "cache_salt": "salt"}, **headers) as answer:
        await answer.read()

    (asked,) = world.scheduler.asked
    chain = KeyChain(secret=b"pointsman-development", model="m", block_tokens=64)
    assert asked.keys == pack_keys(chain.extend(chain.root(cache_salt="salt"), list(range(200))))
    assert (asked.tenant, asked.session, asked.slo_ttft, asked.slo_tpot) == ("team", "s-1", 0.75, 0.04)
    assert (asked.prompt_tokens, asked.max_output_tokens, asked.exact, asked.ingress) == (200, 3, True, "ingress-1")


@pytest.mark.parametrize(("prompt", "output_max"), [([7] * 200, 800), ([[7] * 200, [7] * 150], 850)])
async def test_a_bound_beyond_what_the_prompt_leaves_of_the_context_counts_as_what_it_leaves(
    world: IngressBench, prompt: list[Any], output_max: int
) -> None:
    """Agents send one large bound with every prompt."""
    async with world.post(COMPLETIONS, {**TOKENS, "prompt": prompt, "max_tokens": 900}) as answer:
        await answer.read()

    (asked,) = world.scheduler.asked
    assert answer.status == 200
    assert world.one.received[0].fields["max_tokens"] == 900
    assert (asked.max_output_tokens, asked.context_tokens) == (output_max, 1000)


async def test_an_older_engine_refuses_prompt_and_bound_beyond_its_context_itself(world: IngressBench) -> None:
    words = b"This model's maximum context length is 1000 tokens. However, you requested 900 output tokens"
    refusal = b'{"error": {"message": "%b", "type": "BadRequestError", "param": "input_tokens", "code": 400}}' % words
    async with running_raw_engine() as engine:
        engine.otherwise = [whole(refusal, head=b"HTTP/1.1 400 Bad Request\r\n")]
        await world.grants({ONE: engine.url, TWO: engine.url})
        async with world.post(COMPLETIONS, {**TOKENS, "max_tokens": 900}) as answer:
            assert (answer.status, await answer.read()) == (400, refusal)

        assert engine.posted == [COMPLETIONS]
    assert [(type(event), getattr(event, "status", 0)) for event in await world.events()] == [(RequestFailed, 400)]


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({}, 1),
        ({"n": 128}, 128),
        ({"n": 2, "best_of": 5}, 5),
        ({"prompt": ["a", "b", "c"], "n": 4}, 12),
        ({"n": -3}, 1),
    ],
)
async def test_the_scheduler_learns_how_many_answers_a_request_gets(
    world: IngressBench, fields: dict[str, Any], answers: int
) -> None:
    async with world.post(COMPLETIONS, TOKENS | fields) as answer:
        await answer.read()

    assert [asked.answers for asked in world.scheduler.asked] == [answers]


@pytest.mark.parametrize("path", ["/%74okenize", "/v1/chat%2fcompletions", "/v1/completion%73", "/v1%2fmodels"])
async def test_a_path_spelled_otherwise_than_a_proxy_knows_it_is_none(world: IngressBench, path: str) -> None:
    url = URL(world.url + path, encoded=True)
    for method in ("GET", "POST"):
        async with world.client.request(method, url, json=TOKENS) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
    async with world.client.get(URL(world.url + "/v1/models/%6d", encoded=True)) as answer:
        assert (await answer.json())["id"] == "m"


async def test_a_chat_is_tokenised_by_the_engine_where_there_is_no_tokenizer(world: IngressBench) -> None:
    async with world.post(CHAT, HELLO) as answer:
        await answer.read()

    assert world.scheduler.asked[0].prompt_tokens == len("user:hello")
    assert world.scheduler.asked[0].exact


async def test_a_chat_whose_tokens_can_only_be_guessed_is_served_and_says_so(world: IngressBench) -> None:
    world.one.has_tokenize = world.two.has_tokenize = False
    async with world.post(CHAT, HELLO) as answer:
        await answer.read()

    assert answer.status == 200
    assert answer.headers["x-pointsman-knowledge"] == "degraded"
    assert answer.headers["x-pointsman-prefix"] == "none; guessed"
    assert not world.scheduler.asked[0].exact


async def test_of_a_chat_with_a_picture_the_beginning_is_known_and_the_client_told_so() -> None:
    system = {"role": "system", "content": "You look at pictures and say what you see. " * 10}
    picture = {"type": "image_url", "image_url": {"url": "https://x/1.png"}}
    asks = {"role": "user", "content": [{"type": "text", "text": "What is it? " * 20}, picture]}
    beginning = Tokenizer.builtin().encode(f"<|im_start|>system\n{system['content']}<|im_end|>\n<|im_start|>user")
    async with world_with(tokenizer="builtin", block_tokens=16) as world:
        async with world.post(CHAT, {"model": "m", "messages": [system, asks]}) as answer:
            await answer.read()
        async with world.post(CHAT, {"model": "m", "messages": [system, {"role": "user", "content": "x"}]}) as other:
            await other.read()

        with_picture, text = world.scheduler.asked
    assert (answer.headers["x-pointsman-prefix"], answer.headers["x-pointsman-knowledge"]) == (
        "partial; image_url",
        "degraded",
    )
    assert (with_picture.exact, text.exact) == (False, True)
    assert len(with_picture.keys) // KEY_BYTES == len(beginning) // 16
    assert text.keys.startswith(with_picture.keys)


async def test_an_engine_that_renders_is_asked_with_the_very_same_body(world: IngressBench) -> None:
    world.one.renders = world.two.renders = True
    body = json.dumps({**HELLO, "chat_template": "{{ messages }}", "reasoning_effort": "low"}).encode()
    async with world.post(CHAT, body) as answer:
        await answer.read()

    assert answer.headers["x-pointsman-prefix"] == "exact"
    assert world.scheduler.asked[0].prompt_tokens == len(body)
    assert [asked.body for asked in (*world.one.questions, *world.two.questions)] == [body]


async def test_an_engine_that_does_not_render_is_asked_to_once(world: IngressBench) -> None:
    for _ in range(4):
        async with world.post(CHAT, HELLO) as answer:
            await answer.read()

    asked = [[question.path.rpartition("/")[2] for question in one.questions] for one in (world.one, world.two)]
    assert max(paths.count("render") for paths in asked) == 1
    assert sum(paths.count("tokenize") for paths in asked) == 4


async def test_an_engine_that_wants_the_clients_key_is_shown_it_with_every_question(world: IngressBench) -> None:
    world.one.key = world.two.key = "sesame"
    statuses, ours = [], {}
    for key in ("wrong", "sesame"):
        async with world.post(CHAT, HELLO, Authorization=f"Bearer {key}", X_Request_Id=key) as answer:
            statuses.append(answer.status)
            ours[f"Bearer {key}"] = answer.headers["x-pointsman-request-id"]

    assert statuses == [401, 200]
    assert [asked.exact for asked in world.scheduler.asked] == [False, True]
    questions = [*world.one.questions, *world.two.questions]
    assert {asked.headers["authorization"]: asked.headers["x-request-id"] for asked in questions} == ours


@pytest.mark.parametrize("objection", ["", "roles must alternate."])
async def test_of_a_chat_that_the_local_template_refuses_the_engine_decides(tmp_path: Path, objection: str) -> None:
    """Engines may have another one (--chat-template)."""
    copytree(BUILTIN_DIRECTORY, tmp_path, dirs_exist_ok=True)
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    chat = {"model": "m", "messages": [{"role": "system", "content": "be nice"}, *HELLO["messages"]]}
    async with world_with(tokenizer=str(tmp_path)) as world:
        world.one.objection = world.two.objection = objection
        async with world.post(CHAT, chat) as answer:
            said = await answer.json()
        async with world.post(CHAT, HELLO) as other:
            await other.read()

        assert (answer.status, other.status) == (400 if objection else 200, 200)
        assert {asked.path for asked in (*world.one.questions, *world.two.questions)} >= {"/tokenize"}
        if objection:
            assert said["error"]["message"] == f"The prompt does not fit this model: {objection}"
        else:
            assert answer.headers["x-pointsman-prefix"] == "exact"
            assert world.scheduler.asked[0].prompt_tokens == len("system:be niceuser:hello")


async def test_a_prompt_that_the_engine_refuses_to_tokenise_is_refused_in_its_words(world: IngressBench) -> None:
    world.one.objection = world.two.objection = "only user and assistant may speak."
    async with world.post(CHAT, HELLO) as answer:
        error = (await answer.json())["error"]

    assert (answer.status, error["param"]) == (400, "messages")
    assert error["message"] == "The prompt does not fit this model: only user and assistant may speak."
    assert world.scheduler.asked == []


async def test_an_engine_without_the_adapter_is_not_asked_about_its_chats(world: IngressBench) -> None:
    told = msgspec.structs.replace(reported(TWO, 0, [], at=ScaledClock().now()), adapters=["poet"])
    await world.log.append(told)
    await eventually_listed(world, "poet")
    async with world.post(CHAT, {**HELLO, "model": "poet"}) as answer:
        await answer.read()

    assert [asked.path.rpartition("/")[2] for asked in world.two.questions] == ["render", "tokenize"]
    assert world.one.questions == []


async def test_a_tokenizer_of_its_own_spares_the_engine_the_question() -> None:
    async with world_with(tokenizer="builtin") as world:
        world.one.has_tokenize = world.two.has_tokenize = False
        long = {"model": "m", "messages": [{"role": "user", "content": "a word " * 200}]}
        for body in (HELLO, long):
            async with world.post(CHAT, body) as answer:
                await answer.read()

    assert [asked.exact for asked in world.scheduler.asked] == [True, True]
    assert world.scheduler.asked[1].prompt_tokens > 200


async def test_ids_in_the_log_are_ours_whatever_id_a_client_sends(world: IngressBench) -> None:
    ours = set()
    for sent in ("same", "same", ""):
        async with world.post(COMPLETIONS, TOKENS, **({"X_Request_Id": sent} if sent else {})) as answer:
            await answer.read()
            own = answer.headers["x-pointsman-request-id"]
            assert answer.headers["x-request-id"] == (sent or own)
            ours.add(own)

    assert {event.request for event in await world.events()} == ours
    assert len(ours) == 3
    assert [asked.client_request_id for asked in world.scheduler.asked] == ["same", "same", ""]


OUR_ID = re.compile("[0-9a-f]{24}")
JSON_BODY = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", COMPLETIONS, TOKENS, {}, 200),
        ("GET", "/v1/models", None, {}, 200),
        ("GET", "/v1/models/m", None, {}, 200),
        ("POST", "/tokenize", {"model": "m", "prompt": "a"}, {}, 200),
        ("POST", CHAT, b"{", {}, 400),
        ("POST", CHAT, HELLO, {"origin": "https://elsewhere.example", "sec-fetch-site": "cross-site"}, 403),
        ("GET", "/v1/nothing", None, {}, 404),
        ("GET", "/%74okenize", None, {}, 404),
        ("GET", "/v1/models/nobody", None, {}, 404),
        ("POST", COMPLETIONS, {**TOKENS, "model": "nobody"}, {}, 404),
        ("GET", COMPLETIONS, None, {}, 405),
        ("DELETE", "/v1/models", None, {}, 405),
        ("POST", COMPLETIONS, b" " * 10_000_000, {}, 413),
        ("POST", CHAT, HELLO, {"content-type": "text/plain"}, 400),
        ("POST", COMPLETIONS, {**TOKENS, "user": "late"}, {}, 429),
        ("POST", COMPLETIONS, {**TOKENS, "user": "many"}, {}, 503),
    ],
)
async def test_every_answer_has_the_clients_id_and_ours(
    world: IngressBench, method: str, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    if status in (429, 503):
        world.scheduler.rejection = (status, "queue_full", 1.0)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for sent in ("mine", ""):
        data = BytesIO(content) if body is not None else None
        asked = JSON_BODY | headers | ({"x-request-id": sent} if sent else {})
        async with world.client.request(
            method, URL(world.url + path, encoded=True), data=data, headers=asked
        ) as answer:
            await answer.read()
        (own,) = answer.headers.getall("x-pointsman-request-id")

        assert answer.status == status
        assert answer.headers.getall("x-request-id") == [sent or own]
        assert OUR_ID.fullmatch(own)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/v1/models/m"])
async def test_a_client_that_is_not_admitted_gets_the_ids_too(path: str) -> None:
    async with world_with(keys={"pm-alice": "alice"}) as closed:
        for method in ("GET", "POST") if path == COMPLETIONS else ("GET",):
            sent = {"x-request-id": "mine", "content-type": "application/json"}
            async with closed.client.request(method, closed.url + path, data=b"{}", headers=sent) as answer:
                assert answer.status == (405 if (method, path) == ("GET", COMPLETIONS) else 401)
                assert answer.headers["x-request-id"] == "mine"
                assert OUR_ID.fullmatch(answer.headers["x-pointsman-request-id"])


async def test_a_client_that_sends_the_id_of_a_request_under_way_has_its_own(world: IngressBench) -> None:
    world.one.script.append(Behaviour.PAUSES)
    victim = await world.post(COMPLETIONS, STREAM)
    own = victim.headers["x-pointsman-request-id"]
    async with world.post(COMPLETIONS, TOKENS, X_Request_Id=own) as other:
        await other.read()
    world.one.resumes.set()
    await victim.read()

    assert other.headers["x-pointsman-request-id"] != own
    assert [event.request for event in await world.events() if isinstance(event, RequestFinished)] == [
        other.headers["x-pointsman-request-id"],
        own,
    ]


async def test_a_request_that_the_leader_has_ended_goes_on_under_a_new_id(world: IngressBench) -> None:
    world.scheduler.ends_first = 2  # once for each time that this ingress stood still
    async with world.post(COMPLETIONS, TOKENS, X_Request_Id="mine") as answer:
        await answer.read()

    assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
    (end,) = await world.events()
    asked = world.scheduler.asked
    ids = [command.request for command in asked]
    assert end.request == answer.headers["x-pointsman-request-id"] == ids[-1]
    assert len(set(ids)) == 3
    assert [command.instead_of for command in asked] == ["", *ids[:-1]]


async def test_a_leader_that_ends_every_request_is_asked_a_bounded_number_of_times(world: IngressBench) -> None:
    world.scheduler.ends_first = 1000
    async with world.post(COMPLETIONS, TOKENS) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "already_ended")

    assert 3 <= len(world.scheduler.asked) <= 20


async def test_where_no_engine_fetches_prefixes_a_waiting_request_does_not_hold_its_tokens(world: IngressBench) -> None:
    def held() -> int:
        return sum(isinstance(thing, PrefixPrompt) for thing in gc.get_objects())

    before = held()
    world.one.pause = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_answered(world))
        await eventually(lambda: len(world.one.received) == 1)
        waiting = held()
        world.one.pause.set()

    assert waiting == before


async def _answered(world: IngressBench) -> None:
    async with world.post(COMPLETIONS, TOKENS) as answer:
        await answer.read()


# Refusals


@pytest.mark.parametrize("sent", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
async def test_what_a_web_page_may_post_without_asking_is_refused_unread(world: IngressBench, sent: str) -> None:
    async with world.post(CHAT, HELLO, Content_Type=sent) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "unsupported_media_type")
    assert world.scheduler.asked == []


@pytest.mark.parametrize("sent", ["application/json", "application/json; charset=utf-8", "Application/JSON ;x=y"])
async def test_json_may_have_parameters(world: IngressBench, sent: str) -> None:
    async with world.post(CHAT, HELLO, Content_Type=sent) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b'{"model": "m", "messages": [', 400),
        (CHAT, b"", 400),
        (COMPLETIONS, {**TOKENS, "max_tokens": -5}, 400),
        (COMPLETIONS, {**TOKENS, "prompt": list(range(1000))}, 400),
        (COMPLETIONS, {**TOKENS, "max_tokens": 1001}, 400),
        (CHAT, {**HELLO, "max_tokens": 1001}, 400),
        (COMPLETIONS, {**TOKENS, "model": "other"}, 404),
        (COMPLETIONS, b" " * 10_000_000, 413),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_and_leaves_no_trace(
    world: IngressBench, path: str, body: Any, status: int
) -> None:
    async with world.post(path, body) as answer:
        error = (await answer.json())["error"]

    assert answer.status == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.headers["x-request-id"]
    assert world.scheduler.asked == []
    assert await world.events() == []


async def test_a_large_body_without_an_announced_length_is_refused_too(world: IngressBench) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 1_000_000

    async with world.client.post(
        world.url + CHAT, data=chunks(), headers={"content-type": "application/json"}
    ) as answer:
        assert answer.status == 413


async def test_a_rejection_tells_when_and_why_and_leaves_the_end_to_the_leader(world: IngressBench) -> None:
    world.scheduler.rejection = (429, "ttft_slo", 2.5)
    async with world.post(COMPLETIONS, TOKENS) as answer:
        error = (await answer.json())["error"]

    assert answer.status == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-pointsman-reject-reason"] == "ttft_slo"
    assert error["type"] == "rate_limit_error"
    assert await world.events() == []


async def test_keys_where_configured_are_asked_for_and_name_the_tenant() -> None:
    async with world_with(keys={"sk-1": "alice"}) as world:
        statuses = []
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer sk-1"}):
            async with world.post(COMPLETIONS, TOKENS, **headers) as answer:
                statuses.append(answer.status)
                await answer.read()
        async with world.client.get(world.url + "/v1/models") as answer:
            statuses.append(answer.status)

    assert statuses == [401, 401, 200, 401]
    assert [asked.tenant for asked in world.scheduler.asked] == ["alice"]
    assert "authorization" not in world.one.received[0].headers


async def test_paths_and_methods_that_are_not_there_get_openai_errors(world: IngressBench) -> None:
    async with world.client.get(world.url + "/v1/nothing") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
    async with world.client.get(world.url + CHAT) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (405, "method_not_allowed")


OPERATIONS = (
    ("/health", '"ok"'),
    ("/livez", "ok"),
    ("/readyz", '"ready": true'),
    ("/readyz?verbose", "readyz check passed"),
    ("/readyz?verbose&exclude=nats", "readyz check passed"),
    ("/readyz?from=balancer", '"ready": true'),
    ("/livez?verbose", "ok"),
    ("/metrics?name[]=up", "pointsman_"),
    ("/metrics", "pointsman_time_to_first_token_seconds"),
    ("/openapi.json", CHAT),
)


async def test_probes_metrics_and_the_description_are_on_the_admin_port_and_the_api_has_an_empty_health(
    world: IngressBench,
) -> None:
    for path, expected in OPERATIONS:
        async with world.client.get(world.admin_url + path) as answer:
            assert answer.status == 200
            assert expected in await answer.text()
        async with world.client.get(world.url + path) as answer:
            if path == "/health":
                assert (answer.status, await answer.read()) == (200, b"")
            else:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
    for path in ("/docs", "/redoc", CHAT, "/v1/models"):
        async with world.client.get(world.admin_url + path) as answer:
            assert answer.status == 404


def test_every_endpoint_is_described() -> None:
    described = json.loads(openapi_document())

    assert set(described["paths"]) == {*BY_PATH, "/health", "/v1/models", "/v1/models/{name}", "/kv/overlap"}


async def test_who_asks_for_more_than_any_model_gives_is_served_where_nobody_knows_what_it_gives() -> None:
    async with world_with(max_model_len=0) as world, world.post(CHAT, {**HELLO, "max_tokens": 2**62}) as answer:
        assert answer.status == 200


# Engines that fail


@pytest.mark.parametrize("failure", [Behaviour.ERRS, Behaviour.RESETS, Behaviour.RESETS_AFTER_HEAD])
async def test_an_engine_that_fails_before_its_first_byte_costs_the_client_nothing(
    world: IngressBench, failure: Behaviour
) -> None:
    world.one.script.append(failure)
    async with world.post(COMPLETIONS, STREAM) as answer:
        content = await answer.text()

    assert answer.status == 200
    assert content.endswith("data: [DONE]\n\n")
    assert answer.headers["x-pointsman-instance"] == TWO
    assert [(asked.attempt, asked.excluded) for asked in world.scheduler.asked] == [(1, []), (2, [ONE])]
    assert [type(event) for event in await world.events()] == [RequestAttemptFailed, PrefillFinished, RequestFinished]


async def test_an_engine_that_is_not_there_costs_the_client_nothing(world: IngressBench) -> None:
    await world.grants({**world.scheduler.engines, ONE: "http://127.0.0.1:9"})
    async with world.post(COMPLETIONS, TOKENS) as answer:
        await answer.read()

    assert answer.status == 200
    assert answer.headers["x-pointsman-instance"] == TWO


async def test_a_whole_answer_that_breaks_off_is_asked_for_again(world: IngressBench) -> None:
    world.one.script.append(Behaviour.BREAKS_OFF)
    async with world.post(COMPLETIONS, TOKENS) as answer:
        assert (await answer.json())["choices"] == [{"text": "answer"}]

    assert answer.headers["x-pointsman-instance"] == TWO


async def test_when_engine_after_engine_fails_the_client_gets_502_and_the_log_one_end() -> None:
    async with world_with(retries_max=1) as world:
        world.one.script.append(Behaviour.ERRS)
        world.two.script.append(Behaviour.RESETS)
        async with world.post(COMPLETIONS, TOKENS) as answer:
            error = (await answer.json())["error"]

        assert answer.status == 502
        assert error["code"] == "engine_failed"
        *failures, end = await world.events()
        told = [(e.instance, e.attempt, e.failure) for e in failures if isinstance(e, RequestAttemptFailed)]
        assert told == [(ONE, 1, "http_5xx"), (TWO, 2, "stream_reset")]
        assert isinstance(end, RequestFailed)
        assert end.status == 502


async def test_a_client_is_not_told_where_the_engine_is_that_cannot_be_reached() -> None:
    async with world_with(retries_max=0, hold_seconds=0.1) as world:
        await world.grants({ONE: "http://127.0.0.1:9"})
        async with world.post(COMPLETIONS, TOKENS) as answer:
            error = (await answer.json())["error"]

    assert (answer.status, error["code"]) == (502, "engine_failed")
    assert error["message"] == "No engine that was tried has answered: it cannot be reached. Ask again."


async def test_a_stream_that_breaks_off_ends_with_an_error_event(world: IngressBench) -> None:
    world.one.script.append(Behaviour.BREAKS_OFF)
    async with world.post(COMPLETIONS, STREAM) as answer:
        events = [line for line in (await answer.text()).split("\n\n") if line]

    assert answer.status == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert len(world.scheduler.asked) == 1
    first, failure, end = await world.events()
    assert isinstance(first, PrefillFinished)
    assert isinstance(failure, RequestAttemptFailed)
    assert (failure.instance, failure.failure) == (ONE, "stream_reset")
    assert isinstance(end, RequestFailed)
    assert end.output_tokens == 1


async def test_what_the_engine_refuses_the_client_gets_to_see(world: IngressBench) -> None:
    world.one.script.append(Behaviour.REFUSES)
    async with world.post(COMPLETIONS, TOKENS) as answer:
        error = (await answer.json())["error"]

    assert (answer.status, error["message"]) == (400, "the engine says no")
    assert len(world.scheduler.asked) == 1
    (end,) = await world.events()
    assert isinstance(end, RequestFailed)
    assert (end.status, end.instance) == (400, ONE)


@pytest.mark.parametrize("refusal", [Behaviour.KNOWS_NO_KEY, Behaviour.KNOWS_NO_MODEL])
async def test_an_engine_that_is_fit_for_nobody_is_left_for_another(world: IngressBench, refusal: Behaviour) -> None:
    world.one.script.append(refusal)
    async with world.post(COMPLETIONS, TOKENS) as answer:
        await answer.read()

    assert (answer.status, answer.headers["x-pointsman-instance"]) == (200, TWO)
    assert [list(command.excluded) for command in world.scheduler.asked] == [[], [ONE]]


async def test_where_all_refuse_alike_the_client_gets_to_see_it(world: IngressBench) -> None:
    world.one.script.append(Behaviour.KNOWS_NO_MODEL)
    world.two.script.append(Behaviour.KNOWS_NO_MODEL)
    async with world.post(COMPLETIONS, TOKENS) as answer:
        error = (await answer.json())["error"]

    assert (answer.status, error["type"]) == (404, "NotFoundError")


async def test_the_clients_own_key_is_the_clients_business(world: IngressBench) -> None:
    world.one.script.append(Behaviour.KNOWS_NO_KEY)
    async with world.post(COMPLETIONS, TOKENS, Authorization="Bearer mine") as answer:
        await answer.read()

    assert answer.status == 401
    assert world.two.received == []


async def test_a_stream_ends_with_its_last_event_also_where_the_engine_keeps_the_connection(
    world: IngressBench,
) -> None:
    world.one.script.append(Behaviour.LINGERS)
    async with asyncio.timeout(10.0), world.post(COMPLETIONS, STREAM) as answer:
        body = await answer.text()

    assert body.endswith("data: [DONE]\n\n")
    assert [type(event) for event in await world.events()] == [PrefillFinished, RequestFinished]
    await eventually(lambda: world.one.given_up == 1)


# Clients that go, and requests that take too long


@pytest.mark.parametrize("behaviour", [Behaviour.HANGS, Behaviour.HANGS_AFTER_FIRST])
async def test_a_client_that_hangs_up_stops_the_engine(world: IngressBench, behaviour: Behaviour) -> None:
    world.one.script.append(behaviour)
    asking = asyncio.create_task(_drain(world, STREAM))
    await eventually(lambda: world.one.received)
    if behaviour is Behaviour.HANGS_AFTER_FIRST:
        await _events_after(world, lambda event: isinstance(event, PrefillFinished))
    asking.cancel()

    await eventually(lambda: world.one.given_up == 1)
    (end,) = await _events_after(world, lambda event: isinstance(event, RequestCancelled))
    assert end.instance == ONE
    assert end.output_tokens == (-1 if behaviour is Behaviour.HANGS else 1)
    assert world.scheduler.cancelled == []


async def test_a_client_that_hangs_up_with_a_further_request_unanswered_stops_the_engine(world: IngressBench) -> None:
    world.one.script.append(Behaviour.HANGS)
    body = json.dumps(TOKENS).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port)
    writer.write(head.encode() + b"\r\n" + body)
    await eventually(lambda: world.one.received)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()

    await eventually(lambda: world.one.given_up == 1)
    (end,) = await _events_after(world, lambda event: isinstance(event, RequestCancelled))
    assert end.instance == ONE


@pytest.mark.parametrize(("counted", "expected"), [(None, 40), (70, 70), (9, 9), (5_000, 100)])
async def test_the_log_has_what_a_client_got_before_it_hung_up(
    world: IngressBench, counted: int | None, expected: int
) -> None:
    """An engine that puts several tokens into an event, or none, may tell their number with each."""
    usage = "" if counted is None else f',"usage":{{"prompt_tokens":9,"completion_tokens":{counted}}}'
    world.one.first_piece = b'data: {"choices":[{"text":"t"}]}\n\n' * 39
    world.one.first_piece += b'data: {"choices":[{"text":"t"}]%b}\n\n' % usage.encode()
    world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
    async with world.post(COMPLETIONS, {**STREAM, "max_tokens": 100}) as answer:
        await answer.content.readany()

    (end,) = await _events_after(world, lambda event: isinstance(event, RequestCancelled))
    assert end.output_tokens == expected


async def test_a_client_that_hangs_up_while_it_waits_is_withdrawn(world: IngressBench) -> None:
    world.scheduler.holds_back = True
    asking = asyncio.create_task(_drain(world, TOKENS))
    await eventually(lambda: world.scheduler.asked)
    asking.cancel()

    await eventually(lambda: world.scheduler.cancelled)
    assert world.scheduler.cancelled[0].request == world.scheduler.asked[0].request
    await asyncio.sleep(0.05)
    assert await world.events() == []


async def test_first_tokens_are_told_to_the_leader_while_the_log_confirms_none(
    world: IngressBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "HEARTBEAT_WALL_SECONDS", 0.1)
    followed = world.scheduler.followed

    async def told_after(heartbeats: int) -> list[SentRequest]:
        count = len(followed) + heartbeats
        await eventually(lambda: len(followed) >= count)
        return [sent for command in followed for sent in command.answered]

    world.one.script += [Behaviour.HANGS_AFTER_FIRST] * 2
    async with world.post(COMPLETIONS, STREAM) as first:
        await first.content.readany()
        assert await told_after(5) == []
        monkeypatch.setattr(MemoryLog, "unconfirmed", property(lambda _log: UnconfirmedWrites(1, WallSeconds(0.15))))
        async with world.post(COMPLETIONS, STREAM) as second:
            await second.content.readany()
            sent = SentRequest(request=world.scheduler.asked[1].request, attempt=1, instance=ONE)
            assert set(await told_after(2)) == {sent}
        monkeypatch.setattr(MemoryLog, "unconfirmed", property(lambda _log: UnconfirmedWrites()))
        await told_after(2)
        assert not followed[-1].answered


async def test_a_withdrawal_that_was_lost_is_repeated_and_ends_a_request_that_was_granted_meanwhile(
    world: IngressBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_client, "CANCEL_WALL_SECONDS", 0.1)
    world.scheduler.holds_back, world.scheduler.silent_cancels = True, 1
    asking = asyncio.create_task(_drain(world, TOKENS))
    await eventually(lambda: world.scheduler.asked)
    asking.cancel()
    await eventually(lambda: world.scheduler.cancelled)
    world.scheduler.granted.add(world.scheduler.asked[0].request)

    (end,) = await _events_after(world, lambda event: isinstance(event, RequestCancelled))
    assert [command.request for command in world.scheduler.cancelled] == [end.request] * 2


async def test_a_client_that_does_not_read_is_cut_off_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LAST_WORDS_WALL_SECONDS", 0.2)
    async with world_with(request_timeout_seconds=2.0) as world:  # by then the client's buffers are full
        world.one.first_piece = b'data: {"choices":[{"text":"t"}]}\n\n' * 1_000_000
        world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        host, _, port = world.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        body = json.dumps(STREAM)
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode())
        writer.write(f"content-length: {len(body)}\r\n\r\n{body}".encode())

        (end,) = await _events_after(world, lambda event: isinstance(event, RequestFailed))
        await asyncio.sleep(1.0)
        read = 0
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                while part := await reader.read(1 << 20):
                    read += len(part)
        writer.close()

    assert isinstance(end, RequestFailed)
    assert end.status == 408
    assert read < len(world.one.first_piece)


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "GZIP"])
async def test_a_compressed_body_is_refused_with_what_to_do(world: IngressBench, encoding: str) -> None:
    async with world.post(COMPLETIONS, b"\x1f\x8b", content_encoding=encoding) as answer:
        error = (await answer.json())["error"]

    assert (answer.status, error["code"]) == (415, "unsupported_media_type")
    assert "without content-encoding" in error["message"]


async def test_a_byte_order_mark_is_left_out(world: IngressBench) -> None:
    body = json.dumps(TOKENS).encode()
    async with world.post(COMPLETIONS, b"\xef\xbb\xbf" + body, content_encoding="identity") as answer:
        assert answer.status == 200

    assert world.one.received[0].body == body


@pytest.mark.parametrize(
    ("each_seconds_max", "parts", "part_bytes", "pause_seconds", "status"),
    [(3.0, 17, 4_000, 0.2, 200), (0.5, 8, 1, 0.15, 408), (0.5, 8, 4_000, 1.0, 408)],
    ids=["slow and steady", "a drip", "a pause"],
)
async def test_a_body_may_take_as_long_as_it_goes_on_at_the_least_rate(
    monkeypatch: pytest.MonkeyPatch,
    each_seconds_max: float,
    parts: int,
    part_bytes: int,
    pause_seconds: float,
    status: int,
) -> None:
    monkeypatch.setattr(call, "BODY_WALL_SECONDS", each_seconds_max)
    monkeypatch.setattr(call, "BODY_BYTES_A_SECOND", 8_000)

    async def body() -> AsyncIterator[bytes]:
        yield json.dumps(TOKENS).encode()[:-1]
        for _ in range(parts):
            await asyncio.sleep(pause_seconds)
            yield b" " * part_bytes
        yield b"}"

    async with world_with() as world:
        headers = {"content-type": "application/json"}
        async with world.client.post(world.url + COMPLETIONS, data=body(), headers=headers) as answer:
            content = await answer.text()

    assert answer.status == status
    assert status == 200 or "request_timeout" in content


@pytest.mark.parametrize("where", ["waiting", "in the engine", "streaming"])
async def test_a_request_that_takes_too_long_gets_408_and_one_end(where: str) -> None:
    async with world_with(request_timeout_seconds=1.0) as world:
        world.scheduler.holds_back = where == "waiting"
        world.one.script.append(Behaviour.HANGS if where == "in the engine" else Behaviour.HANGS_AFTER_FIRST)
        async with world.post(COMPLETIONS, STREAM) as answer:
            content = await answer.text()

        assert answer.status == (200 if where == "streaming" else 408)
        assert "request_timeout" in content
        ends = [event for event in await world.events() if not isinstance(event, PrefillFinished)]
        if where == "waiting":
            assert ends == []
            assert world.scheduler.cancelled[0].reason == "timeout"
        else:
            assert [(type(end), getattr(end, "status", 0)) for end in ends] == [(RequestFailed, 408)]


# Schedulers that are silent


async def test_a_waiting_request_says_again_and_again_that_it_is_there(
    world: IngressBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_client, "REPEAT_WALL_SECONDS", 0.05)
    world.scheduler.holds_back = True
    asking = asyncio.create_task(_drain(world, TOKENS))
    await eventually(lambda: len(world.scheduler.asked) >= 3)
    world.scheduler.holds_back = False

    assert await asking == 200
    assert len({(asked.request, asked.attempt) for asked in world.scheduler.asked}) == 1
    assert len(await world.events()) == 1


@pytest.mark.parametrize("what_is_gone", ["scheduler", "nats"])
async def test_without_a_scheduler_requests_go_to_the_least_loaded_engine(what_is_gone: str) -> None:
    async with world_with(scheduler_timeout_seconds=0.1) as world:
        if what_is_gone == "nats":
            world.broker.disconnect()
        else:
            await world.scheduler.__aexit__(None, None, None)
        world.one.script.append(Behaviour.HANGS)
        hanging = asyncio.create_task(_drain(world, TOKENS))
        await eventually(lambda: world.one.received)
        async with world.post(COMPLETIONS, TOKENS) as answer:
            await answer.read()
        ready = world.board.whole
        world.broker.reconnect()
        (end,) = await _events_after(world, lambda event: isinstance(event, RequestFinished))
        hanging.cancel()

    assert answer.status == 200
    assert answer.headers["x-pointsman-instance"] == end.instance == TWO
    assert answer.headers["x-pointsman-knowledge"] == "blind"
    assert not ready


async def test_who_asks_for_an_adapter_is_placed_where_it_is_also_without_a_scheduler() -> None:
    async with world_with(scheduler_timeout_seconds=0.1) as world:
        told = msgspec.structs.replace(reported(TWO, 0, [], at=ScaledClock().now()), adapters=["poet"])
        await world.log.append(told)
        await eventually_listed(world, "poet")
        async with world.post(COMPLETIONS, {**TOKENS, "model": "poet"}) as placed:
            await placed.read()
        await world.scheduler.__aexit__(None, None, None)
        async with world.post(COMPLETIONS, {**TOKENS, "model": "poet"}) as blind:
            await blind.read()
        (granted,) = [event for event in await world.events() if isinstance(event, RequestGranted)]

    assert (granted.tenant, granted.adapter) == ("anonymous", "poet")  # nothing else in the log says whose it was
    assert [(asked.adapter, asked.excluded) for asked in world.scheduler.asked] == [("poet", [])]
    assert (blind.headers["x-pointsman-instance"], blind.headers["x-pointsman-knowledge"]) == (TWO, "blind")


async def test_once_a_scheduler_answers_again_it_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_client, "PROBE_WALL_SECONDS", 0.01)
    async with world_with(scheduler_timeout_seconds=0.5) as world:
        world.broker.disconnect()
        async with world.post(COMPLETIONS, TOKENS) as blind:
            await blind.read()
        world.broker.reconnect()
        await eventually(lambda: world.board.whole)
        async with world.post(COMPLETIONS, TOKENS) as placed:
            await placed.read()
        whole = world.board.whole

    assert [answer.headers["x-pointsman-knowledge"] for answer in (blind, placed)] == ["blind", "exact"]
    assert whole


# The start-up probe


@pytest.mark.parametrize("secret", ["pointsman-development", "another"])
async def test_the_probe_finds_out_whether_keys_agree(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if secret == "another":
        monkeypatch.setattr(key_probe, "EVENTS_WALL_SECONDS_MAX", 0.2)
    async with world_with(probe=True) as world:
        chain = KeyChain(secret=secret.encode(), model="m", block_tokens=64)
        publishing = asyncio.create_task(_publish_blocks(world, chain))
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        event = await _first_probed(world)
        publishing.cancel()

    assert event.parity == (secret == "pointsman-development")
    assert event.parity or "those of token ids: check" in event.detail


async def test_an_instance_whose_keys_stand_for_other_blocks_than_a_leader_says_differs_without_a_trial() -> None:
    async with world_with(probe=True, block_tokens=32) as world:
        leader = LeaderElected(at=0.0, term=Term(1), scheduler="s", as_of=0, pool={"block_tokens": 128})
        await world.log.append(leader)
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        event = await _first_probed(world)

    assert not event.parity
    assert "stand for 32 tokens, those of the pool for 128" in event.detail


async def test_keys_that_differed_are_probed_again_and_found_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_probe, "EVENTS_WALL_SECONDS_MAX", 0.1)
    monkeypatch.setattr(key_probe, "REPEAT_WALL_SECONDS", 0.1)
    async with world_with(probe=True) as world:
        publishing = asyncio.create_task(_publish_blocks(world, _chain("another")))
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        await eventually(lambda: _verdicts(world))
        publishing.cancel()
        publishing = asyncio.create_task(_publish_blocks(world, _chain("pointsman-development")))
        await eventually(lambda: _agrees(world))
        publishing.cancel()

        assert [event.parity for event in await _verdicts(world)] == [False, True]


@pytest.mark.parametrize("fails", ["the check", "the write"])
async def test_a_probe_that_failed_or_whose_verdict_was_lost_is_made_again(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_probe, "REPEAT_WALL_SECONDS", 0.1)
    prober, times = key_probe.KeyProber, count()
    check, announce = prober._check, prober._announce

    async def checked(self: key_probe.KeyProber, instance: Instance) -> tuple[bool, str]:
        if fails == "the check" and instance.id == ONE and not next(times):
            raise RuntimeError("can't start new thread")
        return await check(self, instance)

    def announced(self: key_probe.KeyProber, instance: Instance, *, parity: bool, detail: str) -> None:
        if fails == "the check" or instance.id != ONE or next(times):
            announce(self, instance, parity=parity, detail=detail)

    monkeypatch.setattr(prober, "_check", checked)
    monkeypatch.setattr(prober, "_announce", announced)
    async with world_with(probe=True) as world:
        publishing = asyncio.create_task(_publish_blocks(world, _chain("pointsman-development")))
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        await eventually(lambda: _agrees(world))
        publishing.cancel()


async def test_a_large_fleet_that_joins_at_once_is_not_probed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 probes together held up the loop for 14 s."""
    under_way, most, checked, at_most = 0, 0, set[str](), 4

    async def check(_prober: key_probe.KeyProber, instance: Instance) -> tuple[bool, str]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        checked.add(instance.id)
        return True, "the keys of a chat agree"

    monkeypatch.setattr(key_probe.KeyProber, "_check", check)
    monkeypatch.setattr(key_probe, "AT_ONCE_MAX", at_most)
    async with world_with(probe=True) as world:
        now = ScaledClock().now()
        for number in range(50):
            await world.log.append(joined(f"e{number}", at=now, url=world.one.url, max_model_len=1000))
        await eventually(lambda: len(checked) >= 50)

    assert most == at_most


@pytest.mark.parametrize("answers", [True, False])
async def test_readyz_says_why_answers_are_not_exact_until_keys_have_been_compared(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who deploys waits until nothing is degraded. An engine that cannot be asked is not waited for."""
    monkeypatch.setattr(key_probe, "PAUSE_WALL_SECONDS", 0.0)
    asked = asyncio.Event()

    async def check(_prober: key_probe.KeyProber, _instance: Instance) -> tuple[bool, str]:
        await asked.wait()
        if not answers:
            raise key_probe.ProbeFailedError
        return True, "the keys of a chat agree"

    monkeypatch.setattr(key_probe.KeyProber, "_check", check)
    async with world_with(probe=True) as world:
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        await eventually(lambda: world.board.degraded_parts == {key_probe.KEYS_PART: key_probe.UNPROVEN})
        ready = world.board.ready
        asked.set()
        await eventually(lambda: world.board.whole)

    assert ready


async def test_a_verdict_on_a_life_that_is_over_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_probe, "EVENTS_WALL_SECONDS_MAX", 0.2)
    monkeypatch.setattr(key_probe, "REPEAT_WALL_SECONDS", 0.1)  # where a busy machine takes longer to publish
    async with world_with(probe=True) as world:
        publishing = asyncio.create_task(_publish_blocks(world, _chain("pointsman-development"), epoch=2))
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        await eventually(lambda: world.one.received)
        now = ScaledClock().now()
        await world.log.append(joined(ONE, epoch=2, url=world.one.url, at=now))
        await world.log.append(reported(ONE, 0, [], epoch=2, at=now))
        await eventually(lambda: _agrees(world))
        await asyncio.sleep(float(3 * key_probe.EVENTS_WALL_SECONDS_MAX))  # as long as the former life's probe may take
        publishing.cancel()

        assert {event.epoch for event in await _verdicts(world)} == {2}


@pytest.mark.parametrize("secret", ["pointsman-development", "another"])
async def test_what_another_ingress_found_of_its_keys_is_not_believed_of_ones_own(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts are looked for under other keys where the secret is another one: no hit is exact."""
    monkeypatch.setattr(key_probe, "EVENTS_WALL_SECONDS_MAX", 0.2)
    monkeypatch.setattr(key_probe, "REPEAT_WALL_SECONDS", 0.1)  # its keys must differ twice
    async with world_with(engines_join=False, probe=True) as world:
        for instance, engine in ((ONE, world.one), (TWO, world.two)):
            await world.log.append(joined(instance, url=engine.url, max_model_len=1000))  # not heard of lately
            await world.log.append(InstanceProbed(at=0.0, instance=instance, epoch=Epoch(1), parity=True))
        async with world.post(COMPLETIONS, TOKENS) as before:
            await before.read()
        publishing = asyncio.create_task(_publish_blocks(world, _chain(secret)))
        for instance in (ONE, TWO):
            await world.log.append(reported(instance, 0, [], at=ScaledClock().now()))

        async def is_exact() -> bool:
            async with world.post(COMPLETIONS, TOKENS) as answer:
                await answer.read()
                return bool(answer.headers["x-pointsman-knowledge"] == "exact")

        agrees = secret == "pointsman-development"
        await eventually(
            is_exact if agrees else lambda: "check secret" in world.board.lacks.get(key_probe.KEYS_PART, "")
        )
        exact, lacks, verdicts = await is_exact(), world.board.lacks, await _verdicts(world)
        publishing.cancel()

    assert before.headers["x-pointsman-knowledge"] == "degraded", "nothing has been compared yet"
    assert exact == agrees
    assert "check secret" in lacks.get(key_probe.KEYS_PART, "check secret" if agrees else "")
    assert [event.parity for event in verdicts] == [True], "the other's verdict stands"


async def test_an_engine_that_cannot_be_reached_makes_nobody_elses_keys_differ() -> None:
    """Whoever is idle is asked for the tokens of the chat that is sent to the engine to compare with."""
    async with world_with(engines_join=False, probe=True) as world:
        await world.log.append(joined("engine-0", url="http://127.0.0.1:1", max_model_len=1000))
        publishing = asyncio.create_task(_publish_blocks(world, _chain("pointsman-development")))
        await world.log.append(joined(ONE, url=world.one.url, at=ScaledClock().now(), max_model_len=1000))
        event = await _first_probed(world)
        publishing.cancel()

    assert event.parity, event.detail


@pytest.mark.parametrize("stay", [True, False])
async def test_keys_that_agreed_before_and_then_differed_twice_are_compared_until_they_agree(
    stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that hangs gives no tokens, so the keys of others seem to differ. `stay`: so do those that were compared."""
    monkeypatch.setattr(key_probe, "REPEAT_WALL_SECONDS", 0.1)
    doubted, read, well = {TWO, InstanceId("engine-3")}, asyncio.Event(), asyncio.Event()

    async def check(_prober: key_probe.KeyProber, instance: Instance) -> tuple[bool, str]:
        if instance.id in doubted and not (stay and well.is_set()):
            await read.wait()
            return False, "tokens are guessed, not counted"
        if read.is_set():
            await well.wait()
        return True, "the keys of a chat agree"

    monkeypatch.setattr(key_probe.KeyProber, "_check", check)
    async with world_with(probe=True) as world:
        now = ScaledClock().now()
        await world.log.append(reported(ONE, 0, [], at=now))
        await eventually(lambda: _agrees(world))
        await eventually(lambda: f"probe-{ONE}" not in {task.get_name() for task in asyncio.all_tasks()})
        await world.log.append(joined("engine-3", url=world.one.url, at=now, max_model_len=1000))
        for instance in doubted:
            await world.log.append(reported(instance, 0, [], at=now))
        for instance in doubted:
            await world.log.append(InstanceProbed(at=now, instance=instance, epoch=Epoch(1), parity=True))
        await world.log.append(msgspec.structs.replace(reported(ONE, 0, [], at=now), adapters=["read-up-to-here"]))
        await eventually_listed(world, "read-up-to-here")
        read.set()
        await eventually(lambda: "another ingress" in world.board.lacks.get(key_probe.KEYS_PART, ""))
        for instance in () if stay else doubted:
            await world.log.append(InstanceLeft(at=now, instance=instance, epoch=Epoch(1), reason="stopped"))
        well.set()
        await eventually(lambda: world.board.whole)


def _chain(secret: str) -> KeyChain:
    return KeyChain(secret=secret.encode(), model="m", block_tokens=64)


async def _verdicts(world: IngressBench) -> list[InstanceProbed]:
    probed = [event for event in await events_in(world.log) if isinstance(event, InstanceProbed)]
    return [event for event in probed if event.instance == ONE]


async def _agrees(world: IngressBench) -> bool:
    return any(event.parity for event in await _verdicts(world))


async def _first_probed(world: IngressBench) -> InstanceProbed:
    async for entry in world.log.read(kinds=("fleet",)):
        event = getattr(entry, "event", None)
        if isinstance(event, InstanceProbed):
            return event
    pytest.fail("reading ended")


async def _publish_blocks(world: IngressBench, chain: KeyChain, *, epoch: int = 1) -> None:
    """A worker beside each engine: what comes in is stored."""
    seen = {ONE: 0, TWO: 0}
    while True:
        for instance, engine in ((ONE, world.one), (TWO, world.two)):
            for received in engine.received[seen[instance] :]:
                seen[instance] += 1
                fields = received.fields
                tokens = fields.get("prompt") or list(
                    "".join(f"{m['role']}:{m['content']}" for m in fields["messages"]).encode()
                )
                run = Run(pack_keys(chain.extend(chain.root(), tokens)))
                await world.log.append(
                    BlocksStored(at=0.0, instance=instance, epoch=Epoch(epoch), sequence=seen[instance], runs=[run])
                )
        await asyncio.sleep(0.01)


async def _drain(world: IngressBench, body: Any) -> int:
    async with world.post(COMPLETIONS, body) as answer:
        await answer.read()
        return int(answer.status)


async def _events_after(world: IngressBench, condition: Callable[[Any], bool]) -> list[Any]:
    found: list[Any] = []

    async def happened() -> bool:
        found[:] = [event for event in await world.events() if condition(event)]
        return bool(found)

    await eventually(happened)
    return found


# The benchmark


async def test_bench_gateway_measures_what_the_gateway_adds(world: IngressBench) -> None:
    setup = Setup(
        gateway=Target.of(world.url),
        engines={ONE: Target.of(world.one.url)},
        pids={"ingress": os.getpid()},
        model="m",
        requests=10,
        concurrency=4,
    )
    for instance in (ONE, TWO):
        await world.log.append(joined(instance, at=ScaledClock().now(), epoch=2, url=world.one.url, max_model_len=0))
    await eventually(lambda: world.board.whole)
    figures = await measure(setup)

    assert set(figures.added) == {"small", "token_ids_40kb"}
    assert all(added.requests == 10 and added.elsewhere == 0 for added in figures.added.values())
    assert all(rate > 0 for rate in figures.requests_per_s.values())
    assert figures.work["ingress"].cpu_us_per_request > 0
    assert figures.work["ingress"].cpu_us_per_chunk >= 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens?beta=true", "/v1/messages/batches", CHAT])
@pytest.mark.parametrize(
    ("rest", "status", "kind"),
    [
        ("x: " + "a" * 40_000 + "\r\n\r\n", 431, "invalid_request_error"),
        ("host: y\r\n\r\n", 400, "invalid_request_error"),
        ("transfer-encoding: chunked\r\n\r\nno number\r\n", 400, "invalid_request_error"),
        ("x: never ended", 408, "timeout_error"),
    ],
    ids=["head too large", "two hosts", "bad chunk", "slow head"],
)
async def test_what_is_no_http_is_refused_in_the_shape_of_the_api_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, path: str, rest: str, status: int, kind: str
) -> None:
    monkeypatch.setattr(servers, "HttpLimits", partial(HttpLimits, head_seconds=0.2))
    async with world_with() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.server.bound_port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{rest}".encode())
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    told = json.loads(body)
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    if path == CHAT:
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert told["error"]["type"] == kind
    else:
        assert (told["type"], set(told["error"]), told["error"]["type"]) == ("error", {"type", "message"}, kind)
