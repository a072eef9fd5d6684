"""Clients send each request at its time and judge its answer. Accepted: a whole answer (token count, one end mark), an
HTTP error, a stream that ends with an error event, or a broken connection when the ingress was killed. Clients retry
while no ingress listens."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Literal

import aiohttp
import msgspec

from pointsman.adapters.sse import events_in
from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation.metrics import percentile
from pointsman.simulation.workload import WorkloadRequest, prompt_token_ids
from pointsman_cli.bench.answer import decoded_object
from pointsman_cli.bench.load import IDLE_CONNECTION_SECONDS, VOCAB_SIZE
from pointsman_cli.discovery import FleetFile

Ending = Literal["waits", "completed", "refused", "cut", "failed", "dropped", "lost"]
"""completed: a whole answer. refused: 429 or 503. cut: a stream that ended with an error event. failed: another status,
with an error object. dropped: the connection broke. lost: the client cannot know the result."""

CUT = ("cut", "dropped", "lost")
PATIENCE_MS = "3600000"
ANSWER_SECONDS_MAX = 180.0
WHOLE_EVERY = 4
CONNECT_AGAIN_SECONDS = 0.1
CONNECT_SECONDS_MAX = 30.0
NORMAL_IN_A_ROW = 20
STRUCK_SECONDS = 5.0
NORMAL_FACTOR, NORMAL_SLACK_SECONDS = 1.5, 0.25
"""Normal: all whole, and P90 of TTFT at most baseline * factor + slack."""
DONE = b"[DONE]"
PREFIX = "bf"
OWN_ID_HEADER = "x-pointsman-request-id"


class Exchange(msgspec.Struct, kw_only=True):
    """`request`: the ingress's id once it has answered, before that the client's."""

    request: str
    streamed: bool
    asked_at: float
    first_byte_at: float | None = None
    ended_at: float | None = None
    ending: Ending = "waits"
    status: int = 0
    detail: str = ""
    instance: str = ""
    knowledge: str = ""


class Clients:
    objectives: ClassVar[Mapping[str, str]] = {"x-slo-ttft-ms": PATIENCE_MS, "x-slo-tpot-ms": PATIENCE_MS}

    def __init__(
        self, fleet: FleetFile, requests: Sequence[WorkloadRequest], *, seed: int, tokens_max: int, url: str = ""
    ) -> None:
        self._fleet = fleet
        self._url = url or fleet.ingress
        self._requests = requests
        self._seed = seed
        self._tokens_max = tokens_max
        self.exchanges: list[Exchange] = []

    @property
    def endings(self) -> Counter[str]:
        return Counter(exchange.ending for exchange in self.exchanges)

    async def run(self, tick: Callable[[], None] = lambda: None) -> None:
        started = time.monotonic()
        async with self._session() as session, asyncio.TaskGroup() as clients:
            for number, request in enumerate(self._requests):
                streamed = bool(number % WHOLE_EVERY)
                body = self._body(request, streamed=streamed)
                await asyncio.sleep(max(0.0, started + request.arrival_s / self._fleet.speed - time.monotonic()))
                clients.create_task(self._one(session, body, self._output_tokens(request), streamed=streamed))
                tick()
            while any(exchange.ending == "waits" for exchange in self.exchanges):
                await asyncio.sleep(0.1)
                tick()

    def first_answer_after(self, moment: float) -> EngineSeconds | None:
        """Wall seconds from a moment to the first answer to a later request."""
        answered = [e.first_byte_at for e in self.exchanges if e.asked_at >= moment and e.first_byte_at is not None]
        return min(answered) - moment if answered else None

    def usual_ttft(self, injections: Sequence[float]) -> EngineSeconds | None:
        """P90 of wall seconds to the first bytes of streams, without those just after these moments; None with too few."""
        struck = [(at, at + STRUCK_SECONDS) for at in injections]
        calm = (e for e in self.exchanges if not any(begin <= e.asked_at < end for begin, end in struck))
        return _ttft_p90([e for e in calm if e.ending == "completed"])

    def normal_after(self, moment: float, end: float, *, usual: EngineSeconds | None) -> EngineSeconds | None:
        """Wall seconds from a moment until service was normal; None if not by `end`."""
        asked = sorted((e for e in self.exchanges if moment <= e.asked_at < end), key=lambda e: e.asked_at)
        for first in range(len(asked) - NORMAL_IN_A_ROW + 1):
            row = asked[first : first + NORMAL_IN_A_ROW]
            ttft = _ttft_p90(row)
            whole = all(exchange.ending == "completed" for exchange in row)
            if (
                whole
                and ttft is not None
                and usual is not None
                and ttft <= NORMAL_FACTOR * usual + NORMAL_SLACK_SECONDS
            ):
                return row[0].asked_at - moment
        return None

    def cut_between(self, begin: float, end: float) -> int:
        return sum(e.streamed and e.status == HTTPStatus.OK and e.ending in CUT for e in self.between(begin, end))

    def between(self, begin: float, end: float) -> list[Exchange]:
        return [e for e in self.exchanges if begin <= (e.ended_at or 0.0) < end]

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS)
        return aiohttp.ClientSession(
            self._url, connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS_MAX)
        )

    def _output_tokens(self, request: WorkloadRequest) -> int:
        return max(1, min(request.output_tokens, self._tokens_max))

    def _body(self, request: WorkloadRequest, *, streamed: bool) -> bytes:
        content: dict[str, Any] = {
            "model": self._fleet.model,
            "prompt": prompt_token_ids(request, vocab_size=VOCAB_SIZE, seed=self._seed),
            "max_tokens": self._output_tokens(request),
            "ignore_eos": True,
            "temperature": 0,
        }
        if streamed:
            content |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(content)

    async def _one(self, session: aiohttp.ClientSession, body: bytes, tokens: Tokens, *, streamed: bool) -> Ending:
        number = len(self.exchanges)
        exchange = Exchange(request=f"{PREFIX}{self._seed}-{number}", streamed=streamed, asked_at=time.monotonic())
        self.exchanges.append(exchange)
        headers = {"content-type": "application/json", "x-request-id": exchange.request, **self.objectives}
        try:
            async with await self._connected(session, body, headers) as response:
                exchange.status = response.status
                exchange.request = response.headers.get(OWN_ID_HEADER, exchange.request)
                exchange.instance = response.headers.get("x-pointsman-instance", "")
                exchange.knowledge = response.headers.get("x-pointsman-knowledge", "")
                parts = []
                async for part in response.content.iter_any():
                    exchange.first_byte_at = exchange.first_byte_at or time.monotonic()
                    parts.append(part)
            ending, exchange.detail = judged(exchange, b"".join(parts), tokens)
        except TimeoutError:
            ending, exchange.detail = "lost", f"no answer within {ANSWER_SECONDS_MAX:g} s"
        except (aiohttp.ClientError, OSError) as error:
            ending, exchange.detail = "dropped", type(error).__name__
        exchange.ended_at = time.monotonic()
        exchange.ending = ending
        return ending

    async def _connected(
        self, session: aiohttp.ClientSession, body: bytes, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        deadline = time.monotonic() + CONNECT_SECONDS_MAX
        while True:
            try:
                return await session.post("/v1/completions", data=body, headers=headers)
            except aiohttp.ClientConnectorError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(CONNECT_AGAIN_SECONDS)


def _ttft_p90(exchanges: Sequence[Exchange]) -> EngineSeconds | None:
    waited = first_byte_waits(exchanges)
    return percentile(waited, 90) if len(waited) >= NORMAL_IN_A_ROW // 2 else None


def first_byte_waits(exchanges: Sequence[Exchange]) -> list[EngineSeconds]:
    """Wall seconds to the first bytes of streams."""
    return [e.first_byte_at - e.asked_at for e in exchanges if e.streamed and e.first_byte_at is not None]


def unserved(exchange: Exchange) -> bool:
    return exchange.ending != "completed" and exchange.status != HTTPStatus.TOO_MANY_REQUESTS


def judged(exchange: Exchange, answer: bytes, tokens: int) -> tuple[Ending, str]:
    """The result of a whole HTTP answer, and its detail."""
    if exchange.status != HTTPStatus.OK:
        return _judged_refusal(exchange.status, answer)
    if not exchange.streamed:
        return _judged_count(decoded_object(answer), tokens)
    events = list(events_in(answer))
    contents = [decoded_object(event) for event in events if event != DONE]
    if contents and "error" in contents[-1]:
        return "cut", _code(contents[-1])
    if events.count(DONE) != 1 or events[-1] != DONE:
        return "lost", f"the stream ended with {events.count(DONE)} end marks and no error"
    return _judged_count(next((content for content in reversed(contents) if content.get("usage")), {}), tokens)


def _judged_refusal(status: int, answer: bytes) -> tuple[Ending, str]:
    content = decoded_object(answer)
    if "error" not in content or status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return "lost", f"status {status}: {answer[:120]!r}"
    refused = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return "refused" if refused else "failed", f"{status} {_code(content)}"


def _judged_count(content: dict[str, Any], tokens: int) -> tuple[Ending, str]:
    counted = (content.get("usage") or {}).get("completion_tokens")
    if counted != tokens:
        return "lost", f"{counted} tokens came of {tokens}"
    return "completed", ""


def _code(content: dict[str, Any]) -> str:
    error = content["error"]
    return str(error.get("code") or error.get("type")) if isinstance(error, dict) else str(error)
