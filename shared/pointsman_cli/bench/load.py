"""Sends a workload at its own times (open loop) and collects outcomes. Bodies are built ahead; send delay is measured."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
import msgspec

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation.workload import WorkloadRequest, prompt_token_ids
from pointsman_cli.bench.answer import StreamedAnswer, StreamError, error_code
from pointsman_cli.bench.report import Outcome

VOCAB_SIZE = 4000
BODIES_AHEAD_MAX = 256
PREPARING_SECONDS = 0.005
IDLE_CONNECTION_SECONDS = 2.0
"""Less than the keep-alive of servers, so that no connection is used while the server closes it."""
NO_ROOM_SECONDS = 0.005
GRACE_SECONDS_AFTER_STOP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    model: str
    speed: float
    seed: int
    slo_ttft_s: EngineSeconds | None = None
    """Sent as `x-slo-ttft-ms`; None: the fleet's own SLO holds."""
    api_key: str | None = None
    output_tokens_max: Tokens | None = None
    shrink: int = 1
    """Prompts take every n-th token and answers are n times shorter; shared prefixes stay shared."""
    in_flight_max: int = 1000
    request_seconds_max: float = 600.0


@dataclass(slots=True)
class Tally:
    """Results so far, read by the progress display during the load. `outcomes` in order of ending."""

    total: int
    sent: int = 0
    in_flight: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)

    def ended(self, outcome: Outcome, *, counted: bool) -> None:
        self.counts[outcome.ending] += 1
        if counted:
            self.outcomes.append(outcome)


@dataclass(frozen=True, slots=True)
class _Prepared:
    number: int
    due_s: float
    headers: Mapping[str, str]
    body: bytes


