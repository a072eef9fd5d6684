"""One engine in virtual time: continuous batching with chunked prefill over a block cache, and what each step costs.

The model has no clock and does no I/O. Whoever drives it asks `begin_step(now)`, lets the step's seconds pass in
whatever time it lives in, and calls `end_step(now)`: `pointsman-engine-sim` does so on the wall clock, the
discrete-event simulation in no time at all. Both get the same decisions from the same object.

Scheduling is vLLM's: what runs goes first, each decoding request with one token and then prefills in chunks, within
`max_num_batched_tokens`; then waiting requests first come first served, while a sequence and blocks for the whole
prompt are free. When decoding needs a block and there is none, the youngest running request gives all of its own
back and computes again later (preemption). Generation ends at `max_tokens` and never before.

A step takes `overhead + max(compute, memory)`: compute grows with all tokens of the step and with attention
(`q^2 - p^2` for a chunk from p to q), memory with the weights, read once, and the KV cache of what decodes.

Decoding is not simulated token by token. All decoding requests advance together, so the model counts *ticks*, and a
request remembers at which tick it began; it is touched again only when it fills a block or ends. A run of pure decode
steps can be *fused* into one `Step`, which changes nothing but the number of calls; a request that is submitted or
aborted meanwhile cuts the run at the end of the step that is under way (`step` then shows the new end).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush

from pointsman.primitives import RequestId, Seconds, Tokens
from pointsman.simulation.block_cache import (
    ANYONE,
    EVICTION_ORDERS,
    BlockCache,
    BlockChain,
    BlockHash,
    BlockHasher,
    CacheChange,
    OpaqueChain,
    PromptIdentity,
    TokenChain,
    TokenSource,
)
from pointsman.state.engine_profiles import EngineProfile


class RequestTooLongError(ValueError):
    """The request would not fit the cache even if it were alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine is set up; names and defaults as vLLM's. `num_gpu_blocks` 0 means what the profile's memory holds."""

    block_size: Tokens = 64
    num_gpu_blocks: int = 0
    max_num_batched_tokens: Tokens = 8192
    max_num_seqs: int = 256
    eviction: str = "lru"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_gpu_blocks < 0 or self.max_num_seqs < 1:
            msg = "block_size and max_num_seqs must be at least 1, num_gpu_blocks at least 0"
            raise ValueError(msg)
        if self.max_num_batched_tokens < self.max_num_seqs:
            msg = f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs})"
            raise ValueError(msg)
        if self.eviction not in EVICTION_ORDERS:
            msg = f"no eviction policy {self.eviction!r}; there are {', '.join(EVICTION_ORDERS)}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, and what will be generated after it."""

    tokens: Sequence[int]
    generated: TokenSource
    identity: PromptIdentity = ANYONE


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt of `length` tokens as the hashes of its whole blocks."""

    length: Tokens
    hashes: Sequence[BlockHash]


Prompt = TokenPrompt | HashedPrompt


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine is computing: `count` forward passes, fused into one where it is more than 1."""

    started_at: Seconds
    seconds: Seconds
    count: int
    prefill_tokens: Tokens
    decoding: int

    @property
    def ends_at(self) -> Seconds:
        return self.started_at + self.seconds


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The request has its first token. `cached_tokens` of its prompt came from the cache."""

    request: RequestId
    cached_tokens: Tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: `tokens_each` new tokens for each of `decoded`, one for each of `first_tokens`.

    `finished` have all their tokens and are gone. `changes` are the cache's since the last result.
    """

    ended_at: Seconds
    tokens_each: int
    decoded: list[RequestId]
    first_tokens: list[PrefillEnded]
    finished: list[RequestId]
    changes: list[CacheChange]


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Load now, and totals since the start, as vLLM's metrics count them."""

    waiting: int
    running: int
    kv_usage: float
    prefix_cache_queries: Tokens
    prefix_cache_hits: Tokens
    prompt_tokens: Tokens
    generation_tokens: Tokens
    preemptions: int


