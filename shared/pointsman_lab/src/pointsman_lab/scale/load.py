"""Many instances and their ingress in one process, over real NATS. Requests are commands to the scheduler, without HTTP;
workers' code writes joins and cache events and tells reports (`instances`), and the ingress first tokens and ends. In: a
link to the pool; out: latencies of answers, and counts."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.commands import FollowRequests, RouteGranted, RouteRejected, RouteRequest, SentRequest
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.contracts.subjects import command_subject
from pointsman.ports import Clock, CommandTimeoutError, Link, NoResponderError
from pointsman.primitives import (
    EngineSeconds,
    InstanceId,
    PoolName,
    RequestId,
    SessionId,
    Tenant,
    Term,
    WallSeconds,
)
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_lab.scale.instances import FollowedInstance
from pointsman_lab.traffic import BLOCK_TOKENS, Conversations, Prompt, instance_names, random_keys

OUTPUT_TOKENS, TOKEN_SECONDS = 100, 0.03
SLO_TTFT: EngineSeconds = 5.0
ANSWER_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
RETRY_SECONDS = 0.05
FOLLOWED_AT_ONCE = 1_000
PROMPT_BLOCKS = 100
"""Of what fills the caches at first."""
SEED = 1
COST = PROFILES[DEFAULT_PROFILE].prefill_cost


@dataclass
class Answers:
    """`seconds`: from the command to its answer, of each granted request, with what it waits in a queue."""

    seconds: list[float] = field(default_factory=list)
    granted: int = 0
    rejected: int = 0
    failed: int = 0
    first_of_term: dict[Term, WallSeconds] = field(default_factory=dict)


class ScaleLoad:
    def __init__(self, link: Link, clock: Clock, pool: PoolName, *, instances: int, rate: float, blocks: int) -> None:
        """`blocks`: that each instance holds."""
        self._link, self._clock, self._pool = link, clock, pool
        self._chance = Random(SEED)
        self.rate = rate
        self._blocks = blocks
        self.instances = {
            name: FollowedInstance(name, number, blocks, link, clock)
            for number, name in enumerate(instance_names(instances))
        }
        self._conversations = Conversations(self._chance, int(4 * rate))
        self._numbers = count(1)
        self._waiting: dict[RequestId, None] = {}
        self._sent: dict[RequestId, InstanceId] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.answers = Answers()
        self.full = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled. Requests come once all caches are full."""
        async with asyncio.TaskGroup() as tasks:
            for number, instance in enumerate(self.instances.values()):
                tasks.create_task(instance.run(after=number / len(self.instances)))
            await self._fill()
            self.full.set()
            tasks.create_task(self._arrivals())
            tasks.create_task(self._follow())

    async def _fill(self) -> None:
        for instance in self.instances.values():
            await instance.settled()
            for _ in range(self._blocks // PROMPT_BLOCKS):
                instance.store(random_keys(self._chance, PROMPT_BLOCKS))
        for instance in self.instances.values():
            await instance.settled()

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._sent)

    async def _arrivals(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            at += self._chance.expovariate(self.rate)
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            task = asyncio.create_task(self._serve(self._conversations.next()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, prompt: Prompt) -> None:
        command = RouteRequest(
            request=RequestId(f"r-{next(self._numbers)}"), ingress="lab", arrived_at=self._clock.now(),
            tenant=Tenant(f"tenant-{prompt.tenant}"), keys=pack_keys(prompt.keys), prompt_tokens=prompt.tokens,
            max_output_tokens=OUTPUT_TOKENS, slo_ttft=SLO_TTFT, slo_tpot=0.1,
            session=SessionId(f"session-{prompt.session}"), followed=True,
        )  # fmt: skip
        began = self._clock.wall()
        self._waiting[command.request] = None
        try:
            answer = await self._answer_to(command)
        finally:
            del self._waiting[command.request]
        if not isinstance(answer, RouteGranted):
            self.answers.rejected += isinstance(answer, RouteRejected)
            self.answers.failed += answer is None
            return
        now = self._clock.wall()
        self.answers.granted += 1
        self.answers.seconds.append(float(now - began))
        self.answers.first_of_term.setdefault(answer.term, now)
        self._compute(command, prompt, self.instances[answer.instance])

    async def _answer_to(self, command: RouteRequest) -> object:
        """Repeats the command as an ingress does. None: nobody answers."""
        for _ in range(200):
            try:
                return await self._link.commands.request(
                    command_subject(self._pool, "route"), command, timeout=ANSWER_WALL_SECONDS
                )
            except CommandTimeoutError:
                continue
            except NoResponderError:
                await asyncio.sleep(RETRY_SECONDS)
        return None

    def _compute(self, command: RouteRequest, prompt: Prompt, instance: FollowedInstance) -> None:
        loop, now, engine = asyncio.get_running_loop(), self._clock.now(), instance.engine
        self._sent[command.request] = instance.name
        cached = instance.cached(prompt.keys) * BLOCK_TOKENS
        took = COST.seconds(prompt.tokens, cached) * self._chance.uniform(0.9, 1.1)
        engine.running += 1
        engine.free_at = max(engine.free_at, now) + took
        first_token_in = engine.free_at - now

        def first_token() -> None:
            at = self._clock.now()
            self._link.log.append_soon(
                PrefillFinished(
                    at=at, request=command.request, instance=instance.name, ttft=at - command.arrived_at, prefill=took
                )
            )
            instance.store(prompt.keys)

        def finish() -> None:
            at = self._clock.now()
            engine.running -= 1
            self._sent.pop(command.request, None)
            self._link.log.append_soon(
                RequestFinished(
                    at=at, request=command.request, instance=instance.name, e2e=at - command.arrived_at,
                    prompt_tokens=prompt.tokens, completion_tokens=OUTPUT_TOKENS, cached_tokens=cached, ttft=took,
                    tpot=TOKEN_SECONDS,
                )
            )  # fmt: skip

        loop.call_later(first_token_in, first_token)
        loop.call_later(first_token_in + OUTPUT_TOKENS * TOKEN_SECONDS, finish)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for command in self._followed():
                try:
                    await self._link.commands.request(
                        command_subject(self._pool, "follow"), command, timeout=ANSWER_WALL_SECONDS
                    )
                except (CommandTimeoutError, NoResponderError):
                    break  # the next one replaces it

    def _followed(self) -> Iterator[FollowRequests]:
        sent = [SentRequest(request=request, attempt=1, instance=instance) for request, instance in self._sent.items()]
        waiting = list(self._waiting)
        for start in range(0, max(len(sent), len(waiting)), FOLLOWED_AT_ONCE):
            end = start + FOLLOWED_AT_ONCE
            yield FollowRequests(requests=sent[start:end], waiting=waiting[start:end])
