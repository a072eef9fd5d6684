"""A model of the pool in plain arithmetic: what the log says of instances and requests, written a second time.

In come log entries, in the log's order or in a leader's. Out come sets, sums and predictions, each computed anew from single
requests and blocks when it is asked for. It shares no code with `pointsman.state` and `pointsman.policies`: the rules are those of
docs/events.md and docs/policies.md. `twin` compares State with it, `audit` the decisions. It does not model what single
policies remember (hotness, tenants, conversations), nor how fast instances decode.
"""

from dataclasses import dataclass, field
from functools import reduce
from operator import xor

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    HandOverRefused,
    LeaderElected,
    RequestEnd,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceEjected,
    InstanceJoined,
    InstanceLeft,
    InstanceProbed,
    InstanceReported,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
    PrefillCost,
)
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, Seconds, Sequence, Tokens
from pointsman_lab.torture.ejections import Conducts, FirstToken, Peer, Served

CONFIRMED_SECONDS: Seconds = 2.0
"""Wall seconds after its first token for which a prompt is still promised."""
FADE = 0.97
PRIOR_SECONDS: Seconds = 2.0
FACTOR_MIN, FACTOR_MAX = 0.25, 4.0
STALL_SECONDS: Seconds = 3.0
DELIVERED_SECONDS: Seconds = 45.0
"""Wall seconds for which a prefix may count as held that an engine says it had."""
HELD_UP_SECONDS_MIN, HELD_UP_SECONDS_MAX = 0.25, 10.0
"""Wall seconds without a scheduler: less is no outage, more adds nothing to a budget."""
BACKLOG_SHARE = 0.1
"""Of each second by which the backlog of an outage is worked off."""
FORSAKEN_SECONDS: Seconds = 10.0
"""For so long after a request was taken out of an engine, that engine counts as stalled, unless it gives a first token."""

NOBODY = InstanceId("")
NO_LIFE = Epoch(-1)
ARRIVED, PENDING, PREFILL, HANDED_OVER, DECODING = "arrived", "pending", "prefill", "handed over", "decoding"


@dataclass(eq=False)
class Promise:
    """Blocks that an instance is about to hold. `until`: set by the first token."""

    instance: InstanceId
    keys: list[BlockKey]
    until: Seconds | None = None


@dataclass(eq=False)
class BookedRequest:
    """A request without an end. Numbers are those of its newest placement or move."""

    id: RequestId
    keys: list[BlockKey]
    prompt_tokens: Tokens
    arrived_at: Seconds
    slo_ttft: Seconds
    streaming: bool
    adapter: str
    alias: str
    context_tokens: Tokens
    taken_at: Seconds
    """When a leader took it in."""
    stage: str = ARRIVED
    attempt: int = 1
    excluded: tuple[InstanceId, ...] = ()
    instance: InstanceId = NOBODY
    epoch: Epoch = NO_LIFE
    """Of that instance when it was queued there."""
    uncached: Tokens = 0
    seconds: Seconds = 0.0
    placed_at: Seconds = 0.0
    granted_at: Seconds = 0.0
    engine_seconds: Seconds = 0.0
    """Prefill work up to its first token when it was granted, its own included."""
    engine_tokens: Tokens = 0
    decode: InstanceId = NOBODY
    prefilled_by: InstanceId = NOBODY
    rebind: bool = False
    rebound_from: InstanceId = NOBODY
    turn: int = 0
    """Grows with everything that queues or enters an engine: lower is earlier."""
    promise: Promise | None = None

    @property
    def deadline(self) -> Seconds:
        return self.arrived_at + self.slo_ttft

    def lost(self, attempt: int, now: Seconds) -> Seconds:
        """What it has lost since it came, or since its engine got it: held, or given to one that failed it."""
        if self.stage == PENDING or (self.stage == ARRIVED and attempt == 1 and now == self.taken_at):
            return 0.0
        return max(0.0, now - (self.arrived_at if self.stage == ARRIVED else self.granted_at))

    @property
    def with_nobody(self) -> bool:
        """Prefilled, and nobody could take it."""
        return self.stage == HANDED_OVER and self.instance == self.prefilled_by


