"""Answers `cmd.overlap`: how much of a prompt each instance holds, and how far that is known. Each scheduler that has read
the log serves it, whether it leads or follows; NATS sends a request to one of them. Its work is bounded by a share of the
process's time, measured as CPU time, so that no decision waits for it; beyond that it refuses. Refusals and what NATS
delivers cost time too: in a flood it leaves the subject for a while, and NATS tells requesters that nobody answers."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import structlog

from pointsman.contracts.block_keys import KeyChain, unpack_keys
from pointsman.contracts.cache_salts import CacheSalts
from pointsman.contracts.codec import UndecodableError, decode_command, encode, unreadable
from pointsman.contracts.overlap import (
    OVERLAP_BYTES_MAX,
    InstanceOverlap,
    OverlapAnswered,
    OverlapPrompt,
    OverlapRefusal,
    OverlapRefused,
    OverlapRequest,
)
from pointsman.contracts.subjects import command_subject
from pointsman.ports import Clock, Commands, EventLog, LogUnavailableError, Reply
from pointsman.primitives import BlockKey, InstanceId, PoolName, WallSeconds
from pointsman.primitives import Sequence as LogSequence
from pointsman.runtime import telemetry
from pointsman.state.state import State
from pointsman_scheduler.fleet_status import foreign_keys
from pointsman_scheduler.leader import Candidacy
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.work_budget import WorkBudget

log = structlog.get_logger()

QUEUE = "overlap"
LEADER_SHARE = 0.05
FOLLOWER_SHARE = 0.5
"""CPU seconds a second."""
BURST_SECONDS = 0.02
SLICE_TOKENS = 8_192
SLICE_PROMPTS = 8
"""Hashed and looked up without a break."""
END_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
PIECE_SECONDS = 0.0005
"""CPU seconds after which others go first."""
EXTENT_WALL_SECONDS_MAX = 0.25
ANSWERED = "answered"
REFUSALS_MAX = 200
REFUSALS_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""So many as too often within so much are a flood."""
FLOOD_WALL_SECONDS: WallSeconds = WallSeconds(1.0)


class Work:
    """CPU seconds that one request has taken of the event loop."""

    def __init__(self, clock: Clock, cpu: Callable[[], float]) -> None:
        self._clock = clock
        self._cpu = cpu
        self.seconds = 0.0
        self._paused_at = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = self._cpu()
        try:
            yield
        finally:
            self.seconds += self._cpu() - began

    async def pause(self) -> None:
        """Lets decisions go first, once a piece of work is done."""
        if self.seconds - self._paused_at >= PIECE_SECONDS:
            self._paused_at = self.seconds
            await self._clock.sleep_wall(WallSeconds(0.0))


