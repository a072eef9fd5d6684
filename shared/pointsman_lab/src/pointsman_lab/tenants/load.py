"""Clients of several tenants: each sends at its rate, whatever becomes of its requests, over all ingresses in turn. The
same seed gives the same times in every run, and other prompts."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
import msgspec

from pointsman.primitives import Tokens

VOCABULARY = 30_000
JITTER = 0.4
ANSWER_SECONDS_MAX = 120.0
OPEN_MAX = 4_000
TENANT_HEADER = "x-llm-d-inference-fairness-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`rate`: requests a second. `shared_tokens`: prefix of all prompts of this tenant. `hangs_up`: leaves what is
    unanswered when the others are done."""

    tenant: str
    rate: float
    prompt_tokens: Tokens
    output_tokens: Tokens
    shared_tokens: Tokens = 0
    hangs_up: bool = False


@dataclass(slots=True, kw_only=True)
class Sample:
    """Wall seconds. `ttft`: None without a first token."""

    tenant: str
    asked_at: float
    status: int = 0
    reason: str = ""
    ttft: float | None = None


@dataclass(slots=True)
class TenantClients:
    model: str
    urls: Sequence[str]
    seed: int
    samples: list[Sample] = field(default_factory=list)

    async def run(self, traffic: Iterable[Traffic], seconds: float) -> list[Sample]:
        """Returns the samples of this run, in the order of asking."""
        first = len(self.samples)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS_MAX)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            sending = {
                one: tasks.create_task(
                    self._send(session, one, seconds, random.Random(f"{self.seed} {one.tenant} {first}"))
                )
                for one in traffic
            }
            await asyncio.wait([task for one, task in sending.items() if not one.hangs_up])
            for one, task in sending.items():
                if one.hangs_up:
                    task.cancel()
        return self.samples[first:]

    async def _send(
        self, session: aiohttp.ClientSession, traffic: Traffic, seconds: float, chance: random.Random
    ) -> None:
        urls, began, times = (
            itertools.cycle(self.urls),
            time.monotonic(),
            random.Random(f"{self.seed} {traffic.tenant}"),
        )
        prefix = random.Random(traffic.tenant).choices(range(VOCABULARY), k=traffic.shared_tokens)
        async with asyncio.TaskGroup() as requests:
            waiting: set[asyncio.Task[None]] = set()
            at = times.random() / traffic.rate
            while at < seconds:
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                at += times.uniform(1 - JITTER, 1 + JITTER) / traffic.rate
                if len(waiting) < OPEN_MAX:
                    own = chance.choices(range(VOCABULARY), k=traffic.prompt_tokens - traffic.shared_tokens)
                    task = requests.create_task(self._ask(session, next(urls), traffic, prefix + own))
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)

    async def _ask(self, session: aiohttp.ClientSession, url: str, traffic: Traffic, prompt: list[int]) -> None:
        sample = Sample(tenant=traffic.tenant, asked_at=time.monotonic())
        self.samples.append(sample)
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": traffic.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        headers = {"content-type": "application/json", TENANT_HEADER: traffic.tenant, "x-slo-ttft-ms": "3600000"}
        try:
            async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
                sample.status = answer.status
                sample.reason = answer.headers.get("x-pointsman-reject-reason", "")
                async for _ in answer.content.iter_any():
                    if sample.ttft is None and answer.status == HTTPStatus.OK:
                        sample.ttft = time.monotonic() - sample.asked_at
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            sample.reason = type(error).__name__
