"""One engine in virtual time: continuous batching with chunked prefill over a block cache, and the cost of each step.
No clock, no I/O: the driver calls `begin_step(now)`, lets the step's seconds pass, and calls `end_step(now)`.

Scheduling is vLLM's: running requests first (decodes, then prefill chunks, within `max_num_batched_tokens`), then
waiting ones, first come first served, while a sequence and blocks for the whole prompt are free. If decoding needs a
block and none is free, the youngest running request is preempted and computed again later. Runs of pure decode steps
can be *fused* into one `Step`; submitting or aborting a request cuts the run at the end of the present step.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from pointsman.primitives import EngineSeconds, RequestId, Tokens
from pointsman.simulation.block_cache import (
    EVICTION_ORDERS,
    BlockCache,
    BlockChain,
    BlockHash,
    BlockHasher,
    CacheChange,
    OpaqueChain,
    TokenChain,
)
from pointsman.simulation.decode_ticks import DecodeTicks, EngineRequest, Phase
from pointsman.simulation.engine_types import (
    EngineCounts,
    EngineSettings,
    HashedPrompt,
    PrefillEnded,
    Prompt,
    RequestTooLongError,
    Step,
    StepResult,
)
from pointsman.simulation.host_tier import HostTier
from pointsman.simulation.step_cost import StepCost
from pointsman.state.engine_profiles import EngineProfile


class EngineModel:
    def __init__(self, profile: EngineProfile, settings: EngineSettings | None = None) -> None:
        settings = settings or EngineSettings()
        self.settings = settings
        self.profile = profile
        self.cache = BlockCache(
            blocks_max=settings.num_gpu_blocks or profile.kv_capacity_tokens // settings.block_size,
            order=EVICTION_ORDERS[settings.eviction](),
        )
        self._block_size = settings.block_size
        self.host: HostTier | None = None
        if settings.host_blocks:
            block_bytes = profile.kv_bytes_per_token * settings.block_size
            self.host = HostTier(
                blocks_max=settings.host_blocks, block_seconds=block_bytes / (settings.host_gb_per_s * 1e9)
            )
        self._hasher = BlockHasher(block_tokens=settings.block_size, seed=settings.seed)
        self._cost = StepCost(profile)
        self._requests: dict[RequestId, EngineRequest] = {}
        self._waiting: deque[EngineRequest] = deque()
        self._running: dict[int, EngineRequest] = {}
        """By admission: the last one is the youngest."""
        self._prefilling: list[EngineRequest] = []
        self._decoding = DecodeTicks(settings.block_size, allocate=self._allocate, fill=self._fill_blocks)
        self._step: Step | None = None
        self._step_context = 0
        self._step_ticks = 0
        """Steps of the present fused one that are applied already."""
        self._chunk_tokens = 0
        self._chunk_squares = 0
        self._preempted = False
        self._kept: dict[RequestId, list[BlockHash]] = {}
        self._submitted = self._admitted = 0
        self._queries = self._hits = self._prompt_tokens = self._generated = self._preemptions = self._loaded = 0

    def submit(
        self,
        request: RequestId,
        prompt: Prompt,
        *,
        max_tokens: Tokens,
        now: EngineSeconds,
        received: Tokens = 0,
        held: bool = False,
    ) -> None:
        """Queue a request for the next step that begins at or after `now`. `received`: leading prompt tokens with a KV
        cache from another engine; computed only after a preemption. `held`: keep the whole blocks after its end, until
        `release_kv`. Raises RequestTooLongError if it cannot fit alone, ValueError for an empty prompt, `max_tokens`
        below 1, or a known id."""
        length = prompt.length if isinstance(prompt, HashedPrompt) else len(prompt.tokens)
        self._check(request, length, max_tokens)
        self._submitted += 1
        queued = EngineRequest(request, self._chain(prompt), length, max_tokens, now)
        queued.received, queued.held = received, held
        self._requests[request] = queued
        self._waiting.append(queued)
        self._cut_step(now)

    def abort(self, request: RequestId, now: EngineSeconds) -> bool:
        known = self._requests.get(request)
        if known is None:
            return False
        self._cut_step(now)
        self._apply_whole_steps()
        if known.phase is Phase.WAITING:
            self._waiting.remove(known)
        elif known.phase is Phase.LOADING:
            assert self.host is not None
            self.host.abort_load(known, self.cache)
        else:
            self._leave(known)
        self._end(known)
        return True

    def hold_kv(self, request: RequestId, prompt: Prompt) -> None:
        """Hold what is cached of a prompt until `release_kv`."""
        hashes = self._chain(prompt).hashes
        kept = self._kept[request] = hashes[: self.cache.hit(hashes, blocks_max=len(hashes))]
        self.cache.hold(kept)

    def release_kv(self, request: RequestId) -> bool:
        """Release the blocks held of an ended request. False if there are none."""
        blocks = self._kept.pop(request, None)
        if blocks is None:
            return False
        self.cache.release(blocks, private=0)
        return True

    def cached_tokens(self, prompt: Prompt) -> Tokens:
        hashes = self._chain(prompt).hashes
        return self.cache.hit(hashes, blocks_max=len(hashes)) * self._block_size

    def reset_prefix_cache(self) -> bool:
        """False, without effect, while a request holds blocks. Clears the host tier too."""
        done = self.cache.reset()
        if done and self.host is not None:
            self.host.clear()
        return done

    @property
    def step(self) -> Step | None:
        return self._step

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def loaded_at(self) -> EngineSeconds | None:
        """When the next load ends; None if there is none. An engine with nothing to compute has to be woken then."""
        return None if self.host is None else self.host.loaded_at

    def begin_step(self, now: EngineSeconds, *, max_fused_steps: int = 1) -> Step | None:
        """None if there is nothing to compute. Up to `max_fused_steps` pure decode steps become one."""
        assert self._step is None, "a step is in flight: end it first"
        self._chunk_tokens = self._chunk_squares = 0
        self._preempted = False
        if self.host is not None:
            self._waiting.extendleft(reversed(self.host.finish_loads(self.cache, now)))
        self._decoding.grow()
        self._continue_prefills()
        if not self._preempted:
            self._admit(now)
        decoding = len(self._decoding.requests)
        if not decoding and not self._chunk_tokens:
            return None
        count = self._steps_to_fuse(max_fused_steps)
        if count > 1:
            count, seconds = self._cost.decode_run(decoding, self._decoding.context_tokens, count)
        else:
            seconds = self._cost.step(self._chunk_tokens, self._chunk_squares, decoding, self._decoding.context_tokens)
        self._step_context = self._decoding.context_tokens
        self._step_ticks = 0
        self._step = Step(now, seconds, count, self._chunk_tokens, decoding)
        return self._step

    def end_step(self, now: EngineSeconds) -> StepResult:
        step = self._step
        assert step is not None, "no step is in flight"
        self._step = None
        decoded = [request.id for request in self._decoding.requests.values()]
        self._advance(step.count - self._step_ticks)
        finished = self._take_finished()
        first_tokens = self._take_prefilled(decoded, finished)
        return StepResult(now, step.count, decoded, first_tokens, finished, self.take_changes())

    def take_changes(self) -> list[CacheChange]:
        """Of the device, then of the host: what describes a block comes first."""
        changes = self.cache.take_changes()
        return changes if self.host is None else changes + self.host.take_changes()

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
            external_prefix_cache_hits=self._loaded,
        )

    def _continue_prefills(self) -> None:
        for request in tuple(self._prefilling):
            if request.phase is Phase.PREFILL and self._budget > 0:
                self._schedule_chunk(request)

    def _admit(self, now: EngineSeconds) -> None:
        while self._waiting and self._budget > 0 and len(self._running) < self.settings.max_num_seqs:
            request = self._waiting[0]
            if request.arrived_at > now:
                return
            hashes = self._cached_prefix(request)
            if self.host is not None and not request.loaded:
                blocks_max = (request.target - 1) // self._block_size
                if self.host.begin_load(request, len(hashes), blocks_max, self.cache, now):
                    self._waiting.popleft()
                    continue
            if self._blocks_for(request.target) - len(hashes) > self.cache.free_beside(hashes):
                return
            self._waiting.popleft()
            self._start(request, hashes)
            self._schedule_chunk(request)

    def _cached_prefix(self, request: EngineRequest) -> Sequence[BlockHash]:
        """Hashes that hit. At least one token is always computed."""
        blocks_max = (request.target - 1) // self._block_size
        request.chain.extend_to(blocks_max)
        hashes = request.chain.hashes
        return hashes[: self.cache.hit(hashes, blocks_max=blocks_max)]

    def _start(self, request: EngineRequest, hashes: Sequence[BlockHash]) -> None:
        self.cache.hold(hashes)
        self._admitted += 1
        request.admission = self._admitted
        request.phase = Phase.PREFILL
        request.blocks = request.full = len(hashes)
        request.computed = local = len(hashes) * self._block_size
        if request.received > local:
            request.computed = min(request.received, request.target - 1)
        self._running[request.admission] = request
        self._prefilling.append(request)
        if request.cached_tokens < 0:
            request.cached_tokens = local
            loaded = min(local, request.loaded * self._block_size)
            self._queries += request.prompt_length
            self._hits += local - loaded
            self._loaded += loaded

    def _schedule_chunk(self, request: EngineRequest) -> None:
        begin = request.computed
        end = begin + min(request.target - begin, self._budget)
        if not self._allocate(request, self._blocks_for(end) - request.blocks):
            return
        self._chunk_tokens += end - begin
        self._chunk_squares += end * end - begin * begin
        request.computed = end
        self._fill_blocks(request, end // self._block_size)

    @property
    def _budget(self) -> Tokens:
        return self.settings.max_num_batched_tokens - len(self._decoding.requests) - self._chunk_tokens

    def _allocate(self, request: EngineRequest, blocks: int) -> bool:
        """Preempts the youngest running request if needed. False if that was `request` itself."""
        while not self.cache.allocate(blocks):
            youngest = self._running[next(reversed(self._running))]
            self._preempt(youngest)
            if youngest is request:
                return False
        request.blocks += blocks
        return True

    def _preempt(self, request: EngineRequest) -> None:
        self._leave(request)
        request.phase = Phase.WAITING
        request.target = request.prompt_length + request.generated
        request.computed = request.received = 0
        self._waiting.appendleft(request)
        self._preempted = True
        self._preemptions += 1

    def _steps_to_fuse(self, count_max: int) -> int:
        if count_max <= 1 or self._chunk_tokens or self._preempted or self.loaded_at is not None:
            return 1
        if self._waiting and len(self._running) < self.settings.max_num_seqs:
            return 1
        count = min(count_max, self._decoding.next_ending() - self._decoding.tick)
        rounds = self.cache.blocks_free // len(self._decoding.requests)
        return max(1, min(count, rounds * self._block_size))

    def _cut_step(self, now: EngineSeconds) -> None:
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

    def _apply_whole_steps(self) -> None:
        if self._step is None or self._step.count - self._step_ticks <= 1:
            return
        self._advance(self._step.count - 1 - self._step_ticks)
        self._decoding.grow()
        self._step_ticks = self._step.count - 1

    def _advance(self, ticks: int) -> None:
        self._generated += ticks * len(self._decoding.requests)
        self._decoding.advance(ticks)

    def _take_finished(self) -> list[RequestId]:
        ended = self._decoding.pop_ended()
        for request in ended:
            self._finish(request)
        return [request.id for request in ended]

    def _take_prefilled(self, decoded: list[RequestId], finished: list[RequestId]) -> list[PrefillEnded]:
        """Completed prefills have one more token: the first, unless they were preempted."""
        first_tokens = []
        prefilled = [request for request in self._prefilling if request.computed == request.target]
        for request in prefilled:
            self._prefilling.remove(request)
            self._generated += 1
            request.generated += 1
            if request.generated == 1:
                self._prompt_tokens += request.prompt_length
                loaded = min(request.cached_tokens, request.loaded * self._block_size)
                first_tokens.append(PrefillEnded(request.id, request.cached_tokens, loaded))
            else:
                decoded.append(request.id)
            if request.generated == request.max_tokens:
                self._finish(request)
                finished.append(request.id)
            else:
                self._decoding.start(request)
        return first_tokens

    def _fill_blocks(self, request: EngineRequest, full: int) -> None:
        request.chain.extend_to(full)
        self.cache.fill(request.chain, request.full, full)
        if self.host is not None:
            self.host.store(request.chain, request.full, min(full, request.prompt_length // self._block_size))
        request.full = full

    def _leave(self, request: EngineRequest) -> None:
        del self._running[request.admission]
        if request.phase is Phase.DECODE:
            self._decoding.leave(request)
        elif request in self._prefilling:
            self._prefilling.remove(request)
        self.cache.release(request.chain.hashes[: request.full], private=request.blocks - request.full)
        request.blocks = request.full = 0

    def _finish(self, request: EngineRequest) -> None:
        if request.held:
            kept = self._kept[request.id] = request.chain.hashes[: request.full]
            self.cache.hold(kept)
        self._leave(request)
        self._end(request)

    def _end(self, request: EngineRequest) -> None:
        request.phase = Phase.ENDED
        del self._requests[request.id]

    def _blocks_for(self, tokens: Tokens) -> int:
        return -(-tokens // self._block_size)

    def _chain(self, prompt: Prompt) -> BlockChain:
        if isinstance(prompt, HashedPrompt):
            whole_blocks = prompt.length // self._block_size
            chain = OpaqueChain(prompt.hashes[:whole_blocks], unique=self._unique)
            chain.extend_to(whole_blocks)
            return chain
        return TokenChain(prompt.tokens, generated=prompt.generated, hasher=self._hasher, identity=prompt.identity)

    @property
    def _unique(self) -> int:
        return self.settings.seed << 40 | self._submitted

    def _check(self, request: RequestId, prompt_length: Tokens, max_tokens: Tokens) -> None:
        if prompt_length < 1 or max_tokens < 1:
            raise ValueError(
                f"a request needs a prompt and at least one token to generate, not {prompt_length} and {max_tokens}"
            )
        if request in self._requests:
            raise ValueError(f"request {request} is here already")
        blocks = self._blocks_for(prompt_length + max_tokens - 1)
        if blocks > self.cache.blocks_max:
            raise RequestTooLongError(
                f"{prompt_length} + {max_tokens} tokens need {blocks} blocks; the cache has {self.cache.blocks_max}"
            )