@dataclass(eq=False)
class ModelledInstance:
    """One life of an instance. `arrived_at`: the entry where the first life began of those that followed without a break."""

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
    heard_at: Seconds
    misfit: bool = False
    """Whether the pool serves another model."""
    counted: bool = False
    """Whether it has served this model."""
    surprises: int = 0
    """Deliveries of this life that were other than predicted or than the events say, by more than a block."""
    draining: bool = False
    ejected: bool = False
    half_open: bool = False
    """Whether its ejection is over, and it has not proved well: it takes one request at a time."""
    suspected: bool = False
    excused_until: Seconds = 0.0
    """Its worker is being restarted."""
    serving: bool = True
    parity: bool | None = None
    sequence: Sequence = 0
    keys: set[BlockKey] = field(default_factory=set)
    doubtful: bool = False
    """Whether something is missing that neither a snapshot nor an equal digest has settled since."""

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
        """`exact` only with events from the engine's start, of which any that is missed can be had again, without a gap or a
        difference since, and with proven keys."""
        if self.cache == "no_events":
            return "blind"
        proven = self.parity is True and self.certain
        return "exact" if proven and not self.doubtful and self.cache == "empty" else "degraded"

    @property
    def digest(self) -> int:
        return reduce(xor, self.keys, 0)

    def serves(self, request: BookedRequest) -> bool:
        """Whether it has the adapter, the name and the room that the request asks for."""
        named = request.alias == "" or request.alias in self.aliases
        adapted = request.adapter == "" or request.adapter in self.adapters
        return named and adapted and not 0 < self.context < request.context_tokens

    def apply(self, event: CacheEvent) -> bool:
        """Take in a cache event; whether it counts."""
        snapshot = isinstance(event, CacheSnapshot)
        if event.epoch != self.epoch or event.sequence < self.sequence + (not snapshot):
            return False
        if event.sequence > self.sequence + 1:
            self.doubtful = True
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
                self.doubtful = False
            case CacheGap():
                self.doubtful = True
            case _:
                pass
        return True

    def hear(self, event: InstanceReported) -> None:
        """A report of this life: it lives, and its digest settles every doubt, either way."""
        is_news = event.at > self.heard_at
        self.heard_at = max(self.heard_at, event.at)
        self.counted = self.counted or event.serving
        self.suspected = False
        self.excused_until = event.at + event.back_within if event.back_within else 0.0
        self.serving = event.serving
        self.adapters, self.aliases = frozenset(event.adapters), frozenset(event.aliases)
        self.certain = event.certain
        if event.sequence >= self.sequence and self.cache != "no_events":
            told = (event.sequence, event.blocks, event.digest)
            self.doubtful = told != (self.sequence, len(self.keys), self.digest)
        elif is_news and self.cache != "no_events":
            self.doubtful = True  # somebody else has written events in its name


@dataclass(eq=False)
class Learned:
    """What prefills on one instance took, against what its cost model said: two fading sums, and a second opinion by tokens."""

    observed: Seconds = PRIOR_SECONDS
    predicted: Seconds = PRIOR_SECONDS
    by_tokens: Seconds = 0.0
    tokens: float = 0.0
    squares_of_cost: float = 0.0
    squares_of_tokens: float = 0.0

    @property
    def factor(self) -> float:
        return sorted((FACTOR_MIN, self.observed / self.predicted, FACTOR_MAX))[1]

    def expect(self, seconds: Seconds, tokens: Tokens) -> Seconds:
        by_cost = seconds * self.factor
        cost_error, token_error = self.squares_of_cost**2, self.squares_of_tokens**2
        if self.tokens == 0 or cost_error == 0:
            return by_cost
        return (token_error * by_cost + cost_error * tokens * self.by_tokens / self.tokens) / (cost_error + token_error)

    def learn(self, predicted: Seconds, observed: Seconds, tokens: Tokens) -> None:
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