class _Phase(Enum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    ENDED = 3


class _Sequence:
    """One request inside the engine.

    `target` tokens must be computed before the next one can be generated. While it decodes, tokens computed and
    generated follow from the tick at which it began (`since_tick`) and `target`.
    """

    __slots__ = (
        "admission", "arrived_at", "blocks", "cached_tokens", "chain", "computed", "full", "generated", "held", "id",
        "max_tokens", "phase", "prompt_length", "received", "since_tick", "target",
    )  # fmt: skip

    def __init__(self, request: RequestId, chain: BlockChain, prompt_length: Tokens, max_tokens: Tokens, now: Seconds):
        self.id = request
        self.chain = chain
        self.prompt_length = prompt_length
        self.max_tokens = max_tokens
        self.arrived_at = now
        self.phase = _Phase.WAITING
        self.admission = 0
        self.target = prompt_length
        self.computed = 0
        self.generated = 0
        self.cached_tokens = -1
        self.blocks = 0
        self.full = 0
        self.since_tick = 0
        self.received = 0
        self.held = False


class EngineModel:
    """The engine. Not thread-safe; deterministic: equal calls give equal answers."""

    def __init__(self, profile: EngineProfile, settings: EngineSettings | None = None) -> None:
        settings = settings or EngineSettings()
        self.settings = settings
        self.profile = profile
        self.cache = BlockCache(
            blocks_max=settings.num_gpu_blocks or profile.kv_capacity_tokens // settings.block_size,
            order=EVICTION_ORDERS[settings.eviction](),
        )
        self._block_size = settings.block_size
        self._hasher = BlockHasher(block_tokens=settings.block_size, seed=settings.seed)
        self._cost = _StepCost(profile)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        """By admission, so that the last one is the youngest."""
        self._prefilling: list[_Sequence] = []
        self._decoding: dict[int, _Sequence] = {}
        self._context_tokens = 0
        self._tick = 0
        self._block_ends: list[tuple[int, int]] = []
        self._endings: list[tuple[int, int]] = []
        """Heaps of (tick, admission): when a decoding request fills its block, and when it has all its tokens."""
        self._growing: list[_Sequence] = []
        """Decoding requests whose next token needs a new block."""
        self._step: Step | None = None
        self._step_context = 0
        self._step_ticks = 0
        """Steps of the one under way that are taken in already."""
        self._chunk_tokens = 0
        self._chunk_squares = 0
        self._preempted = False
        self._kept: dict[RequestId, list[BlockHash]] = {}
        """Blocks of requests that ended here and are to be fetched by another engine."""
        self._submitted = self._admitted = 0
        self._queries = self._hits = self._prompt_tokens = self._generated = self._preemptions = 0

    # What requests do

    def submit(
        self,
        request: RequestId,
        prompt: Prompt,
        *,
        max_tokens: Tokens,
        now: Seconds,
        received: Tokens = 0,
        held: bool = False,
    ) -> None:
        """Queue a request; it can be scheduled from the next step that begins at or after `now`.

        `received`: leading tokens of the prompt whose KV cache came from another engine; they are not computed, unless
        the request is preempted. `held`: keep the prompt's whole blocks after its end, until `release_kv`.

        Raises RequestTooLongError when it would not even fit alone, ValueError for an empty prompt, a `max_tokens`
        below 1, a known id, or hashes that do not cover the prompt's whole blocks.
        """
        length = prompt.length if isinstance(prompt, HashedPrompt) else len(prompt.tokens)
        self._check(request, length, max_tokens)
        self._submitted += 1
        sequence = _Sequence(request, self._chain(prompt), length, max_tokens, now)
        sequence.received, sequence.held = received, held
        self._sequences[request] = sequence
        self._waiting.append(sequence)
        self._cut_step(now)

    def abort(self, request: RequestId, now: Seconds) -> bool:
        """Forget a request and free its blocks at once. False when it is not here (any more)."""
        sequence = self._sequences.get(request)
        if sequence is None:
            return False
        self._cut_step(now)
        self._take_in_whole_steps()
        if sequence.phase is _Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)
        self._end(sequence)
        return True

    def release_kv(self, request: RequestId) -> bool:
        """Give back what was kept of a request after its end. False where nothing is."""
        blocks = self._kept.pop(request, None)
        if blocks is None:
            return False
        self.cache.release(blocks, private=0)
        return True

    def cached_tokens(self, prompt: Prompt) -> Tokens:
        """How many of a prompt's tokens are in the cache now."""
        hashes = self._chain(prompt).hashes
        return self.cache.hit(hashes, blocks_max=len(hashes)) * self._block_size

    def reset_prefix_cache(self) -> bool:
        """Drop everything cached. False, and nothing happened, while a request holds blocks."""
        return self.cache.reset()

    # What the driver does

    @property
    def step(self) -> Step | None:
        """The step that is under way."""
        return self._step

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._sequences

    def begin_step(self, now: Seconds, *, max_fused_steps: int = 1) -> Step | None:
        """Schedule the next step, or None when there is nothing to compute at `now`.

        Up to `max_fused_steps` steps become one where nothing can happen between them but decoding.
        """
        assert self._step is None, "a step is under way: end it first"
        self._chunk_tokens = self._chunk_squares = 0
        self._preempted = False
        self._grow_decoding()
        self._continue_prefills()
        if not self._preempted:
            self._admit(now)
        decoding = len(self._decoding)
        if not decoding and not self._chunk_tokens:
            return None
        count = self._steps_to_fuse(max_fused_steps)
        if count > 1:
            count, seconds = self._cost.decode_run(decoding, self._context_tokens, count)
        else:
            seconds = self._cost.step(self._chunk_tokens, self._chunk_squares, decoding, self._context_tokens)
        self._step_context = self._context_tokens
        self._step_ticks = 0
        self._step = Step(now, seconds, count, self._chunk_tokens, decoding)
        return self._step

    def end_step(self, now: Seconds) -> StepResult:
        """Take in what the step under way has computed; `now` is when it ended."""
        step = self._step
        assert step is not None, "no step is under way"
        self._step = None
        decoded = [sequence.id for sequence in self._decoding.values()]
        self._advance(step.count - self._step_ticks)
        finished = self._take_finished()
        first_tokens = self._take_prefilled(decoded, finished)
        return StepResult(now, step.count, decoded, first_tokens, finished, self.cache.take_changes())

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(
            waiting=len(self._waiting),
            running=len(self._running),
            kv_usage=self.cache.blocks_held / self.cache.blocks_max,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            preemptions=self._preemptions,
        )

    # Beginning a step

    def _grow_decoding(self) -> None:
        """A new block for each request that needs one for its next token, oldest first."""
        growing, self._growing = self._growing, []
        for sequence in sorted(growing, key=_by_admission):
            if sequence.admission in self._decoding:
                self._allocate(sequence, 1)

    def _continue_prefills(self) -> None:
        for sequence in tuple(self._prefilling):
            if sequence.phase is _Phase.PREFILL and self._budget > 0:
                self._schedule_chunk(sequence)

    def _admit(self, now: Seconds) -> None:
        """First come, first served, while a sequence, tokens and blocks for the whole prompt are free."""
        while self._waiting and self._budget > 0 and len(self._running) < self.settings.max_num_seqs:
            sequence = self._waiting[0]
            if sequence.arrived_at > now:
                return
            hashes = self._cached_prefix(sequence)
            if self._blocks_for(sequence.target) - len(hashes) > self.cache.free_beside(hashes):
                return
            self._waiting.popleft()
            self._start(sequence, hashes)
            self._schedule_chunk(sequence)

    def _cached_prefix(self, sequence: _Sequence) -> Sequence[BlockHash]:
        """Hashes that hit. At least one token is always computed, since its output is what is wanted."""
        blocks_max = (sequence.target - 1) // self._block_size
        sequence.chain.extend_to(blocks_max)
        hashes = sequence.chain.hashes
        return hashes[: self.cache.hit(hashes, blocks_max=blocks_max)]

    def _start(self, sequence: _Sequence, hashes: Sequence[BlockHash]) -> None:
        self.cache.hold(hashes)
        self._admitted += 1
        sequence.admission = self._admitted
        sequence.phase = _Phase.PREFILL
        sequence.blocks = sequence.full = len(hashes)
        sequence.computed = local = len(hashes) * self._block_size
        if sequence.received > local:
            sequence.computed = min(sequence.received, sequence.target - 1)
        self._running[sequence.admission] = sequence
        self._prefilling.append(sequence)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = local
            self._queries += sequence.prompt_length
            self._hits += local

    def _schedule_chunk(self, sequence: _Sequence) -> None:
        begin = sequence.computed
        end = begin + min(sequence.target - begin, self._budget)
        if not self._allocate(sequence, self._blocks_for(end) - sequence.blocks):
            return
        self._chunk_tokens += end - begin
        self._chunk_squares += end * end - begin * begin
        sequence.computed = end
        self._fill_blocks(sequence, end // self._block_size)

    @property
    def _budget(self) -> Tokens:
        return self.settings.max_num_batched_tokens - len(self._decoding) - self._chunk_tokens

    def _allocate(self, sequence: _Sequence, blocks: int) -> bool:
        """Blocks for a running request, taken from younger ones if need be. False when it had to give way itself."""
        while not self.cache.allocate(blocks):
            youngest = self._running[next(reversed(self._running))]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += blocks
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        """Back to the head of the queue, to compute everything again, what it generated included."""
        self._leave(sequence)
        sequence.phase = _Phase.WAITING
        sequence.target = sequence.prompt_length + sequence.generated
        sequence.computed = sequence.received = 0
        self._waiting.appendleft(sequence)
        self._preempted = True
        self._preemptions += 1

    def _steps_to_fuse(self, count_max: int) -> int:
        """How many steps can pass in which decoding is all that happens, and blocks suffice for sure."""
        if count_max <= 1 or self._chunk_tokens or self._preempted:
            return 1
        if self._waiting and len(self._running) < self.settings.max_num_seqs:
            return 1
        count = min(count_max, self._next_ending() - self._tick)
        rounds = self.cache.blocks_free // len(self._decoding)
        return max(1, min(count, rounds * self._block_size))

    def _cut_step(self, now: Seconds) -> None:
        """End a fused run with the step that is under way at `now`."""
        step = self._step
        if step is None or step.count == 1 or now >= step.ends_at:
            return
        low, high = 1, step.count
        while low < high:
            middle = (low + high) // 2
            if step.started_at + self._cost.decode_steps(step.decoding, self._step_context, middle) > now:
                high = middle
            else:
                low = middle + 1
        seconds = self._cost.decode_steps(step.decoding, self._step_context, low)
        self._step = replace(step, count=low, seconds=seconds)

    def _take_in_whole_steps(self) -> None:
        """Bring everything to where it is when a fused run's last step is under way."""
        if self._step is None or self._step.count - self._step_ticks <= 1:
            return
        self._advance(self._step.count - 1 - self._step_ticks)
        self._grow_decoding()
        self._step_ticks = self._step.count - 1

    # Ending a step

    def _advance(self, ticks: int) -> None:
        """All decoding requests compute `ticks` more tokens; those that fill a block on the way get the next one."""
        end = self._tick + ticks
        self._context_tokens += ticks * len(self._decoding)
        self._generated += ticks * len(self._decoding)
        while self._block_ends and self._block_ends[0][0] <= end:
            tick = self._block_ends[0][0]
            self._grow_decoding()
            self._fill_at(tick)
        if self._growing and self._tick < end:
            self._grow_decoding()
        self._tick = end

    def _fill_at(self, tick: int) -> None:
        self._tick = tick
        while self._block_ends and self._block_ends[0][0] == tick:
            _, admission = heappop(self._block_ends)
            sequence = self._decoding.get(admission)
            if sequence is None:
                continue
            self._fill_blocks(sequence, (sequence.target + tick - sequence.since_tick) // self._block_size)
            self._growing.append(sequence)
            heappush(self._block_ends, (tick + self._block_size, admission))

    def _take_finished(self) -> list[RequestId]:
        finished = []
        while self._endings and self._next_ending() <= self._tick:
            _, admission = heappop(self._endings)
            sequence = self._decoding[admission]
            self._finish(sequence)
            finished.append(sequence.id)
        return finished

    def _next_ending(self) -> int:
        """The tick at which the first decoding request has all its tokens. There is one that decodes."""
        while self._endings and self._endings[0][1] not in self._decoding:
            heappop(self._endings)
        return self._endings[0][0] if self._endings else self._tick + 1

    def _take_prefilled(self, decoded: list[RequestId], finished: list[RequestId]) -> list[PrefillEnded]:
        """Requests whose prefill is complete have one more token: their first, unless they were preempted."""
        first_tokens = []
        prefilled = [sequence for sequence in self._prefilling if sequence.computed == sequence.target]
        for sequence in prefilled:
            self._prefilling.remove(sequence)
            self._generated += 1
            sequence.generated += 1
            if sequence.generated == 1:
                self._prompt_tokens += sequence.prompt_length
                first_tokens.append(PrefillEnded(sequence.id, sequence.cached_tokens))
            else:
                decoded.append(sequence.id)
            if sequence.generated == sequence.max_tokens:
                self._finish(sequence)
                finished.append(sequence.id)
            else:
                self._start_decoding(sequence)
        return first_tokens

    def _start_decoding(self, sequence: _Sequence) -> None:
        sequence.phase = _Phase.DECODE
        sequence.since_tick = self._tick
        self._decoding[sequence.admission] = sequence
        self._context_tokens += sequence.target
        left_in_block = -sequence.target % self._block_size
        if not left_in_block:
            self._growing.append(sequence)
        heappush(self._block_ends, (self._tick + (left_in_block or self._block_size), sequence.admission))
        heappush(self._endings, (self._tick + sequence.max_tokens - sequence.generated, sequence.admission))

    # Common to both

    def _fill_blocks(self, sequence: _Sequence, full: int) -> None:
        sequence.chain.extend_to(full)
        self.cache.fill(sequence.chain, sequence.full, full)
        sequence.full = full

    def _leave(self, sequence: _Sequence) -> None:
        """Stop running: give all blocks back."""
        del self._running[sequence.admission]
        if sequence.phase is _Phase.DECODE:
            ticks = self._tick - sequence.since_tick
            sequence.generated += ticks
            self._context_tokens -= sequence.target + ticks
            del self._decoding[sequence.admission]
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.cache.release(sequence.chain.hashes[: sequence.full], private=sequence.blocks - sequence.full)
        sequence.blocks = sequence.full = 0

    def _finish(self, sequence: _Sequence) -> None:
        """All its tokens are there."""
        if sequence.held:
            kept = self._kept[sequence.id] = sequence.chain.hashes[: sequence.full]
            self.cache.hold(kept)
        self._leave(sequence)
        self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        sequence.phase = _Phase.ENDED
        del self._sequences[sequence.id]

    def _blocks_for(self, tokens: Tokens) -> int:
        return -(-tokens // self._block_size)

    def _chain(self, prompt: Prompt) -> BlockChain:
        if isinstance(prompt, HashedPrompt):
            whole_blocks = prompt.length // self._block_size
            if len(prompt.hashes) < whole_blocks:
                msg = f"a prompt of {prompt.length} tokens has {whole_blocks} whole blocks, not {len(prompt.hashes)}"
                raise ValueError(msg)
            return OpaqueChain(prompt.hashes[:whole_blocks], unique=self._unique)
        return TokenChain(prompt.tokens, generated=prompt.generated, hasher=self._hasher, identity=prompt.identity)

    @property
    def _unique(self) -> int:
        return self.settings.seed << 40 | self._submitted

    def _check(self, request: RequestId, prompt_length: Tokens, max_tokens: Tokens) -> None:
        if prompt_length < 1 or max_tokens < 1:
            msg = f"a request needs a prompt and at least one token to generate, not {prompt_length} and {max_tokens}"
            raise ValueError(msg)
        if request in self._sequences:
            msg = f"request {request} is here already"
            raise ValueError(msg)
        blocks = self._blocks_for(prompt_length + max_tokens - 1)
        if blocks > self.cache.blocks_max:
            msg = f"{prompt_length} + {max_tokens} tokens need {blocks} blocks; the cache has {self.cache.blocks_max}"
            raise RequestTooLongError(msg)


class _StepCost:
    """The roofline: seconds of one step, and of a run of decode steps in closed form."""

    def __init__(self, profile: EngineProfile) -> None:
        cost = profile.prefill_cost
        self._overhead_s = profile.step_overhead_s
        self._token_s = cost.per_token_s
        self._square_s = cost.per_token_squared_s
        self._weights_s = profile.weight_bytes / profile.memory_bytes_per_s
        self._kv_token_s = profile.kv_bytes_per_token / profile.memory_bytes_per_s

    def step(self, chunk_tokens: Tokens, chunk_squares: int, decoding: int, context: Tokens) -> Seconds:
        """`context`: tokens that the decoding requests have computed, all together."""
        squares = chunk_squares + 2 * context + decoding
        compute = self._token_s * (chunk_tokens + decoding) + self._square_s * squares
        memory = self._weights_s + self._kv_token_s * context
        return self._overhead_s + max(compute, memory)

    def decode_run(self, decoding: int, context: Tokens, count_max: int) -> tuple[int, Seconds]:
        """The longest run of at most `count_max` steps on one side of the roofline, and its seconds."""
        compute_first, compute_more, memory_first, memory_more = self._lines(decoding, context)
        above, closing = memory_first - compute_first, compute_more - memory_more
        count = count_max
        if closing and above / closing >= 0:
            count = max(1, min(count_max, int(above / closing) + 1))
        return count, self.decode_steps(decoding, context, count)

    def decode_steps(self, decoding: int, context: Tokens, count: int) -> Seconds:
        """Seconds of `count` decode steps, all on the side of the roofline on which the first one is."""
        compute_first, compute_more, memory_first, memory_more = self._lines(decoding, context)
        first, more = (compute_first, compute_more) if compute_first > memory_first else (memory_first, memory_more)
        return count * (self._overhead_s + first) + more * (count * (count - 1) / 2)

    def _lines(self, decoding: int, context: Tokens) -> tuple[float, float, float, float]:
        """Compute and memory time of the next decode step, and how much longer each takes with every step."""
        return (
            self._token_s * decoding + self._square_s * (2 * context + decoding),
            self._square_s * 2 * decoding,
            self._weights_s + self._kv_token_s * context,
            self._kv_token_s * decoding,
        )


def _by_admission(sequence: _Sequence) -> int:
    return sequence.admission
