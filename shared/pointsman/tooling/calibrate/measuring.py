"""Prompts to one engine, one at a time, and how long their first tokens took.

Every round sends a prompt that nobody has seen, then others that begin like it, so that a part of them is cached. Token
ids go as they are: no tokenizer is needed, and lengths are exact. How much was cached is what the engine says; where it
does not say, what it must be if it caches whole blocks.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from random import Random

import aiohttp
import msgspec

from pointsman.primitives import Seconds, Tokens

TOKEN_IDS = range(100, 1000)
"""Every vocabulary has them, and few of them are special."""

SHORTEST: Tokens = 64
DECODED: Tokens = 33
ANSWER_WALL_SECONDS_MAX = 300.0
CHUNK_SIZE_MAX = 64 * 1024


class EngineError(Exception):
    """The engine cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One prompt to measure: `total` tokens, of which `cached` were sent before."""

    total: Tokens
    cached: Tokens


@dataclass(frozen=True, slots=True)
class Taken:
    """What one prompt took: wall seconds to the first token. `token_seconds`: between two of those that followed."""

    total: Tokens
    cached: Tokens
    seconds: Seconds
    token_seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """The engine to measure, as far as its own pages say."""

    url: str
    model: str
    version: str
    max_model_len: Tokens
    block_tokens: Tokens
    busy: int
    """Requests that it has to do already."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None


_chunk = msgspec.json.Decoder(_Chunk)


def rounds(longest: Tokens, block_tokens: Tokens) -> Iterator[list[Plan]]:
    """What to measure, a length a round: the whole prompt, then with half of it cached, then with nearly all."""
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
    """One engine over HTTP. Open it as a context."""

    def __init__(self, url: str, *, api_key: str, seed: int) -> None:
        self._url = url.rstrip("/")
        self._chance = Random(seed)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_WALL_SECONDS_MAX)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def describe(self, model: str) -> Target:
        """What is there to be measured. Raises EngineError."""
        listed = _object(await self._get("/v1/models")).get("data")
        models = [entry for entry in listed or [] if isinstance(entry, dict)] if isinstance(listed, list) else []
        chosen = next((entry for entry in models if model in ("", entry.get("id"))), None)
        if chosen is None:
            names = ", ".join(str(entry.get("id")) for entry in models) or "nothing"
            msg = f"{self._url} serves {names}, not {model!r}"
            raise EngineError(msg)
        metrics = (await self._get("/metrics", needed=False)).decode(errors="replace")
        version = _object(await self._get("/version", needed=False)).get("version")
        length = chosen.get("max_model_len")
        return Target(
            url=self._url,
            model=str(chosen["id"]),
            version=str(version or ""),
            max_model_len=length if isinstance(length, int) else 0,
            block_tokens=_block_tokens(metrics),
            busy=_busy(metrics),
        )

    async def measured(self, target: Target, plans: list[Plan]) -> AsyncIterator[Taken]:
        """Each plan of a round once, in order. Raises EngineError."""
        first = self._tokens(plans[0].total)
        for plan in plans:
            prompt = first[: plan.cached] + self._tokens(plan.total - plan.cached) if plan.cached else first
            yield await self.time(target, prompt, expected_cached=plan.cached, output=1)

    async def time(self, target: Target, prompt: list[int], *, expected_cached: Tokens, output: Tokens) -> Taken:
        """Send one prompt and take its times. Raises EngineError."""
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
                    msg = f"{self._url} answered {answer.status}: {(await answer.text())[:300]}"
                    raise EngineError(msg)
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    usage = _chunk.decode(line[6:]).usage
                    if usage is None:
                        last = time.perf_counter()
                        first = first or last
                    elif usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None:
                        cached = usage.prompt_tokens_details.cached_tokens
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            msg = f"{self._url} broke off: {str(error) or type(error).__name__}"
            raise EngineError(msg) from error
        if not first:
            msg = f"{self._url} gave no token"
            raise EngineError(msg)
        between = (last - first) / (output - 1) if output > 1 else 0.0
        return Taken(len(prompt), cached, first - begun, between)

    def _tokens(self, count: Tokens) -> list[int]:
        return self._chance.choices(TOKEN_IDS, k=count)

    def fresh_prompt(self, count: Tokens) -> list[int]:
        """So many tokens that the engine has not seen."""
        return self._tokens(count)

    async def _get(self, path: str, *, needed: bool = True) -> bytes:
        try:
            async with asyncio.timeout(10), self._session.get(self._url + path) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            msg = f"no engine answers at {self._url}: {str(error) or type(error).__name__}"
            raise EngineError(msg) from error
        if answer.status == 200:
            return body
        if needed:
            msg = f"{self._url}{path} answered {answer.status}; is an OpenAI-compatible engine there?"
            raise EngineError(msg)
        return b""


def _object(body: bytes) -> dict[str, object]:
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _block_tokens(metrics: str) -> Tokens:
    """The engine's block size; 16, vLLM's own choice, where it does not say."""
    for line in metrics.splitlines():
        if line.startswith("vllm:cache_config_info"):
            _, found, rest = line.partition('block_size="')
            size = rest.partition('"')[0]
            if found and size.isdecimal() and int(size):
                return int(size)
    return 16


def _busy(metrics: str) -> int:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(int(float(line.rpartition(" ")[2])) for line in metrics.splitlines() if line.partition("{")[0] in names)
