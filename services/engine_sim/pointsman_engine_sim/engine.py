"""Drives the engine model in real time. A late step does not delay the next one's schedule."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import structlog

from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, RequestId, Tokens, WallSeconds, little_endian
from pointsman.simulation.block_cache import CacheChange, PromptIdentity
from pointsman.simulation.engine_model import EngineModel
from pointsman.simulation.engine_types import StepResult, TokenPrompt
from pointsman_engine_sim.wording import Passage, Wording

log = structlog.get_logger()

OVERDUE_STEPS_MAX = 16
LATE_SECONDS_MAX = 1.0
"""Delay, wall seconds, from which the machine is reported as too slow for the speed."""
LATE_WARNING_SECONDS: WallSeconds = WallSeconds(10.0)
CLOCK_RETRY_SECONDS: WallSeconds = WallSeconds(0.001)


class RequestAbortedError(Exception):
    pass


class EngineStoppedError(Exception):
    pass


class Publisher(Protocol):
    def publish(self, changes: Iterable[CacheChange]) -> None: ...


class Timings(Protocol):
    def first_token(self, seconds: EngineSeconds) -> None: ...

    def finished(self, seconds: EngineSeconds) -> None: ...


@dataclass(eq=False, slots=True)
class Generation:
    request: RequestId
    passage: Passage
    submitted_at: EngineSeconds
    held: bool = False
    tokens: Tokens = 0
    cached_tokens: Tokens = 0
    finished: bool = False
    _failure: Exception | None = None
    _wanted: Tokens = 0
    _waiter: asyncio.Future[None] | None = None

    async def reached(self, tokens: Tokens) -> None:
        """Wait for so many tokens, or all. Raises RequestAbortedError, EngineStoppedError."""
        while self.tokens < tokens and not self.finished:
            if self._failure is not None:
                raise self._failure
            self._wanted = tokens
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def add(self, tokens: Tokens) -> None:
        self.tokens += tokens
        if self.tokens >= self._wanted:
            self._wake()

    def finish(self) -> None:
        self.finished = True
        self._wake()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LiveEngine:
    """Answers over the time of a clock; the simulator's engines answer in events."""

    def __init__(
        self,
        model: EngineModel,
        *,
        clock: Clock,
        wording: Wording,
        publisher: Publisher | None,
        timings: Timings,
    ) -> None:
        self._model = model
        self._clock = clock
        self._wording = wording
        self._publisher = publisher
        self._timings = timings
        self._generations: dict[RequestId, Generation] = {}
        self._submitted = 0
        self._work = asyncio.Event()
        self._overdue_steps = 0
        self._warn_at = WallSeconds(0.0)
        self._slowdown = 1.0

    def slow_down(self, factor: float) -> None:
        self._slowdown = factor

    def submit(
        self,
        tokens: list[int],
        *,
        max_tokens: Tokens,
        identity: PromptIdentity,
        received: Tokens = 0,
        held: bool = False,
    ) -> Generation:
        """Raises RequestTooLongError or ValueError, see `EngineModel.submit`."""
        self._submitted += 1
        now = self._clock.now()
        passage = self._wording.passage(prompt_hash(tokens))
        generation = Generation(RequestId(str(self._submitted)), passage, submitted_at=now, held=held)
        prompt = TokenPrompt(tokens, generation.passage.ids, identity)
        self._model.submit(generation.request, prompt, max_tokens=max_tokens, now=now, received=received, held=held)
        self._generations[generation.request] = generation
        self._work.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Its waiters get RequestAbortedError. Idempotent."""
        if self._generations.pop(generation.request, None) is not None:
            self._model.abort(generation.request, self._clock.now())
            generation.fail(RequestAbortedError())

    def cached_tokens(self, tokens: list[int], identity: PromptIdentity) -> Tokens:
        return self._model.cached_tokens(TokenPrompt(tokens, lambda _start, _stop: [], identity))

    def release_kv(self, request: RequestId) -> bool:
        """Free the blocks held for a request; see `EngineModel.submit`."""
        return self._model.release_kv(request)

    def reset_prefix_cache(self) -> bool:
        """Returns False, and drops nothing, while requests run."""
        done = self._model.reset_prefix_cache()
        if done and self._publisher is not None:
            self._publisher.publish(self._model.take_changes())
        return done

    def forget_cache(self) -> bool:
        """As `reset_prefix_cache`, and no KV event says so: a fault."""
        done = self._model.reset_prefix_cache()
        if done:
            self._model.take_changes()
        return done

    def stop(self) -> None:
        """Fail all requests with EngineStoppedError."""
        for generation in self._generations.values():
            self._model.abort(generation.request, self._clock.now())
            generation.fail(EngineStoppedError("the engine is shutting down"))
        self._generations.clear()

    async def run(self) -> None:
        at = self._clock.now()
        while True:
            step = self._model.begin_step(at)
            if step is None:
                at = await self._next_arrival()
                continue
            at = step.started_at + self._slowdown * step.seconds
            await self._until(at)
            self._deliver(self._model.end_step(at))

    async def _next_arrival(self) -> EngineSeconds:
        if self._model.idle:
            self._work.clear()
            await self._work.wait()
        else:
            await self._clock.sleep_wall(CLOCK_RETRY_SECONDS)
        return self._clock.now()

    async def _until(self, at: EngineSeconds) -> None:
        early = at - self._clock.now()
        if early > 0:
            self._overdue_steps = 0
            await self._clock.sleep(early)
            return
        self._overdue_steps += 1
        if self._overdue_steps % OVERDUE_STEPS_MAX == 0:
            self._warn_when_late(-early / self._clock.speed)
            await self._clock.sleep_wall(WallSeconds(0))

    def _warn_when_late(self, seconds: EngineSeconds) -> None:
        if seconds > LATE_SECONDS_MAX and self._clock.wall() >= self._warn_at:
            self._warn_at = self._clock.wall() + LATE_WARNING_SECONDS
            log.warning("engine_late", wall_seconds=round(seconds, 2), hint="this machine is too slow for the speed")

    def _deliver(self, result: StepResult) -> None:
        generations = self._generations
        for request in result.decoded:
            if (generation := generations.get(request)) is not None:
                generation.add(result.tokens_each)
        for prefilled in result.first_tokens:
            generation = generations[prefilled.request]
            generation.cached_tokens = prefilled.cached_tokens
            generation.add(1)
            self._timings.first_token(result.ended_at - generation.submitted_at)
        for request in result.finished:
            generation = generations.pop(request)
            generation.finish()
            self._timings.finished(result.ended_at - generation.submitted_at)
        if result.changes and self._publisher is not None:
            self._publisher.publish(result.changes)


def prompt_hash(tokens: list[int]) -> int:
    return int.from_bytes(blake2b(little_endian("I", tokens), digest_size=8).digest(), "little")