class OverlapService:
    def __init__(
        self,
        *,
        replica: Replica,
        leader: Candidacy,
        event_log: EventLog,
        clock: Clock,
        pool: PoolName,
        name: str,
        secret: str,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`cpu`: CPU seconds of this thread."""
        self._cpu = cpu
        self._replica = replica
        self._leader = leader
        self._log = event_log
        self._clock = clock
        self._pool = pool
        self._name = name
        self._secret = secret.encode()
        self._salts = CacheSalts(self._secret, lambda tenant: replica.state.tenants.policy_of(tenant).cache_group)
        self._budget = WorkBudget(clock, burst=BURST_SECONDS)
        self._flooded = asyncio.Event()
        self._refusals = 0
        self._refusals_since = clock.wall()
        self._log_end: LogSequence = 0
        self._log_end_at: WallSeconds | None = None
        self._seconds = telemetry.OVERLAP_SECONDS.labels(pool)
        self._outcomes = {
            outcome: telemetry.OVERLAP_REQUESTS.labels(pool, outcome) for outcome in (ANSWERED, *OverlapRefusal)
        }

    async def serve(self, commands: Commands, end: LogSequence) -> None:
        """Runs without end, once the log is read up to `end`."""
        await self._replica.reached(end)
        while True:
            self._flooded.clear()
            async with commands.serve_payloads(command_subject(self._pool, "overlap"), self.answer, queue=QUEUE):
                await self._flooded.wait()
            log.warning("overlap_flooded", refusals_per_second=REFUSALS_MAX, pause_seconds=FLOOD_WALL_SECONDS)
            await self._clock.sleep_wall(FLOOD_WALL_SECONDS)

    async def answer(self, payload: bytes, reply: Reply) -> None:
        work = Work(self._clock, self._cpu)
        await self._clock.sleep_wall(WallSeconds(0.0))  # others that wait here would be answered without a break
        answer = self._refusal(payload) or await self._decoded_and_answered(payload, work)
        with work.timed():
            encoded = encode(answer)
        self._budget.spend(work.seconds)
        outcome = answer.reason if isinstance(answer, OverlapRefused) else ANSWERED
        self._outcomes[outcome].inc()
        self._seconds.observe(work.seconds)
        await reply(encoded)

    def _refusal(self, payload: bytes) -> OverlapRefused | None:
        """Before anything is made of the payload."""
        leads = self._leader.leading is not None
        share = LEADER_SHARE if leads else FOLLOWER_SHARE
        wait = self._budget.wait_seconds(share)
        if wait:
            self._note_refusal()
            who = "leads" if leads else "follows"
            detail = f"a scheduler that {who} gives lookups {share:.0%} of a core; ask again in {wait:.3f} s"
            return OverlapRefused(reason=OverlapRefusal.TOO_OFTEN, detail=detail, retry_after=wait)
        if len(payload) > OVERLAP_BYTES_MAX:
            detail = f"{len(payload)} bytes are more than {OVERLAP_BYTES_MAX}"
            return OverlapRefused(reason=OverlapRefusal.TOO_LARGE, detail=detail)
        return None

    def _note_refusal(self) -> None:
        now = self._clock.wall()
        if now - self._refusals_since >= REFUSALS_WALL_SECONDS:
            self._refusals_since, self._refusals = now, 0
        self._refusals += 1
        if self._refusals >= REFUSALS_MAX:
            self._refusals = 0
            self._flooded.set()

    async def _decoded_and_answered(self, payload: bytes, work: Work) -> OverlapAnswered | OverlapRefused:
        try:
            with work.timed():
                request = decode_command(payload)
        except UndecodableError as error:
            return OverlapRefused(reason=OverlapRefusal.INVALID, detail=unreadable(payload, error).detail)
        if not isinstance(request, OverlapRequest):
            detail = f"a {type(request).__name__} is no OverlapRequest"
            return OverlapRefused(reason=OverlapRefusal.INVALID, detail=detail)
        keys = [await self._keys(prompt, request, work) for prompt in request.prompts]
        await self._measure_log()
        state = self._replica.state
        as_of, held = state.sequence, list[dict[InstanceId, int]]()
        for start in range(0, len(keys), SLICE_PROMPTS):
            with work.timed():
                held += [held_blocks(state, prompt) for prompt in keys[start : start + SLICE_PROMPTS]]
            await work.pause()
        with work.timed():
            return self._answer(state, as_of, held)

    async def _keys(self, prompt: OverlapPrompt, request: OverlapRequest, work: Work) -> list[BlockKey]:
        if not prompt.token_ids:
            with work.timed():
                return unpack_keys(prompt.block_keys)
        state = self._replica.state
        salt = request.cache_salt
        if request.tenant:
            salt = self._salts.salt(self._salts.group(request.tenant), request.cache_salt)
        block_tokens = state.settings.block_tokens
        chain = KeyChain(secret=self._secret, model=state.fleet.model, block_tokens=block_tokens)
        parent, keys = chain.root(lora=request.adapter, cache_salt=salt), list[BlockKey]()
        step = max(1, SLICE_TOKENS // block_tokens) * block_tokens
        for start in range(0, len(prompt.token_ids), step):
            with work.timed():
                keys += chain.extend(keys[-1] if keys else parent, prompt.token_ids[start : start + step])
            await work.pause()
        return keys

    async def _measure_log(self) -> None:
        """Once a second at most; a log that does not answer leaves what was known."""
        now = self._clock.wall()
        if self._log_end_at is None or now - self._log_end_at >= END_WALL_SECONDS:
            self._log_end_at = now
            with suppress(LogUnavailableError, TimeoutError):
                async with asyncio.timeout(EXTENT_WALL_SECONDS_MAX):
                    self._log_end = (await self._log.extent()).end

    def _answer(self, state: State, as_of: LogSequence, held: Sequence[dict[InstanceId, int]]) -> OverlapAnswered:
        return OverlapAnswered(
            pool=self._pool,
            model=state.fleet.model,
            block_tokens=state.settings.block_tokens,
            scheduler=self._name,
            leading=self._leader.leading is not None,
            term=state.term,
            as_of=as_of,
            behind=max(0, self._log_end - as_of),
            age=max(0.0, self._clock.now() - state.last_at) / state.settings.speed,
            instances=overlaps(state, held),
        )


def held_blocks(state: State, keys: list[BlockKey]) -> dict[InstanceId, int]:
    """Leading blocks of a prompt that engines have told of or delivered; not those that a placed request will bring."""
    held = state.index.hits(keys)
    state.delivered.extend_hits(keys, held)
    return held


def overlaps(state: State, held: Sequence[dict[InstanceId, int]]) -> list[InstanceOverlap]:
    block_tokens = state.settings.block_tokens
    found = []
    for instance in state.fleet.instances:
        blocks = [prompt.get(instance.id, 0) for prompt in held]
        found.append(
            InstanceOverlap(
                instance=instance.id,
                url=instance.url,
                status=instance.status,
                knowledge=instance.knowledge,
                knowledge_reason=foreign_keys(instance, block_tokens) or instance.knowledge_reason,
                matched_blocks=blocks,
                matched_tokens=[count * block_tokens for count in blocks],
                role=instance.role,
                dp_rank=instance.dp_rank,
            )
        )
    return found