class LoadGenerator:
    """One run of a workload. Bounded by `in_flight_max`: at the bound the next request is sent late."""

    def __init__(
        self,
        target: Target,
        requests: Sequence[WorkloadRequest],
        *,
        warmup: int = 0,
    ) -> None:
        """The first `warmup` requests are sent but not counted."""
        self.tally = Tally(total=len(requests))
        self._target = target
        self._requests = requests
        self._warmup = warmup
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        self._stop.set()

    async def run(self, tick: Callable[[], None] = lambda: None) -> bool:
        """Sends everything and waits for all answers; False when stopped. Raises errors of the bench itself; server
        errors are outcomes."""
        in_flight: set[asyncio.Task[None]] = set()
        async with self._session() as session:
            try:
                await self._send_all(session, in_flight, tick)
                await self._wait_for_all(in_flight, tick)
            finally:
                for task in in_flight:
                    task.cancel()
                await asyncio.gather(*in_flight, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        return not self._stop.is_set()

    async def _send_all(
        self, session: aiohttp.ClientSession, in_flight: set[asyncio.Task[None]], tick: Callable[[], None]
    ) -> None:
        waiting: deque[_Prepared] = deque()
        coming = self._prepare()
        waiting.extend(prepared for _, prepared in zip(range(BODIES_AHEAD_MAX), coming, strict=False))
        start = time.monotonic()
        while waiting and not self._stop.is_set():
            tick()
            slack = start + waiting[0].due_s - time.monotonic()
            if slack > PREPARING_SECONDS and len(waiting) < BODIES_AHEAD_MAX and (more := next(coming, None)):
                waiting.append(more)
                await asyncio.sleep(0)
            elif slack > 0:
                await self._sleep(slack)
            elif len(in_flight) >= self._target.in_flight_max:
                await self._sleep(NO_ROOM_SECONDS)
            else:
                task = asyncio.create_task(self._ask(session, waiting.popleft(), start))
                in_flight.add(task)
                task.add_done_callback(lambda ended: self._ended(ended, in_flight))
                if not waiting and (more := next(coming, None)):
                    waiting.append(more)

    async def _wait_for_all(self, in_flight: set[asyncio.Task[None]], tick: Callable[[], None]) -> None:
        while in_flight and not self._stop.is_set():
            tick()
            await self._sleep(0.1)
        if in_flight:
            await asyncio.wait(in_flight, timeout=GRACE_SECONDS_AFTER_STOP)
        tick()

    def _ended(self, task: asyncio.Task[None], in_flight: set[asyncio.Task[None]]) -> None:
        in_flight.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
            self._stop.set()

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), min(seconds, 0.1))
        except TimeoutError:
            return

    def _prepare(self) -> Iterator[_Prepared]:
        target = self._target
        common = {"content-type": "application/json"}
        if target.api_key:
            common["authorization"] = f"Bearer {target.api_key}"
        if target.slo_ttft_s is not None:
            common["x-slo-ttft-ms"] = f"{target.slo_ttft_s * 1000:.0f}"
        for number, request in enumerate(self._requests):
            named = {"x-session-id": request.session, "x-llm-d-inference-fairness-id": request.tenant}
            yield _Prepared(
                number=number,
                due_s=request.arrival_s / self._target.speed,
                headers=common | {name: value for name, value in named.items() if value},
                body=self._body(request),
            )

    def _body(self, request: WorkloadRequest) -> bytes:
        target = self._target
        wanted = request.output_tokens // target.shrink
        output_tokens = max(1, min(wanted, target.output_tokens_max or wanted))
        prompt = prompt_token_ids(request, vocab_size=VOCAB_SIZE, seed=target.seed)
        return msgspec.json.encode(
            {
                "model": target.model,
                "prompt": prompt[:: target.shrink],
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    async def _ask(self, session: aiohttp.ClientSession, prepared: _Prepared, start: float) -> None:
        sent_at = time.monotonic()
        self.tally.sent += 1
        self.tally.in_flight += 1
        try:
            outcome = await _outcome(
                session, prepared, sent_at, late=sent_at - start - prepared.due_s, speed=self._target.speed
            )
            self.tally.ended(outcome, counted=prepared.number >= self._warmup)
        finally:
            self.tally.in_flight -= 1

    def _session(self) -> aiohttp.ClientSession:
        target = self._target
        return aiohttp.ClientSession(
            base_url=target.url.rstrip("/") + "/",
            connector=aiohttp.TCPConnector(limit=target.in_flight_max, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            timeout=aiohttp.ClientTimeout(total=target.request_seconds_max, sock_connect=10.0),
            auto_decompress=False,
            skip_auto_headers=("accept-encoding", "user-agent"),
        )


async def _outcome(
    session: aiohttp.ClientSession, prepared: _Prepared, sent_at: float, *, late: float, speed: float
) -> Outcome:
    late_s = max(0.0, late) * speed
    instance = ""
    try:
        async with session.post("v1/completions", data=prepared.body, headers=prepared.headers) as response:
            instance = response.headers.get("x-pointsman-instance", "")
            if response.status != HTTPStatus.OK:
                return Outcome(
                    ending="rejected" if response.status == HTTPStatus.TOO_MANY_REQUESTS else "failed",
                    late_s=late_s,
                    problem=f"HTTP {response.status} {error_code(await response.read())[:80]}".strip(),
                    instance=instance,
                )
            answer = StreamedAnswer()
            async for data in response.content.iter_any():
                answer.feed(data, time.monotonic())
            return _completed(answer, response.headers, sent_at, late_s=late_s, speed=speed)
    except StreamError as error:
        problem = f"stream: {error}"
    except TimeoutError:
        problem = "no answer in time"
    except (aiohttp.ClientError, OSError) as error:
        problem = f"connection: {type(error).__name__}"
    return Outcome(ending="failed", late_s=late_s, problem=problem, instance=instance)


def _completed(
    answer: StreamedAnswer, headers: Mapping[str, str], sent_at: float, *, late_s: EngineSeconds, speed: float
) -> Outcome:
    """Raises StreamError."""
    usage = answer.usage()
    if answer.first_data_at is None or answer.last_data_at is None:
        raise StreamError("the stream was empty")
    predicted = headers.get("x-pointsman-predicted-ttft-ms")
    upper = headers.get("x-pointsman-predicted-ttft-upper-ms")
    return Outcome(
        ending="completed",
        late_s=late_s,
        ttft_s=(answer.first_data_at - sent_at) * speed,
        e2e_s=(answer.last_data_at - sent_at) * speed,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        output_tokens=usage.get("completion_tokens", 0),
        predicted_ttft_s=float(predicted) / 1000 if predicted else None,
        predicted_ttft_upper_s=float(upper) / 1000 if upper else None,
        instance=headers.get("x-pointsman-instance", ""),
    )