class PoolModel:
    """Everything that the log says, up to the last entry that was applied."""

    def __init__(self, *, block_tokens: Tokens, speed: float, model: str) -> None:
        """`model`: what the pool serves."""
        self.model = model
        self.block_tokens = block_tokens
        self.speed = speed
        self.sequence: Sequence = 0
        self.term = 0
        self.fenced = 0
        self.instances: dict[InstanceId, ModelledInstance] = {}
        self.requests: dict[RequestId, BookedRequest] = {}
        self.ended: set[RequestId] = set()
        self.learned: dict[InstanceId, Learned] = {}
        self.conducts = Conducts()
        """How each instance serves and fails requests."""
        self.working_since: dict[InstanceId, Seconds] = {}
        """When the engine began the prefill it is at."""
        self._forsaken: dict[InstanceId, tuple[Seconds, Seconds]] = {}
        """When a request was last taken out of the engine, and since when it had finished no prefill then."""
        self._newest: dict[InstanceId, Epoch] = {}
        self._decided: set[tuple[int, int]] = set()
        self._promises: list[Promise] = []
        self._confirming: list[Promise] = []
        """Promises whose first token has come, in the order of those."""
        self._delivered: list[Promise] = []
        """What engines said they had, until when it may count."""
        self._outage: tuple[Seconds, Seconds] = (0.0, 0.0)
        """When the newest one was noticed, and how long it was."""
        self._turn = 0

    def apply(self, event: LogEvent | None, sequence: Sequence = 0) -> bool:
        """Take in an entry (None: nobody can read it), or with `sequence` 0 a decision before it is in the log. Whether it
        counts: not what a deposed leader says, nor a decision that was had before."""
        self.sequence = sequence or self.sequence
        if event is None:
            return False
        if event.stamp is not None:
            if event.stamp.term < self.term:
                self.fenced += 1
                return False
            decision = (event.stamp.term, event.stamp.number)
            if decision in self._decided:
                return False
            self._decided.add(decision)
        self._settle(event.at)
        if event.stamp is None and isinstance(event, PrefillFinished | RequestFinished):
            self.conducts.answers(event.request, event.instance)
        match event:
            case InstanceJoined():
                self._join(event)
            case InstanceLeft():
                self._leave(event)
            case InstanceReported():
                if (instance := self._life(event.instance, event.epoch)) is not None:
                    instance.hear(event)
                    self._compare_models()
            case InstanceProbed():
                if (instance := self._life(event.instance, event.epoch)) is not None:
                    instance.parity = event.parity
            case InstanceSuspected():
                if (instance := self._life(event.instance, event.epoch)) is not None:
                    instance.suspected = True
            case InstanceDraining() | InstanceUndrained():
                if self._means_present(event):
                    self.instances[event.instance].draining = isinstance(event, InstanceDraining)
            case InstanceEjected() | InstanceUnejected():
                if (instance := self._life(event.instance, event.epoch)) is not None:
                    self._eject(instance, event)
            case CacheEvent():
                instance = self.instances.get(event.instance)
                if instance is not None and instance.apply(event):
                    self._evict(event)
            case RequestAttemptFailed():
                self._fail(event)
            case RequestArrived():
                self._arrive(event)
            case RequestPlaced():
                self._place(event)
            case RequestMigrated():
                self._migrate(event)
            case RequestGranted():
                self._grant(event)
            case PrefillFinished():
                self._first_token(event)
            case RequestHandedOver():
                self._hand_over(event, event.instance)
            case HandOverRefused():
                self._hand_over(event, event.source)
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
                self._end(event)
            case LeaderElected():
                self.term = max(self.term, event.term if sequence else 0)
            case _:
                pass
        return True

    # What can be asked

    def at(self, instance: InstanceId, *stages: str) -> list[BookedRequest]:
        """The requests there in these stages, first come first."""
        found = [r for r in self.requests.values() if r.instance == instance and r.stage in stages]
        return sorted(found, key=lambda request: request.turn)

    def hit_blocks(self, keys: list[BlockKey], instance: InstanceId) -> int:
        """Leading blocks of a prompt that the instance holds, or, where that is more, that it will."""
        known = self.instances.get(instance)
        held = _leading(keys, known.keys if known is not None else set())
        return max(held, _leading(keys, self.promised(instance)))

    def hit_blocks_max(self, keys: list[BlockKey], instance: InstanceId) -> int:
        """The same, with all that the engine has delivered from its cache lately: nobody may claim more."""
        known = self.instances.get(instance)
        delivered = {key for told in self._delivered if told.instance == instance for key in told.keys}
        return _leading(keys, delivered | self.promised(instance) | (known.keys if known is not None else set()))

    def promised(self, instance: InstanceId) -> set[BlockKey]:
        return {key for promise in self._promises if promise.instance == instance for key in promise.keys}

    def uncached(self, prompt_tokens: Tokens, hit_blocks: int, instance: InstanceId) -> Tokens:
        """Tokens to compute: what a hit saves is whole blocks of the engine, and never the last token."""
        width = self.instances[instance].engine_block_tokens
        savable = prompt_tokens - 1 - (prompt_tokens - 1) % width
        return prompt_tokens - max(0, min(hit_blocks * self.block_tokens, savable)) if hit_blocks else prompt_tokens

    def prefill_cost(self, prompt_tokens: Tokens, uncached: Tokens, instance: InstanceId) -> Seconds:
        cost, cached = self.instances[instance].cost, prompt_tokens - uncached
        squares = prompt_tokens**2 - cached**2
        return cost.fixed_s + max(cost.floor_s, cost.per_token_s * uncached + cost.per_token_squared_s * squares)

    def expected(self, instance: InstanceId, seconds: Seconds, tokens: Tokens) -> Seconds:
        """What so much work takes there, by what was learned."""
        return self.learned.get(instance, Learned()).expect(seconds, tokens)

    def engine_work(self, instance: InstanceId, now: Seconds) -> tuple[Seconds, Tokens]:
        """Prefill inside the engine that is not done yet: seconds by its cost model, and tokens."""
        inside = self.at(instance, PREFILL)
        if not inside:
            return 0.0, 0
        first, passed = inside[0], now - self.working_since.get(instance, 0.0)
        seconds, tokens = sum(r.seconds for r in inside), sum(r.uncached for r in inside)
        if passed >= first.seconds or not first.seconds:
            return seconds - first.seconds, tokens - first.uncached
        passed = max(0.0, passed)
        return seconds - passed, tokens - int(first.uncached * (passed / first.seconds))

    def queued(self, instance: InstanceId, now: Seconds) -> Seconds:
        """Expected seconds before who comes last there begins its prefill."""
        seconds, tokens = self.engine_work(instance, now)
        waiting = self.at(instance, PENDING)
        return self.expected(
            instance, seconds + sum(r.seconds for r in waiting), tokens + sum(r.uncached for r in waiting)
        )

    def stalled(self, instance: InstanceId, now: Seconds) -> Seconds:
        """How long the engine has finished no prefill though one was due; 0 up to STALL_SECONDS."""
        inside, waiting = self.at(instance, PREFILL), self.at(instance, PENDING)
        since = now
        if inside:
            seen = [request for request in inside if request.streaming]
            if seen and now > seen[0].granted_at + seen[0].engine_seconds:
                since = self.working_since[instance]
        elif waiting:
            since = max(self.working_since.get(instance, 0.0), waiting[0].placed_at)
        taken_at, idle_since = self._forsaken.get(instance, (0.0, 0.0))
        if taken_at and now - taken_at <= FORSAKEN_SECONDS:
            since = min(since, idle_since)
        return now - since if now - since > STALL_SECONDS else 0.0

    def has_room(self, instance: InstanceId, tokens: Tokens, *, window_tokens: Tokens, running_max: int) -> bool:
        """Whether the engine may be given so many more uncached tokens. One prefill may always be in it."""
        inside = self.at(instance, PREFILL)
        if len(inside) + len(self.at(instance, HANDED_OVER, DECODING)) + 1 > running_max:
            return False
        return not inside or sum(r.uncached for r in inside) + tokens <= window_tokens

    def ready(
        self, request: BookedRequest, excluded: tuple[InstanceId, ...] | list[InstanceId] = ()
    ) -> list[InstanceId]:
        """Who takes its prompt and has not failed it: those that are ready, or where none is, those that are ejected."""
        able = {
            name: known
            for name, known in self.instances.items()
            if known.role != "decode" and known.serves(request) and name not in excluded
        }
        return sorted(name for name, known in able.items() if known.status == self._taking(able))

    def decoders(self) -> list[InstanceId]:
        """Who takes what others have prefilled."""
        decoders = {name: known for name, known in self.instances.items() if known.role != "prefill"}
        return sorted(name for name, known in decoders.items() if known.status == self._taking(decoders))

    def _taking(self, instances: dict[InstanceId, ModelledInstance]) -> str:
        """In which status they take requests."""
        return "ready" if any(known.status == "ready" for known in instances.values()) else "ejected"

    def on_trial(self, instance: InstanceId) -> bool:
        """Whether it takes one request at a time: half-open, and there is somebody else for what it does."""
        known = self.instances.get(instance)
        if known is None or known.status != "ready" or not known.half_open:
            return False
        for part in ("prefill", "decode"):
            able = [k for k in self.instances.values() if k.role in (part, "both") and k.status == "ready"]
            if known in able and not all(k.half_open for k in able):
                return True
        return False

    def tried_by(self, instance: InstanceId) -> list[BookedRequest]:
        """What a half-open instance was given since it is so."""
        since = self.conducts.of(instance).phase_at
        return [r for r in self.at(instance, PREFILL, HANDED_OVER, DECODING) if r.granted_at >= since]

    def peers(self) -> list[Peer]:
        """Instances, as rules on ejections know them."""
        return [
            Peer(
                id=name,
                role=known.role,
                whole=known.status == "ready" and not known.half_open,
                unwell=known.ejected or known.half_open,
                half_open=known.half_open,
                waits=[(r.granted_at, r.engine_seconds) for r in self.at(name, PREFILL) if r.streaming],
            )
            for name, known in self.instances.items()
        ]

    def newest_epoch(self, instance: InstanceId) -> Epoch:
        return self._newest.get(instance, NO_LIFE)

    # The fleet

    def _life(self, instance: InstanceId, epoch: Epoch) -> ModelledInstance | None:
        known = self.instances.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def _means_present(self, event: InstanceDraining | InstanceUndrained | InstanceLeft) -> bool:
        """Whether a decision about an instance, perhaps about an earlier life, is about who is there now."""
        known = self.instances.get(event.instance)
        if known is None:
            return False
        before = event.epoch < known.epoch and event.stamp is not None and event.stamp.as_of >= known.arrived_at
        return event.epoch == known.epoch or before

    def _join(self, event: InstanceJoined) -> None:
        if event.epoch <= self.newest_epoch(event.instance):
            return
        self._newest[event.instance] = event.epoch
        self._forget(event.instance)
        self.conducts.joined(event.instance, event.at)
        self._forsaken.pop(event.instance, None)
        before = self.instances.get(event.instance)
        self.instances[event.instance] = ModelledInstance(
            epoch=event.epoch,
            arrived_at=before.arrived_at if before is not None else self.sequence,
            cost=event.prefill,
            engine_block_tokens=event.engine_block_tokens,
            role=event.role,
            model=event.model,
            model_since=before.model_since if before is not None and before.model == event.model else event.epoch,
            context=event.max_model_len,
            cache=event.cache,
            certain=event.certain,
            adapters=frozenset(event.adapters),
            aliases=frozenset(event.aliases),
            heard_at=event.at,
            draining=before is not None and before.draining,
            counted=before is not None and before.model == event.model and before.counted,
        )
        self._compare_models()

    def _leave(self, event: InstanceLeft) -> None:
        if self._life(event.instance, event.epoch) is not None:
            self._forget(event.instance)
            self.conducts.left(event.instance)
            del self.instances[event.instance]
            self._compare_models()
        elif event.stamp is not None and self._means_present(event):
            known = self.instances[event.instance]
            known.draining, known.arrived_at, known.model_since = False, event.stamp.as_of + 1, known.epoch
            self._compare_models()

    def _compare_models(self) -> None:
        """The pool's model is what most of those serve that have served at all; of several, what the one serves that has served
        its own longest."""
        served = {name: k for name, k in self.instances.items() if k.counted} or self.instances
        models = [known.model for known in served.values()]
        longest = sorted((-models.count(k.model), k.model_since, name, k.model) for name, k in served.items())
        for known in self.instances.values():
            known.misfit = known.model != longest[0][-1]

    def _forget(self, instance: InstanceId) -> None:
        """What an earlier life held, would hold and taught."""
        self._promises = [promise for promise in self._promises if promise.instance != instance]
        self._delivered = [told for told in self._delivered if told.instance != instance]
        self.learned.pop(instance, None)

    def _eject(self, instance: ModelledInstance, event: InstanceEjected | InstanceUnejected) -> None:
        instance.ejected = isinstance(event, InstanceEjected)
        instance.half_open = isinstance(event, InstanceUnejected) and event.half_open
        if isinstance(event, InstanceEjected):
            self.conducts.ejected(event)
            return
        self.conducts.unejected(event)
        if not event.half_open:
            self.learned.pop(event.instance, None)  # taught by one that was sick

    def _fail(self, event: RequestAttemptFailed) -> None:
        known, request = self.instances.get(event.instance), self.requests.get(event.request)
        if known is None:
            return
        begun = event.at
        if request is not None and event.instance in (request.instance, request.prefilled_by):
            if event.instance == request.instance and request.epoch != known.epoch:
                return  # an earlier life of it
            begun = request.granted_at or event.at
        proven = event.failure == "connect_failure"
        self.conducts.failed(event.request, event.instance, event.at, begun, proven=proven)

    # Promises

    def _promise(self, request: BookedRequest) -> None:
        request.promise = Promise(request.instance, request.keys)
        self._promises.append(request.promise)

    def _release(self, promise: Promise | None) -> None:
        if promise in self._promises:
            self._promises.remove(promise)

    def _confirm(self, request: BookedRequest, at: Seconds) -> None:
        """It is computed: the engine's events shall say so soon."""
        promise, request.promise = request.promise, None
        if promise is not None:
            promise.until = at + CONFIRMED_SECONDS * self.speed
            self._confirming.append(promise)

    def _settle(self, now: Seconds) -> None:
        """In the order of the first tokens, so that one with a wrong date holds up those behind it."""
        while self._confirming and (self._confirming[0].until or 0.0) <= now:
            self._release(self._confirming.pop(0))
        while self._delivered and (self._delivered[0].until or 0.0) <= now:
            self._delivered.pop(0)

    def _evict(self, event: CacheEvent) -> None:
        """A computed prompt that lost a block is promised no longer."""
        if isinstance(event, CacheCleared):
            self._delivered = [told for told in self._delivered if told.instance != event.instance]
            lost = [p for p in self._confirming if p.instance == event.instance]
        elif isinstance(event, BlocksRemoved) and not event.expired:
            keys = set(unpack_keys(event.keys))
            for told in self._delivered:
                if told.instance == event.instance:
                    told.keys = [key for key in told.keys if key not in keys]
            lost = [p for p in self._confirming if p.instance == event.instance and not keys.isdisjoint(p.keys)]
        else:
            return
        for promise in lost:
            self._confirming.remove(promise)
            self._release(promise)

    # Requests

    def _arrive(self, event: RequestArrived) -> None:
        if event.request not in self.requests and event.request not in self.ended:
            self.requests[event.request] = BookedRequest(
                id=event.request,
                keys=unpack_keys(event.keys),
                prompt_tokens=event.prompt_tokens,
                arrived_at=event.arrived_at,
                slo_ttft=event.slo_ttft + self._extra_time(event),
                streaming=event.streaming,
                adapter=event.adapter,
                alias=event.alias,
                context_tokens=event.context_tokens,
                taken_at=event.at,
            )

    def _extra_time(self, event: RequestArrived) -> Seconds:
        """What an outage gives to the budgets of those whom it made wait, and to those behind them."""
        began, lasted = self._outage
        left = max(0.0, lasted - BACKLOG_SHARE * max(0.0, event.at - began))
        if event.held_up >= HELD_UP_SECONDS_MIN * self.speed:
            waited = min(event.held_up, HELD_UP_SECONDS_MAX * self.speed)
            if waited > left:
                self._outage, left = (event.at, waited), waited
        return left

    def _place(self, event: RequestPlaced) -> None:
        request = self.requests.get(event.request)
        if request is None or (request.stage != ARRIVED and event.attempt <= request.attempt):
            return
        self._withdraw(request)
        request.slo_ttft += event.lost_seconds
        request.attempt, request.excluded = event.attempt, tuple(event.excluded)
        self._queue(request, event.instance, event.uncached_tokens, event.prefill_seconds)
        request.decode, request.placed_at = event.decode, event.at

    def _migrate(self, event: RequestMigrated) -> None:
        request = self.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (
            PREFILL if event.rebound else PENDING,
            event.source,
        ):
            return
        if event.rebound:
            since = self.working_since.get(event.source, 0.0)
            idle = min(since, self._forsaken.get(event.source, (0.0, since))[1])
            self._forsaken[event.source] = (event.at, idle)
        self._withdraw(request)
        self._queue(request, event.instance, event.uncached_tokens, event.prefill_seconds)
        request.decode, request.placed_at = event.decode, event.at
        request.rebound_from = event.source if event.rebound else request.rebound_from

    def _queue(self, request: BookedRequest, instance: InstanceId, uncached: Tokens, seconds: Seconds) -> None:
        request.stage, request.instance, request.prefilled_by = PENDING, instance, NOBODY
        request.epoch = self.newest_epoch(instance)
        request.uncached, request.seconds = uncached, seconds
        self._next_turn(request)
        self._promise(request)

    def _withdraw(self, request: BookedRequest) -> None:
        """Out of where it is: it will be computed elsewhere."""
        if request.stage == ARRIVED:
            return
        if request.stage != DECODING:
            self._release(request.promise)
        request.promise, request.decode, request.stage = None, NOBODY, ARRIVED

    def _next_turn(self, request: BookedRequest) -> None:
        self._turn += 1
        request.turn = self._turn

    def _grant(self, event: RequestGranted) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        there = request.instance == event.instance and request.stage in (PENDING, PREFILL)
        if event.stamp is None and not there:
            if request.stage == DECODING or event.instance not in self.instances:
                return
            request.attempt = event.attempt
            self._rehome(request, event.instance)
            request.decode = event.decode or request.decode
        if request.stage == PENDING and request.instance == event.instance:
            request.rebind = event.rebind
            self._enter(request, event.at)

    def _rehome(self, request: BookedRequest, instance: InstanceId) -> None:
        """An ingress has sent it there, and nobody knows what was cached."""
        self._withdraw(request)
        if request.rebound_from == instance:
            request.rebound_from = NOBODY
        uncached = request.prompt_tokens
        self._queue(request, instance, uncached, self.prefill_cost(request.prompt_tokens, uncached, instance))

    def _enter(self, request: BookedRequest, at: Seconds) -> None:
        if not self.at(request.instance, PREFILL):
            self.working_since[request.instance] = at
        seconds, tokens = self.engine_work(request.instance, at)
        request.engine_seconds, request.engine_tokens = seconds + request.seconds, tokens + request.uncached
        request.stage, request.granted_at = PREFILL, at
        self._next_turn(request)

    def _first_token(self, event: PrefillFinished) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        learnable = event.stamp is None and request.rebound_from == NOBODY
        told_by_source = event.stamp is None and request.rebound_from == event.instance != NOBODY
        if told_by_source and event.instance in self.instances and request.stage in (PENDING, PREFILL):
            self._rehome(request, event.instance)  # its ingress had not heard that it was re-bound
            self._enter(request, event.at)
        if request.instance != event.instance or request.stage not in (PREFILL, HANDED_OVER):
            return
        if request.stage == PREFILL:
            self.working_since[event.instance] = event.at
            request.decode = NOBODY
            if event.stamp is None:
                self._forsaken.pop(event.instance, None)
            if learnable:
                self._learn(request, event.at, event.prefill)
        request.stage = DECODING
        self._confirm(request, event.at)

    def _learn(self, request: BookedRequest, at: Seconds, prefill: Seconds) -> None:
        took = FirstToken(at, request.granted_at, prefill, request.engine_seconds)
        self.conducts.of(request.instance).first_tokens.append(took)
        learned = self.learned.setdefault(request.instance, Learned())
        learned.learn(request.engine_seconds, at - request.granted_at, request.engine_tokens)

    def _hand_over(self, event: RequestHandedOver | HandOverRefused, to: InstanceId) -> None:
        request = self.requests.get(event.request)
        if request is None or event.attempt < request.attempt:
            return
        if request.stage == PREFILL and request.instance == event.source:
            self.working_since[event.source] = event.at
            if event.prefill > 0:
                self._learn(request, event.at, event.prefill)
            self._confirm(request, event.at)
        elif request.with_nobody and request.instance == event.source != to:
            self._release(request.promise)
        else:
            gone = request.stage == DECODING or (request.stage == HANDED_OVER and request.instance == to)
            if event.stamp is not None or gone:
                return
            self._withdraw(request)
        request.stage, request.attempt, request.decode = HANDED_OVER, event.attempt, NOBODY
        request.instance, request.prefilled_by = to, event.source
        request.epoch = self.newest_epoch(to)
        self._next_turn(request)
        self._promise(request)

    def _end(self, event: RequestEnd) -> None:
        self.ended.add(event.request)
        if not isinstance(event, RequestFinished):
            self.conducts.ended(event.request, given_up=isinstance(event, RequestCancelled))
        request = self.requests.pop(event.request, None)
        if request is None:
            return
        if isinstance(event, RequestFinished):
            self._deliver(request, event)
            if event.instance == request.instance:
                self.conducts.of(event.instance).served.append(Served(event.at, request.granted_at))
        computed = isinstance(event, RequestFinished) and event.instance != (request.rebound_from or None)
        if computed and request.stage in (PREFILL, HANDED_OVER):
            self._confirm(request, event.at)
        elif request.stage in (PENDING, PREFILL, HANDED_OVER):
            self._release(request.promise)

    def _deliver(self, request: BookedRequest, event: RequestFinished) -> None:
        """The engine says what it had of the prompt."""
        known = self.instances.get(event.instance)
        if known is not None and event.cached_tokens >= 0:
            until = event.at + DELIVERED_SECONDS * self.speed
            self._delivered.append(
                Promise(event.instance, request.keys[: event.cached_tokens // self.block_tokens], until)
            )
            held = self.block_tokens * _leading(request.keys, known.keys)
            told = (event.predicted_cached_tokens, held)
            known.surprises += any(abs(event.cached_tokens - tokens) > self.block_tokens for tokens in told)


def _leading(keys: list[BlockKey], among: set[BlockKey]) -> int:
    count = 0
    while count < len(keys) and keys[count] in among:
        count += 1
    return count
