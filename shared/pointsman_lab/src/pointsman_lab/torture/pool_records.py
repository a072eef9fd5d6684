"""Records of the pool model: instances, requests, promises and corrections, each with its own rules."""

from dataclasses import dataclass, field
from functools import reduce
from operator import xor

from msgspec.structs import replace

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.decisions import RequestPlaced, RequestRejected
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceReported, PrefillCost
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, RequestId, Sequence, Tokens

FADE = 0.97
PRIOR_SECONDS: EngineSeconds = 2.0
FACTOR_MIN, FACTOR_MAX = 0.25, 4.0
CLOCK_BACK_SECONDS: EngineSeconds = 60.0
"""A report that is so much earlier than the one before tells of a clock that was set back."""
OVERDUE_SECONDS: EngineSeconds = 3.0
"""A request that is taken out of its engine has failed there if its first token was due so long ago."""
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
    slo_tpot: EngineSeconds
    tenant: str
    max_output_tokens: Tokens
    streaming: bool
    adapter: str
    alias: str
    context_tokens: Tokens
    arrival: Stamp | None
    """Of the leader that took it in."""
    comes_again: bool = False
    """Under another id, since its leader ended the first."""
    stage: str = ARRIVED
    attempt: int = 1
    excluded: tuple[InstanceId, ...] = ()
    instance: InstanceId = NO_INSTANCE
    epoch: Epoch = NO_EPOCH
    uncached: Tokens = 0
    seconds: EngineSeconds = 0.0
    placed_at: EngineSeconds = 0.0
    granted_at: EngineSeconds = 0.0
    grant: int = 0
    sent: dict[int, tuple[InstanceId, Epoch, int]] = field(default_factory=dict)
    """By attempt: where, and its grant."""
    offset: EngineSeconds | None = None
    """Added to dates of its ingress, gives the leader's; None: not told."""
    engine_seconds: EngineSeconds = 0.0
    """Prefill work up to its first token at dispatch, its own included."""
    engine_tokens: Tokens = 0
    decode: InstanceId = NO_INSTANCE
    prefilled_by: InstanceId = NO_INSTANCE
    prefill_epoch: Epoch = NO_EPOCH
    rebind: bool = False
    rebound_from: InstanceId = NO_INSTANCE
    turn: int = 0
    promise: Promise | None = None

    @property
    def deadline(self) -> EngineSeconds:
        return self.arrived_at + self.slo_ttft

    def lost(self, event: RequestPlaced | RequestRejected, *, displaces: bool = False) -> EngineSeconds:
        """Seconds lost since arrival or dispatch: held, or at an instance that failed it. `displaces`: another was rejected
        right before, to make room."""
        is_first = event.attempt == 1 and not self.comes_again and self._is_of_arrivals_turn(event.stamp, displaces)
        if self.stage == PENDING or (self.stage == ARRIVED and is_first):
            return 0.0
        return max(0.0, event.at - (self.arrived_at if self.stage == ARRIVED else self.granted_at))

    def _is_of_arrivals_turn(self, stamp: Stamp | None, displaces: bool) -> bool:
        """Whether nothing was read or decided in between. Virtual time may stand still for several turns."""
        if stamp is None or self.arrival is None:
            return False
        return stamp == replace(self.arrival, number=self.arrival.number + 1 + displaces)

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
    kv_capacity_tokens: Tokens
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
    drain_decided: tuple[int, int] = (0, 0)
    ejection_decided: tuple[int, int] = (0, 0)
    """Term and number of the newest decision about it: one that comes behind a later one does not count."""
    half_open: bool = False
    """Ejection expired, no success yet: one request at a time."""
    suspected: bool = False
    excused_until: EngineSeconds = 0.0
    reported: Sequence = 0
    serving: bool = True
    parity: bool | None = None
    sequence: Sequence = 0
    keys: set[BlockKey] = field(default_factory=set)
    unverified: bool = False
    """Whether an entry is missing that no snapshot or digest has settled."""

    @property
    def status(self) -> str:
        return "suspected" if self.suspected else self.standing

    @property
    def standing(self) -> str:
        """Were its worker heard."""
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

    def receive(self, event: InstanceReported, now: EngineSeconds) -> None:
        """A report proves liveness, and its digest settles whether the cache is known. `now`: by the leader's clock, at most."""
        is_news = event.at > self.heard_at
        self.heard_at = event.at if event.at < self.heard_at - CLOCK_BACK_SECONDS else max(self.heard_at, event.at)
        self.counted = self.counted or event.serving
        self.suspected = False
        self.excused_until = now + event.back_within if event.back_within and is_news else 0.0
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
    """Observed against predicted prefill time: two decaying sums, and an estimate by tokens, which counts little of a few
    prefills and far beyond the longest."""

    observed: EngineSeconds = PRIOR_SECONDS
    predicted: EngineSeconds = PRIOR_SECONDS
    by_tokens: EngineSeconds = 0.0
    tokens: float = 0.0
    squares_of_cost: float = 0.0
    squares_of_tokens: float = 0.0
    seen: int = 0
    most: float = 0.0
    longest: float = 0.0

    @property
    def factor(self) -> float:
        return sorted((FACTOR_MIN, self.observed / self.predicted, FACTOR_MAX))[1]

    def expect(self, seconds: EngineSeconds, tokens: Tokens, *, alone: bool = False) -> EngineSeconds:
        """`alone`: of one prompt."""
        by_cost = seconds * self.factor
        cost_error, token_error = self.squares_of_cost**2, self.squares_of_tokens**2
        if self.tokens == 0 or cost_error == 0:
            return by_cost
        trust = min(self.seen, 10) / 10 * min(1.0, (2 * self.longest if alone else 4 * self.most) / max(tokens, 1))
        weight = trust * cost_error / (cost_error + token_error)
        return (1 - weight) * by_cost + weight * tokens * self.by_tokens / self.tokens

    def learn(self, predicted: EngineSeconds, observed: EngineSeconds, tokens: Tokens, own: Tokens) -> None:
        if predicted <= 0 or observed < 0:
            return
        observed = min(observed, 2 * FACTOR_MAX * predicted)
        by_tokens = tokens * self.by_tokens / self.tokens if self.tokens else None
        self.squares_of_cost = FADE * self.squares_of_cost + (observed - predicted * self.factor) ** 2
        if by_tokens is None:
            self.squares_of_tokens = self.squares_of_cost
        else:
            self.squares_of_tokens = FADE * self.squares_of_tokens + (observed - by_tokens) ** 2
        self.observed = FADE * self.observed + observed
        self.predicted = FADE * self.predicted + predicted
        self.by_tokens = FADE * self.by_tokens + observed
        self.tokens = FADE * self.tokens + tokens
        self.seen += 1
        self.most = max(tokens, FADE * self.most)
        self.longest = max(own, 0.998 * self.longest)


