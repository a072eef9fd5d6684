"""A steady load: some long streams, and short requests at a fixed rate, for two cores."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import aiohttp
from typing_extensions import override

from pointsman.primitives import Tokens
from pointsman.simulation.workload import TRACE_BLOCK_TOKENS, WorkloadRequest
from pointsman_cli.discovery import FleetFile
from pointsman_lab.faults.clients import WHOLE_EVERY, Clients

STREAMS = 50
RATE = 20.0
STREAM_TOKENS = 500
SHORT_TOKENS = 12
FAILED_SECONDS = 1.0
PREFIXES = 24
QUESTION_TOKENS = (16, 192)
ENGINE_ARGUMENTS = "--stream-interval 10"


class BusyShare:
    def __init__(self) -> None:
        self._began = _ticks()

    @property
    def share(self) -> float:
        (idle, total), (idle_before, total_before) = _ticks(), self._began
        return 1 - (idle - idle_before) / (total - total_before) if total > total_before else 0.0


def _ticks() -> tuple[int, int]:
    try:
        counted = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return counted[3] + counted[4], sum(counted)


class SteadyClients(Clients):
    """Clients that send until `stop`, with the pool's own SLOs: a 429 counts as an answer."""

    objectives: ClassVar[Mapping[str, str]] = {}
    stream_tokens: ClassVar[Tokens] = STREAM_TOKENS

    def __init__(self, fleet: FleetFile, *, url: str, seed: int, streams: int, rate: float) -> None:
        super().__init__(fleet, [], seed=seed, tokens_max=self.stream_tokens, url=url)
        self._streams = streams
        self._rate = rate
        self._chance = random.Random(seed)
        self._blocks = PREFIXES
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    @override
    async def run(self, tick: Callable[[], None] = lambda: None) -> None:
        async with self._session() as session, asyncio.TaskGroup() as clients:
            for number in range(self._streams):
                clients.create_task(self._lane(session, 0.2 * number))
            started, asked = time.monotonic(), 0
            while not self._stopped.is_set():
                streamed = bool(asked % WHOLE_EVERY)
                request = self._request(SHORT_TOKENS)
                body = self._body(request, streamed=streamed)
                clients.create_task(self._one(session, body, SHORT_TOKENS, streamed=streamed))
                asked += 1
                tick()
                await asyncio.sleep(max(0.0, started + asked / self._rate - time.monotonic()))

    async def _lane(self, session: aiohttp.ClientSession, begin: float) -> None:
        await asyncio.sleep(begin)
        while not self._stopped.is_set():
            tokens = self.stream_tokens - self._chance.randrange(self.stream_tokens // 4)
            ending = await self._one(session, self._body(self._request(tokens), streamed=True), tokens, streamed=True)
            if ending != "completed":
                await asyncio.sleep(FAILED_SECONDS)

    def _request(self, tokens: Tokens) -> WorkloadRequest:
        self._blocks += 1
        blocks = (self._chance.randrange(PREFIXES), self._blocks)
        length = TRACE_BLOCK_TOKENS + self._chance.randint(*QUESTION_TOKENS)
        return WorkloadRequest(arrival_s=0.0, block_ids=blocks, input_length=length, output_tokens=tokens)
