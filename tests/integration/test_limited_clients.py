"""Limits and priorities of tenants as OpenAI's and Anthropic's own clients see them: headers, exceptions, and when they
ask again by themselves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import anthropic
import anyio
import msgspec
import openai
import pytest

from pointsman.contracts.tenants import RateLimit, RateLimits, TenantPolicies, TenantPolicy
from pointsman.primitives import Tenant
from pointsman.runtime.tenant_policies import TENANTS_KEY
from tests.support.client_libraries import anthropic_of, openai_of
from tests.support.ingress_world import CHAT, HELLO, TOKENS, IngressBench, world_with
from tests.support.waiting import eventually

PROMPT: Any = {"model": "m", "prompt": [1, 2, 3]}
ASKS: Any = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
SPENT = RateLimits(
    requests=RateLimit(limit=10, remaining=0, reset=1.5), tokens=RateLimit(limit=40_000, remaining=18_000, reset=360.0)
)
LEFT = msgspec.structs.replace(SPENT, requests=RateLimit(limit=10, remaining=9, reset=0.1))


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with world_with() as opened:
        yield opened


# Headers


async def test_openais_client_reads_what_is_left_with_answers_streams_and_refusals(world: IngressBench) -> None:
    world.scheduler.limits = LEFT
    async with openai_of(world) as client:
        whole = await client.completions.with_raw_response.create(**PROMPT)
        stream = await client.completions.with_raw_response.create(stream=True, **PROMPT)
        world.scheduler.limits, world.scheduler.rejection = SPENT, (429, "rate_limited", 0.4)
        with pytest.raises(openai.RateLimitError) as raised:
            await client.completions.create(**PROMPT)

    for answer in (whole, stream):
        assert answer.headers["x-ratelimit-limit-requests"] == "10"
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert answer.headers["x-ratelimit-reset-requests"] == "100ms"
    refused = raised.value.response.headers
    assert refused["x-ratelimit-remaining-requests"] == "0"
    assert refused["x-ratelimit-reset-requests"] == "1.5s"
    assert refused["x-ratelimit-remaining-tokens"] == "18000"
    assert refused["x-ratelimit-reset-tokens"] == "6m0s"
    assert (refused["retry-after"], refused["retry-after-ms"]) == ("1", "400")
    assert (raised.value.code, raised.value.type) == ("rate_limit_exceeded", "requests")


async def test_anthropics_client_reads_them_in_anthropics_words(world: IngressBench) -> None:
    world.scheduler.limits, world.scheduler.rejection = SPENT, (429, "rate_limited", 0.4)
    async with anthropic_of(world) as client:
        with pytest.raises(anthropic.RateLimitError) as raised:
            await client.messages.create(**ASKS)

    headers = raised.value.response.headers
    assert headers["anthropic-ratelimit-requests-limit"] == "10"
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    resets = datetime.fromisoformat(headers["anthropic-ratelimit-tokens-reset"])
    assert timedelta(seconds=355) < resets - datetime.now(UTC) < timedelta(seconds=362)
    assert not [name for name in headers if name.startswith("x-ratelimit")]


async def test_a_client_with_a_key_is_told_of_its_tenants_limits_too() -> None:
    async with world_with(keys={"sk-1": "alice"}) as world:
        world.scheduler.limits = LEFT
        async with openai_of(world) as client:
            answer = await client.completions.with_raw_response.create(**PROMPT)
            world.scheduler.limits, world.scheduler.rejection = SPENT, (429, "concurrency_exceeded", 0.4)
            with pytest.raises(openai.RateLimitError, match="The test says so") as raised:
                await client.completions.create(**PROMPT)

    assert world.scheduler.asked[-1].tenant == "alice"
    assert answer.headers["x-ratelimit-remaining-requests"] == "9"
    assert raised.value.response.headers["retry-after-ms"] == "400"


async def test_a_tenant_without_limits_is_told_of_none(world: IngressBench) -> None:
    async with world.post(CHAT, HELLO) as answer:
        assert not [name for name in answer.headers if "ratelimit" in name.lower()]


# Asking again


async def test_both_clients_ask_again_when_the_limit_allows_it_and_not_a_second_later(
    world: IngressBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, slept = anyio.sleep, list[float]()

    async def remembered(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(anyio, "sleep", remembered)  # with which both wait
    async with openai_of(world, max_retries=2) as one, anthropic_of(world, max_retries=2) as other:
        asks: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: one.completions.create(**PROMPT),
            lambda: other.messages.create(**ASKS),
        ]
        for ask in asks:
            world.scheduler.asked.clear()
            world.scheduler.limits, world.scheduler.rejection = SPENT, (429, "rate_limited", 0.3)
            asking = asyncio.create_task(ask())
            await eventually(lambda: len(world.scheduler.asked) == 1)
            world.scheduler.rejection = None
            await asyncio.wait([asking])

            first, second = world.scheduler.asked
            assert second.arrived_at - first.arrived_at > 0.29
            assert slept == [0.3]
            slept.clear()


async def test_neither_client_asks_again_with_a_spent_quota(world: IngressBench) -> None:
    world.scheduler.limits, world.scheduler.rejection = SPENT, (429, "quota_exceeded", 30.0)
    async with openai_of(world, max_retries=2) as one, anthropic_of(world, max_retries=2) as other:
        with pytest.raises(openai.RateLimitError) as raised:
            await one.completions.create(**PROMPT)
        with pytest.raises(anthropic.RateLimitError):
            await other.messages.create(**ASKS)

    assert len(world.scheduler.asked) == 2
    assert (raised.value.code, raised.value.type) == ("insufficient_quota", "insufficient_quota")
    assert raised.value.response.headers["retry-after"] == "30"


# Priorities


async def test_the_class_is_the_tenants_or_a_lower_one_that_its_client_asks_for(world: IngressBench) -> None:
    policies = TenantPolicies(
        default=TenantPolicy(priority="batch"), tenants={Tenant("alice"): TenantPolicy(priority="interactive")}
    )
    await world.broker.access.put(TENANTS_KEY, msgspec.json.encode(policies), after=0)

    async def asked_class(**fields: Any) -> str:
        async with openai_of(world) as client:
            await client.completions.create(**PROMPT, **fields)
        return world.scheduler.asked[-1].priority

    async def is_read() -> bool:
        return await asked_class() == "batch"

    await eventually(is_read)
    assert await asked_class(user="alice") == "interactive"
    assert await asked_class(user="alice", extra_body={"service_tier": "flex"}) == "batch"
    assert await asked_class(user="alice", extra_headers={"x-pointsman-priority": "standard"}) == "standard"
    assert await asked_class(user="bob", extra_body={"service_tier": "priority"}) == "batch"


async def test_without_policies_every_request_is_standard_and_a_broken_document_changes_nothing(
    world: IngressBench,
) -> None:
    policies = TenantPolicies(default=TenantPolicy(priority="interactive"))

    async def asked_class() -> str:
        async with world.post("/v1/completions", TOKENS) as answer:
            assert answer.status == 200
        return world.scheduler.asked[-1].priority

    async def is_interactive() -> bool:
        return await asked_class() == "interactive"

    assert await asked_class() == "standard"
    revision = await world.broker.access.put(TENANTS_KEY, msgspec.json.encode(policies), after=0)
    await eventually(is_interactive)
    await world.broker.access.put(TENANTS_KEY, b'{"default": 7}', after=revision)
    await asyncio.sleep(1.2)
    assert await asked_class() == "interactive"


async def test_an_unknown_class_is_the_clients_mistake(world: IngressBench) -> None:
    async with openai_of(world) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.completions.create(**PROMPT, extra_headers={"x-pointsman-priority": "urgent"})

    assert raised.value.param == "x-pointsman-priority"
    assert world.scheduler.asked == []
