"""Records of the pool model: instances, requests, promises and corrections, each with its own rules."""

from dataclasses import dataclass, field
from functools import reduce
from operator import xor

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.fleet import InstanceReported, PrefillCost
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, RequestId, Sequence, Tokens

FADE = 0.985
PRIOR, BELIEF = (0.0, 0.0, 1.0), (1.0, 1.0, 4.0)
SPREAD_FIRST = 0.5
FACTOR_MIN, FACTOR_MAX = 0.25, 4.0
NO_INSTANCE = InstanceId("")
NO_EPOCH = Epoch(-1)
ARRIVED, PENDING, PREFILL, HANDED_OVER, DECODING = "arrived", "pending", "prefill", "handed over", "decoding"


@dataclass(eq=False)
class Promise:
    instance: InstanceId
    keys: list[BlockKey]
    until: EngineSeconds | None = None


@dataclass(eq=False)
class BookedRequest:
    """Numbers are those of its newest placement or move."""

    id: RequestId
    keys: list[BlockKey]
    prompt_tokens: Tokens
    arrived_at: EngineSeconds
    slo_ttft: EngineSeconds
    streaming: bool
    adapter: str
    alias: str
    context_tokens: Tokens
    taken_at: EngineSeconds
    stage: str = ARRIVED
    attempt: int = 1
    excluded: tuple[InstanceId, ...] = ()
    instance: InstanceId = NO_INSTANCE
    epoch: Epoch = NO_EPOCH
    uncached: Tokens = 0
    seconds: EngineSeconds = 0.0
    placed_at: EngineSeconds = 0.0
    granted_at: EngineSeconds = 0.0
    engine_seconds: EngineSeconds = 0.0
    """Prefill work up to its first token at dispatch, its own included."""
    engine_tokens: Tokens = 0
    decode: InstanceId = NO_INSTANCE
    prefilled_by: InstanceId = NO_INSTANCE
    rebind: bool = False
    rebound_from: InstanceId = NO_INSTANCE
    turn: int = 0
    promise: Promise | None = None

    @property
    def deadline(self) -> EngineSeconds:
        return self.arrived_at + self.slo_ttft

    def lost(self, attempt: int, now: EngineSeconds) -> EngineSeconds:
        """Seconds lost since arrival or dispatch: held, or at an instance that failed it."""
        if self.stage == PENDING or (self.stage == ARRIVED and attempt == 1 and now == self.taken_at):
            return 0.0
        return max(0.0, now - (self.arrived_at if self.stage == ARRIVED else self.granted_at))

    @property
    def awaits_decoder(self) -> bool:
        return self.stage == HANDED_OVER and self.instance == self.prefilled_by


@dataclass(eq=False)
class ModelledInstance:
    """One epoch of an instance. `arrived_at`: first entry of a chain of epochs without a break."""

    epoch: Epoch
    arrived_at: Sequence
    cost: PrefillCost
    engine_block_tokens: Tokens
    role: str
    model: str
    model_since: Epoch
    context: Tokens
    cache: str
    certain: bool
    adapters: frozenset[str]
    aliases: frozenset[str]
    heard_at: EngineSeconds
    misfit: bool = False
    counted: bool = False
    surprises: int = 0
    draining: bool = False
    draining_since: EngineSeconds = 0.0
    becomes: str = ""
    announced: str = ""
    announced_since: Epoch = Epoch(0)  # noqa: RUF009 - a number
    switching: bool = False
    ejected: bool = False
    half_open: bool = False
    """Ejection expired, no success yet: one request at a time."""
    suspected: bool = False
    excused_until: EngineSeconds = 0.0
    serving: bool = True
    parity: bool | None = None
    sequence: Sequence = 0
    keys: set[BlockKey] = field(default_factory=set)
    unverified: bool = False
    """Whether an entry is missing that no snapshot or digest has settled."""

    @property
    def status(self) -> str:
        if self.suspected:
            return "suspected"
        if not self.serving:
            return "down"
        if self.misfit:
            return "unschedulable"
        if self.draining:
            return "draining"
        return "ejected" if self.ejected else "ready"

    @property
    def knowledge(self) -> str:
        """`exact` only with replayable events from the engine's start, no gap or difference since, and proven keys."""
        if self.cache == "no_events":
            return "blind"
        proven = self.parity is True and self.certain
        return "exact" if proven and not self.unverified and self.cache == "empty" else "degraded"

    @property
    def digest(self) -> int:
        return reduce(xor, self.keys, 0)

    def serves(self, request: BookedRequest) -> bool:
        named = request.alias == "" or request.alias in self.aliases
        adapted = request.adapter == "" or request.adapter in self.adapters
        return named and adapted and not 0 < self.context < request.context_tokens

    def apply(self, event: CacheEvent) -> bool:
        """Returns whether the event counts."""
        snapshot = isinstance(event, CacheSnapshot)
        if event.epoch != self.epoch or event.sequence < self.sequence + (not snapshot):
            return False
        if event.sequence > self.sequence + 1:
            self.unverified = True
        self.sequence = event.sequence
        match event:
            case BlocksStored():
                self.keys.update(key for run in event.runs for key in unpack_keys(run.keys))
            case BlocksRemoved():
                self.keys.difference_update(unpack_keys(event.keys))
            case CacheCleared():
                self.keys.clear()
                self.cache = "empty"
            case CacheSnapshot():
                self.keys = {key for run in event.runs for key in unpack_keys(run.keys)}
                self.unverified = False
            case CacheGap():
                self.unverified = True
            case _:
                pass
        return True

    def receive(self, event: InstanceReported) -> None:
        """A report proves liveness, and its digest settles whether the cache is known."""
        is_news = event.at > self.heard_at
        self.heard_at = max(self.heard_at, event.at)
        self.counted = self.counted or event.serving
        self.suspected = False
        self.excused_until = event.at + event.back_within if event.back_within else 0.0
        self.serving = event.serving
        self.adapters, self.aliases = frozenset(event.adapters), frozenset(event.aliases)
        self.certain = event.certain
        if event.sequence >= self.sequence and self.cache != "no_events":
            reported = (event.sequence, event.blocks, event.digest)
            self.unverified = reported != (self.sequence, len(self.keys), self.digest)
        elif is_news and self.cache != "no_events":
            self.unverified = True  # another writer has used its name


