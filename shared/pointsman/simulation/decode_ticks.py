"""Decoding without touching every request at every step. All decoding requests advance together: one *tick* per decode
step. A request is touched only when it fills a block or has all its tokens."""

from collections.abc import Callable
from enum import Enum
from heapq import heappop, heappush
from operator import attrgetter

from pointsman.primitives import EngineSeconds, RequestId, Tokens
from pointsman.simulation.block_cache import BlockChain


class Phase(Enum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    ENDED = 3
    LOADING = 4
    """Waits for blocks from the host tier."""


class EngineRequest:
    """`target` tokens must be computed before the next one can be generated. While decoding, its tokens follow from
    `since_tick` and `target`."""

    __slots__ = (
        "admission", "arrived_at", "blocks", "cached_tokens", "chain", "computed", "full", "generated", "held", "id",
        "loaded", "max_tokens", "phase", "prompt_length", "received", "since_tick", "target",
    )  # fmt: skip

    def __init__(
        self, request: RequestId, chain: BlockChain, prompt_length: Tokens, max_tokens: Tokens, now: EngineSeconds
    ):
        self.id = request
        self.chain = chain
        self.prompt_length = prompt_length
        self.max_tokens = max_tokens
        self.arrived_at = now
        self.phase = Phase.WAITING
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
        self.loaded = 0
        """Blocks loaded back for it."""


class DecodeTicks:
    def __init__(
        self,
        block_size: Tokens,
        *,
        allocate: Callable[[EngineRequest, int], bool],
        fill: Callable[[EngineRequest, int], None],
    ) -> None:
        """`allocate` gives a request more blocks, `fill` marks its leading blocks as full."""
        self.tick = 0
        self.requests: dict[int, EngineRequest] = {}
        self.context_tokens: Tokens = 0
        self._block_size = block_size
        self._allocate = allocate
        self._fill = fill
        self._growing: list[EngineRequest] = []
        self._block_ends: list[tuple[int, int]] = []
        self._endings: list[tuple[int, int]] = []
        """Heaps of (tick, admission): when a request fills its block, and when it has all its tokens."""

    def start(self, request: EngineRequest) -> None:
        request.phase = Phase.DECODE
        request.since_tick = self.tick
        self.requests[request.admission] = request
        self.context_tokens += request.target
        left_in_block = -request.target % self._block_size
        if not left_in_block:
            self._growing.append(request)
        heappush(self._block_ends, (self.tick + (left_in_block or self._block_size), request.admission))
        heappush(self._endings, (self.tick + request.max_tokens - request.generated, request.admission))

    def leave(self, request: EngineRequest) -> None:
        ticks = self.tick - request.since_tick
        request.generated += ticks
        self.context_tokens -= request.target + ticks
        del self.requests[request.admission]

    def grow(self) -> None:
        growing, self._growing = self._growing, []
        for request in sorted(growing, key=attrgetter("admission")):
            if request.admission in self.requests:
                self._allocate(request, 1)

    def advance(self, ticks: int) -> None:
        end = self.tick + ticks
        self.context_tokens += ticks * len(self.requests)
        while self._block_ends and self._block_ends[0][0] <= end:
            tick = self._block_ends[0][0]
            self.grow()
            self._fill_at(tick)
        if self._growing and self.tick < end:
            self.grow()
        self.tick = end

    def _fill_at(self, tick: int) -> None:
        self.tick = tick
        while self._block_ends and self._block_ends[0][0] == tick:
            _, admission = heappop(self._block_ends)
            request = self.requests.get(admission)
            if request is None:
                continue
            self._fill(request, (request.target + tick - request.since_tick) // self._block_size)
            self._growing.append(request)
            heappush(self._block_ends, (tick + self._block_size, admission))

    def next_ending(self) -> int:
        """The tick at which the first request has all its tokens."""
        while self._endings and self._endings[0][1] not in self.requests:
            heappop(self._endings)
        return self._endings[0][0] if self._endings else self.tick + 1

    def pop_ended(self) -> list[EngineRequest]:
        """Requests that have all their tokens; the caller calls `leave` for each."""
        ended = []
        while self._endings and self.next_ending() <= self.tick:
            ended.append(self.requests[heappop(self._endings)[1]])
        return ended
