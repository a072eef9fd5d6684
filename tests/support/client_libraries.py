"""OpenAI's and Anthropic's own clients of an ingress; they ask again by themselves only if a test lets them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.support.ingress_world import IngressBench


@asynccontextmanager
async def openai_of(world: IngressBench, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    told: dict[str, Any] = {"base_url": world.url + "/v1", "api_key": "sk-1", "max_retries": 0} | options
    async with AsyncOpenAI(**told) as client:
        yield client


@asynccontextmanager
async def anthropic_of(world: IngressBench, **options: Any) -> AsyncIterator[AsyncAnthropic]:
    told: dict[str, Any] = {"base_url": world.url, "api_key": "sk-1", "max_retries": 0} | options
    async with AsyncAnthropic(**told) as client:
        yield client