@dataclass(eq=False)
class Learned:
    """Observed prefills of one instance, and the weights of three estimates of a prefill that fit them best: a fixed time,
    seconds per token instead of the cost model, and the cost model. `sums`: of products of the estimates and the target,
    each over its scale."""

    cost: PrefillCost
    sums: dict[tuple[int, int], float] = field(default_factory=dict)
    usual: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Faded sums of expected seconds, seconds by the cost model, tokens, and their number."""
    spread: float = SPREAD_FIRST
    drift: float = 0.0
    weights: list[float] = field(default_factory=lambda: list(PRIOR))

    @property
    def factor(self) -> float:
        _, seconds, tokens, seen = self.usual
        return self.first_token(seconds / seen, tokens / seen) / (seconds / seen) if seen else 1.0

    def expect(self, seconds: EngineSeconds, tokens: float) -> EngineSeconds:
        if not self.usual[3]:
            return seconds
        fixed, by_tokens, by_cost = self._estimates(seconds, tokens)
        fixed *= seconds * self.usual[3] / self.usual[1]  # once for each usual amount of work
        return _bounded(self.weights[0] * fixed + self.weights[1] * by_tokens + self.weights[2] * by_cost, seconds)

    def first_token(self, seconds: EngineSeconds, tokens: float) -> EngineSeconds:
        estimates = self._estimates(seconds, tokens)
        return _bounded(sum(self.weights[i] * estimates[i] for i in range(3)), seconds)

    def learn(self, predicted: EngineSeconds, observed: EngineSeconds, tokens: Tokens) -> None:
        if predicted < 1e-6 or observed < 0:
            return
        expected = self.first_token(predicted, tokens)
        seen = (expected, predicted, float(tokens), 1.0)
        self.usual = [FADE * old + new for old, new in zip(self.usual, seen, strict=True)]
        off, spread = observed / expected - 1, self.spread
        self.drift += 0.08 * (_cut(off, 2.5 * spread) - self.drift)
        self.spread = _cut(max(0.03, (0.9 * spread**2 + 0.1 * _cut(off, 4 * spread) ** 2) ** 0.5), 1.0)
        if abs(self.drift) > 0.15 and abs(self.drift) > 0.6 * self.spread:
            self.sums, self.drift = {}, 0.0
            self.spread = spread = max(self.spread, SPREAD_FIRST)
        scale = (expected * self.usual[0] / self.usual[3]) ** 0.5
        row = [_cut(estimate / scale, 100.0) for estimate in self._estimates(predicted, tokens)]
        row.append(expected * (1 + _cut(off, 2.5 * spread)) / scale)
        for i in range(3):
            for j in range(4):
                self.sums[i, j] = FADE * self.sums.get((i, j), 0.0) + 16 * row[i] * row[j]
        self.weights = self._fit()

    def _estimates(self, seconds: EngineSeconds, tokens: float) -> list[float]:
        return [self.cost.fixed_s + self.cost.floor_s, tokens * self.cost.per_token_s - seconds, seconds]

    def _fit(self) -> list[float]:
        """By Cramer's rule, with the prior."""
        matrix = [[self.sums[i, j] + BELIEF[i] * (i == j) for j in range(3)] for i in range(3)]
        right = [self.sums[i, 3] + BELIEF[i] * PRIOR[i] for i in range(3)]
        whole = _determinant(matrix)
        replaced = [[[right[i] if j == k else matrix[i][j] for j in range(3)] for i in range(3)] for k in range(3)]
        return [_determinant(one) / whole for one in replaced]


def _bounded(seconds: EngineSeconds, by_cost: EngineSeconds) -> EngineSeconds:
    return sorted((FACTOR_MIN * by_cost, seconds, FACTOR_MAX * by_cost))[1]


def _cut(value: float, bound: float) -> float:
    return sorted((-bound, value, bound))[1]


def _determinant(m: list[list[float]]) -> float:
    return sum(
        m[0][i] * (m[1][(i + 1) % 3] * m[2][(i + 2) % 3] - m[1][(i + 2) % 3] * m[2][(i + 1) % 3]) for i in range(3)
    )


def leading(keys: list[BlockKey], among: set[BlockKey]) -> int:
    count = 0
    while count < len(keys) and keys[count] in among:
        count += 1
    return count
