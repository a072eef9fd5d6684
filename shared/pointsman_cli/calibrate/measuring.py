"""Times the first tokens of prompts (token ids) on one engine, one at a time, cold and partly cached."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from random import Random

import aiohttp
import msgspec

from pointsman.adapters.http_engine import EngineUnreachableError, HttpEngine
from pointsman.adapters.sse import event_data
from pointsman.primitives import EngineSeconds, Tokens

TOKEN_IDS = range(100, 1000)
"""In every vocabulary, and rarely special."""
SHORTEST: Tokens = 64
DECODED: Tokens = 33
BLOCK_TOKENS: Tokens = 16
QUESTION_WALL_SECONDS_MAX = 10.0
ANSWER_WALL_SECONDS_MAX = 300.0


class EngineError(Exception):
    """The engine cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    total: Tokens
    cached: Tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall seconds to the first token, and between later tokens."""

    total: Tokens
    cached: Tokens
    seconds: EngineSeconds
    token_seconds: EngineSeconds = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    model: str
    version: str
    max_model_len: Tokens
    block_tokens: Tokens
    busy: int


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None


_chunk = msgspec.json.Decoder(_Chunk)


def rounds(longest: Tokens, block_tokens: Tokens) -> Iterator[list[Plan]]:
    lengths, length = [], SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    for total in (*lengths, longest):
        parts = dict.fromkeys(
            cached // block_tokens * block_tokens for cached in (0, total // 2, total - SHORTEST) if cached < total
        )
        yield [Plan(total, cached) for cached in parts]


class Engine:
    def __init__(self, url: str, *, api_key: str, chance: Random | None = None) -> None:
        """`chance` makes the prompts; None: other ones in each run, because engines keep those of earlier runs cached."""
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._chance = chance or Random(secrets.randbits(64))
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_WALL_SECONDS_MAX)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def describe(self, model: str) -> Target:
        """Raises EngineError."""
        try:
            async with HttpEngine(self._url, api_key=self._api_key, seconds_max=QUESTION_WALL_SECONDS_MAX) as engine:
                facts, load = await engine.describe(), await engine.load()
        except EngineUnreachableError as error:
            raise EngineError(f"no engine answers at {self._url}: {error}") from error
        served = (facts.model, *facts.further_names.aliases, *facts.further_names.adapters)
        if model and model not in served:
            raise EngineError(f"{self._url} serves {', '.join(served)}, not {model!r}")
        return Target(
            url=self._url,
            model=model or facts.model,
            version=facts.version,
            max_model_len=facts.max_model_len,
            block_tokens=facts.block_tokens or BLOCK_TOKENS,
            busy=load.running + load.waiting,
        )

    async def measured(self, target: Target, plans: list[Plan]) -> AsyncIterator[Timing]:
        """Raises EngineError."""
        first = self.fresh_prompt(plans[0].total)
        for plan in plans:
            prompt = first[: plan.cached] + self.fresh_prompt(plan.total - plan.cached) if plan.cached else first
            yield await self.time(target, prompt, expected_cached=plan.cached, output=1)

    async def time(self, target: Target, prompt: list[int], *, expected_cached: Tokens, output: Tokens) -> Timing:
        """Sends one prompt. Raises EngineError."""
        body = {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun = time.perf_counter()
        first = last = 0.0
        cached = expected_cached
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise EngineError(f"{self._url} answered {answer.status}: {(await answer.text())[:300]}")
                async for line in answer.content:
                    data = event_data(line)
                    if not data.startswith(b"{"):
                        continue
                    usage = _chunk.decode(data).usage
                    if usage is None:
                        last = time.perf_counter()
                        first = first or last
                    elif usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None:
                        cached = usage.prompt_tokens_details.cached_tokens
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise EngineError(f"{self._url} broke off: {str(error) or type(error).__name__}") from error
        if not first:
            raise EngineError(f"{self._url} gave no token")
        if cached and not expected_cached:
            raise EngineError(
                f"{self._url} has {cached:,} of the {len(prompt):,} tokens of a new prompt cached, so its times say nothing of "
                "cold prompts: empty its prefix cache (restart it) and calibrate again"
            )
        between = (last - first) / (output - 1) if output > 1 else 0.0
        return Timing(len(prompt), cached, first - begun, between)

    def fresh_prompt(self, count: Tokens) -> list[int]:
        return self._chance.choices(TOKEN_IDS, k=count)