@dataclass(eq=False)
class Pace:
    """An engine's steps, told apart by its first tokens: `step` has work and tokens of those of the last one, which lasted
    `lasted`. It counts when the next begins."""

    learned: Learned = field(default_factory=Learned)
    beside: EngineSeconds = 0.0
    beside_tokens: float = 0.0
    step: list[tuple[EngineSeconds, Tokens]] = field(default_factory=list)
    lasted: EngineSeconds = 0.0

    @property
    def full_step(self) -> EngineSeconds:
        return self.learned.expect(self.beside, int(self.beside_tokens))

    def first_token(self, passed: EngineSeconds, seconds: EngineSeconds, tokens: Tokens) -> None:
        together = passed < seconds / 2 and any(work > 0 for work, _ in self.step)
        if not together:
            self._end_step()
        self.step.append((seconds, tokens))
        self.lasted += max(0.0, passed)

    def _end_step(self) -> None:
        step, lasted = self.step, self.lasted
        self.step, self.lasted = [], 0.0
        if not any(work > 0 for work, _ in step):
            return
        self.beside, self.beside_tokens = 0.98 * self.beside, 0.98 * self.beside_tokens
        others = sum(work for work, _ in step[1:])
        if min(others, lasted) > self.beside:
            self.beside = min(others, lasted)
            self.beside_tokens = sum(tokens for _, tokens in step[1:]) * (self.beside / others)
        own = [tokens for _, tokens in step]
        self.learned.learn(sum(work for work, _ in step), lasted, sum(own), max(own))


def leading(keys: list[BlockKey], among: set[BlockKey]) -> int:
    count = 0
    while count < len(keys) and keys[count] in among:
        count += 1
    return count
