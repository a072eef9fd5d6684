"""What tenants learn of each other and of the fleet: over HTTP, with engines and a scheduler that do as the test says."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.block_keys import KeyChain, pack_keys
from pointsman.contracts.cache import BlocksStored, Run
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.fleet import InstanceProbed
from pointsman.contracts.tenants import RateLimit, RateLimits
from pointsman.primitives import Epoch
from pointsman_ingress import key_probe
from pointsman_ingress.engine.refusals import refused_by_engine
from tests.support.events import BLOCK, reported
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import CHAT, COMPLETIONS, HELLO, ONE, STREAM, TOKENS, TWO, IngressBench, world_with
from tests.support.log_reading import events_in
from tests.support.raw_engine import STREAM_HEAD, running_raw_engine
from tests.support.tenants import ALICE, BOB, KEYS
from tests.support.waiting import eventually

SECRET = "a secret of this deployment"
SALTED: dict[str, dict[str, Any]] = {
    COMPLETIONS: TOKENS,
    CHAT: HELLO,
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/messages": {**HELLO, "max_tokens": 3},
    "/v1/embeddings": {"model": "m", "input": "hello"},
    "/pooling": {"model": "m", "input": "hello"},
    "/classify": {"model": "m", "input": "hello"},
    "/rerank": {"model": "m", "query": "a", "documents": ["b"]},
    "/v1/rerank": {"model": "m", "query": "a", "documents": ["b"]},
    "/v2/rerank": {"model": "m", "query": "a", "documents": ["b"]},
    "/score": {"model": "m", "text_1": "a", "text_2": "b"},
    "/v1/score": {"model": "m", "text_1": "a", "text_2": "b"},
}
ANSWER = {"id": "x", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with world_with(secret=SECRET, keys=KEYS) as opened:
        opened.one.says = {path: ANSWER for path in SALTED if path not in (COMPLETIONS, CHAT)}
        yield opened


async def sent(
    world: IngressBench, path: str, body: dict[str, Any], tenant: dict[str, str]
) -> tuple[dict[str, Any], RouteRequest]:
    """What the engine and the scheduler got."""
    async with world.post(path, body, **tenant) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return world.one.received[-1].fields, world.scheduler.asked[-1]


@pytest.mark.parametrize("path", list(SALTED))
async def test_every_prompt_goes_to_engines_under_its_tenants_salt(world: IngressBench, path: str) -> None:
    alice, asked = await sent(world, path, SALTED[path], ALICE)
    bob, _ = await sent(world, path, SALTED[path], BOB)
    again, _ = await sent(world, path, SALTED[path], ALICE)

    assert alice["cache_salt"] == again["cache_salt"] != bob["cache_salt"]
    assert {name: value for name, value in alice.items() if name != "cache_salt"} == SALTED[path]
    assert asked.cache_group == "tenant:alice"


async def test_a_clients_salt_refines_its_own_and_reaches_nobody_elses(world: IngressBench) -> None:
    alice, _ = await sent(world, COMPLETIONS, TOKENS, ALICE)
    refined, _ = await sent(world, COMPLETIONS, {**TOKENS, "cache_salt": "mine"}, ALICE)
    posing, _ = await sent(world, COMPLETIONS, {**TOKENS, "cache_salt": alice["cache_salt"]}, BOB)

    assert len({alice["cache_salt"], refined["cache_salt"], posing["cache_salt"]}) == 3


async def test_the_block_keys_have_the_same_salt_as_the_engine(world: IngressBench) -> None:
    fields, asked = await sent(world, COMPLETIONS, TOKENS, ALICE)
    _, of_bob = await sent(world, COMPLETIONS, TOKENS, BOB)

    chain = KeyChain(secret=SECRET.encode(), model="m", block_tokens=BLOCK)
    root = chain.root(cache_salt=fields["cache_salt"])
    assert asked.keys == pack_keys(chain.extend(root, range(200)))
    assert asked.keys != of_bob.keys


async def test_streams_and_both_halves_of_a_split_request_have_it(world: IngressBench) -> None:
    fields, _ = await sent(world, COMPLETIONS, STREAM, ALICE)
    world.scheduler.engines, world.scheduler.decoders = {ONE: world.one.url}, {TWO: world.two.url}
    world.one.transfer_params = {"do_remote_prefill": True}
    prefill, _ = await sent(world, COMPLETIONS, STREAM, ALICE)

    assert "kv_transfer_params" in prefill
    assert {prefill["cache_salt"], world.two.received[-1].fields["cache_salt"]} == {fields["cache_salt"]}


async def test_another_attempt_elsewhere_has_it(world: IngressBench) -> None:
    world.one.script.append(Behaviour.RESETS)
    async with world.post(COMPLETIONS, TOKENS, **ALICE) as answer:
        assert answer.status == 200

    (first,), (second,) = world.one.received, world.two.received
    assert first.fields["cache_salt"] == second.fields["cache_salt"]


async def test_without_keys_a_clients_salt_passes_as_it_is() -> None:
    async with world_with() as world:
        fields, asked = await sent(world, COMPLETIONS, {**TOKENS, "cache_salt": "mine"}, {})
        plain, _ = await sent(world, COMPLETIONS, TOKENS, {})

    assert fields["cache_salt"] == "mine"
    assert "cache_salt" not in plain
    assert asked.cache_group == ""


@pytest.mark.parametrize("honours", [True, False])
async def test_the_probe_finds_an_engine_that_ignores_salts(honours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not honours:
        monkeypatch.setattr(key_probe, "EVENTS_WALL_SECONDS_MAX", 1.0)
    async with world_with(probe=True, keys=KEYS, secret=SECRET) as world, asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(_publish_blocks(world, honours=honours))
        await world.log.append(reported(ONE, 0, [], at=ScaledClock().now()))
        probed: list[InstanceProbed] = []

        async def is_probed() -> bool:
            probed[:] = [event for event in await events_in(world.log) if isinstance(event, InstanceProbed)]
            return bool(probed)

        await eventually(is_probed)
        publishing.cancel()

    assert all(received.fields["cache_salt"] for received in world.one.received)
    assert probed[0].parity is honours
    assert honours or "ignores `cache_salt`" in probed[0].detail


async def _publish_blocks(world: IngressBench, *, honours: bool) -> None:
    """A worker beside engine one: what comes in is stored."""
    chain, seen = KeyChain(secret=SECRET.encode(), model="m", block_tokens=BLOCK), 0
    while True:
        for received in world.one.received[seen:]:
            seen, fields = seen + 1, received.fields
            chat = "".join(f"{m['role']}:{m['content']}" for m in fields.get("messages", []))
            root = chain.root(cache_salt=fields["cache_salt"] if honours else "")
            run = Run(pack_keys(chain.extend(root, fields.get("prompt") or list(chat.encode()))))
            await world.log.append(BlocksStored(at=0.0, instance=ONE, epoch=Epoch(1), sequence=seen, runs=[run]))
        await asyncio.sleep(0.01)


# What a client is told

FLEET = re.compile(r"engine-\d|127\.0\.0\.1|http://|the test says so|predicted|/root|knowledge", re.IGNORECASE)


def told(answer: Any, text: str) -> str:
    return f"{dict(answer.headers)} {text}"


async def test_an_answer_names_no_instance_and_tells_nothing_of_their_load(world: IngressBench) -> None:
    world.one.says["/detokenize"] = {"prompt": "hello"}
    own = ["x-pointsman-cached-tokens", "x-pointsman-prefix", "x-pointsman-request-id"]
    for path, body, ours in (
        (COMPLETIONS, TOKENS, own),
        (COMPLETIONS, STREAM, own),
        ("/detokenize", {"model": "m", "tokens": [1]}, own[-1:]),
    ):
        async with world.post(path, body, **ALICE) as answer:
            assert answer.status == 200
            assert not FLEET.search(told(answer, await answer.text()))
            assert sorted(name for name in answer.headers if name.lower().startswith("x-pointsman")) == ours


async def test_a_best_effort_answer_says_in_whole_seconds_when_it_comes(world: IngressBench) -> None:
    for predicted, shown in ((17.0004, "18000"), (17.9, "18000"), (18.0, "18000")):
        world.scheduler.grant_fields = {
            "best_effort": True, "predicted_ttft": predicted, "predicted_ttft_upper": 25.5
        }  # fmt: skip
        async with world.post(COMPLETIONS, TOKENS, **ALICE) as answer:
            assert answer.headers["x-pointsman-best-effort"] == "true"
            assert answer.headers["x-pointsman-predicted-ttft-ms"] == shown
            assert "x-pointsman-predicted-ttft-upper-ms" not in answer.headers


async def test_without_keys_every_answer_says_when_it_was_expected() -> None:
    async with world_with() as world:
        world.scheduler.grant_fields = {"predicted_ttft": 17.0004, "predicted_ttft_upper": 25.5}
        async with world.post(COMPLETIONS, TOKENS) as answer:
            assert answer.headers["x-pointsman-predicted-ttft-ms"] == "17000.4"
            assert answer.headers["x-pointsman-predicted-ttft-upper-ms"] == "25500.0"
            assert "x-pointsman-best-effort" not in answer.headers


async def test_limits_of_the_tenant_itself_are_told(world: IngressBench) -> None:
    world.scheduler.limits = RateLimits(requests=RateLimit(limit=10, remaining=9, reset=1.0))
    async with world.post(COMPLETIONS, TOKENS, **ALICE) as answer:
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"


async def test_what_an_operator_allows_passes() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://images.example/a.png"}}
    seen = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    async with world_with(keys=KEYS, allow_field=("min_tokens", "priority"), media_hosts=("images.example",)) as world:
        fields, _ = await sent(world, COMPLETIONS, {**TOKENS, "priority": 1}, ALICE)
        await sent(world, CHAT, seen, ALICE)

    assert fields["priority"] == 1


async def test_a_rejection_tells_nothing_of_other_requests(world: IngressBench) -> None:
    world.scheduler.rejection = (429, "slo_ttft", 2.0)
    async with world.post(COMPLETIONS, TOKENS, **ALICE) as answer:
        text = await answer.text()

    assert answer.status == 429
    assert not FLEET.search(told(answer, text))
    assert "x-slo-ttft-ms" in text


async def test_an_engines_refusal_is_told_without_addresses(world: IngressBench) -> None:
    message = (
        "cannot fetch http://10.1.2.3:9000/a?b=c via 10.1.2.4:80, [fd00::1]:5557, host-1:8000 or /root/.cache/model/x"
    )
    for path, body in ((COMPLETIONS, TOKENS), ("/detokenize", {"model": "m", "tokens": [1]})):
        world.one.script.append(Behaviour.REFUSES)
        async with world.post(path, body, **ALICE) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["message"], error["code"]) == (400, "the engine says no", "engine_refused")

    shown = refused_by_engine(400, json.dumps({"error": {"message": message, "param": "prompt"}}).encode())
    assert shown.message == "cannot fetch (address) via (address), (address), (address) or (address)"
    assert shown.param == "prompt"
    assert refused_by_engine(404, b"\xff not json").message == "The engine answered 404."


@pytest.mark.parametrize("options", [{"include_usage": True}, None])
async def test_an_engine_that_fails_in_a_stream_is_told_in_our_words(world: IngressBench, options: Any) -> None:
    """Also where the beginning of its own words came before their end."""
    world.one.script.append(Behaviour.ERRS_IN_MID_STREAM)
    async with world.post(COMPLETIONS, {**STREAM, "stream_options": options}, **ALICE) as answer:
        text = await answer.text()

    events = [json.loads(event.removeprefix("data: ")) for event in filter(None, text.split("\n\n"))]
    assert [list(event) for event in events] == [["choices"], ["error"]]
    assert events[1]["error"]["code"] == "engine_failed"


async def test_a_refusal_in_a_stream_is_told_without_addresses(world: IngressBench) -> None:
    piece = b'data: {"choices": [{"text": "a"}]}\n\n'
    blame = b'data: {"error": {"message": "10.0.0.7:8000 says no", "type": "BadRequestError", "code": 400}}\n\n'
    async with running_raw_engine() as engine:
        await world.grants({ONE: engine.url})
        engine.pause_seconds = 0.1
        for pieces, status in (([piece, piece + blame], 200), ([blame], 400)):
            engine.otherwise = [STREAM_HEAD + pieces[0], *pieces[1:], b"data: [DONE]\n\n"]
            async with world.post(COMPLETIONS, STREAM, **ALICE) as answer:
                text = await answer.text()

            assert answer.status == status
            assert "(address) says no" in text
            assert "10.0.0.7" not in text
            assert "engine_refused" in text


async def test_fields_for_engines_alone_get_400_and_unknown_ones_are_named(world: IngressBench) -> None:
    for name in ("kv_transfer_params", "chat_template", "priority", "vllm_xargs"):
        async with world.post(COMPLETIONS, {**TOKENS, name: {"remote_host": "10.0.0.9"}}, **ALICE) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "field_not_allowed", name)
    assert not world.one.received
    async with world.post(COMPLETIONS, {**TOKENS, "temprature": 1}, **ALICE) as answer:
        assert answer.headers["x-pointsman-dropped-fields"] == "temprature"
    assert "temprature" not in world.one.received[0].fields


async def test_without_keys_too_a_client_cannot_lead_an_engine_elsewhere() -> None:
    async with world_with() as world:
        for body in (TOKENS, {**TOKENS, "prompt": ["a", "b"]}):
            async with world.post(COMPLETIONS, {**body, "kv_transfer_params": {"remote_host": "h"}}) as answer:
                assert answer.status == 400
        assert not world.one.received


async def test_media_on_other_hosts_are_refused_before_an_engine_hears_of_them(world: IngressBench) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    async with world.post(CHAT, body, **ALICE) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "media_url_not_allowed")
    assert not world.one.received
    assert not world.one.questions
