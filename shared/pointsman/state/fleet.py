"""The instances of a pool: status, and how far their cache contents are known (`Instance.knowledge`). Knowledge is
`exact` while events are complete and digests agree; `degraded` after a gap, a differing digest, a failed probe or
contradicting deliveries; `blind` without events. A pool serves the model of most instances that have answered; ties go
to the model served longest. Instances with another model are *unschedulable*."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple, Protocol

from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import ANY_RANK, DecodeCost, InstanceJoined, InstanceReported, PrefillCost, Role
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, Sequence, Tokens
from pointsman.state.derived import Derived
from pointsman.state.fleet_counts import FleetCounts, Share


class Status(StrEnum):
    """`down`: the engine does not answer. `suspected`: the worker is silent. `unschedulable`: it does not fit its pool.
    `ejected`: an outlier."""

    READY = "ready"
    DOWN = "down"
    SUSPECTED = "suspected"
    DRAINING = "draining"
    EJECTED = "ejected"
    UNSCHEDULABLE = "unschedulable"


class Knowledge(StrEnum):
    EXACT = "exact"
    DEGRADED = "degraded"
    BLIND = "blind"


class Demand(Protocol):
    """Requirements of a request; empty or 0: any instance."""

    @property
    def adapter(self) -> str: ...

    @property
    def alias(self) -> str: ...

    @property
    def context_tokens(self) -> Tokens: ...


@dataclass(frozen=True, slots=True)
class NoDemand:
    adapter: str = ""
    alias: str = ""
    context_tokens: Tokens = 0


NO_DEMAND = NoDemand()
CLOCK_BACK_SECONDS_MIN: EngineSeconds = 60.0
"""A report that is so much earlier than the one before is of a worker whose clock was ahead; less is an old copy."""


@dataclass(slots=True)
class Instance:
    id: InstanceId
    epoch: Epoch
    url: str
    model: str
    cost: PrefillCost
    block_tokens: Tokens
    engine_block_tokens: Tokens
    kv_capacity_tokens: Tokens
    max_model_len: Tokens
    joined_at: EngineSeconds
    heard_at: EngineSeconds
    cache: str
    """What its worker knew of the contents at the epoch's begin: "empty" (all, from then on), "unknown" or "no_events"."""
    model_since: Epoch = field(compare=False)
    """The epoch since which it has served `model` without a break."""
    arrived_at: Sequence = field(default=0, compare=False)
    """Log entry of the first join of this stay, under any epoch."""
    excused_until: EngineSeconds = 0.0
    """By its worker's clock: it said that it pauses, and would be back by then."""
    serving: bool = True
    suspected: bool = False
    draining: bool = False
    draining_since: EngineSeconds = field(default=0.0, compare=False)
    leaving: bool = False
    becomes: Role | Literal[""] = ""
    """The role that it takes once its drain is over."""
    drain_decided: Stamp | None = field(default=None, compare=False)
    """The newest decision about its drain or role."""
    ejection_decided: Stamp | None = field(default=None, compare=False)
    ejected: bool = False
    half_open: bool = False
    """Ejection is over but unproven: takes one request at a time."""
    answered: bool = False
    """Its worker has reported a serving engine in this epoch."""
    sequence: Sequence = 0
    """Of its cache events."""
    reported: Sequence = field(default=0, compare=False)
    """Log entry of its newest report."""
    parity: bool | None = None
    """Whether a probe found the engine's block keys equal to ours; None: not probed yet."""
    forged: bool = False
    """The log has cache events that its worker did not write; ends with the epoch."""
    counted: bool = False
    """It has served its present model, and counts for the model of the pool."""
    doubt: str = ""
    """Why the index may differ from what the worker wrote; empty: it does not. Ends with a snapshot or an equal report."""
    cache_detail: str = ""
    certain: bool = True
    """By its worker: every block is confirmed by engine events."""
    contradicted: str = field(default="", compare=False)
    """How the engine's cached tokens differed from the index (`Contradictions`); empty: they do not."""
    known_since: EngineSeconds = field(default=0.0, compare=False)
    known_as: Knowledge | None = field(default=None, compare=False)
    """`knowledge` since `known_since`."""
    waiting: int = 0
    running: int = 0
    idle_since: EngineSeconds = 0.0
    """0 while it has work, by its reports."""
    answers: int = 0
    """First tokens and ends that ingresses told of it."""
    counts_load: bool = False
    """It has reported load in this epoch; only then a report of none is meaningful."""
    kv_usage: float = 0.0
    adapters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    role: Role = "both"
    announced_role: Role = "both"
    """By its worker. `role` differs after an InstanceRoleChanged."""
    announced_since: Epoch = field(default=Epoch(0), compare=False)
    role_switching: bool = False
    decode: DecodeCost | None = None
    transfer_tokens_per_s: float = 0.0
    dp_rank: int = ANY_RANK
    fetches: bool = False
    unschedulable: str = ""

    @property
    def status(self) -> Status:
        return Status.SUSPECTED if self.suspected else self._standing

    @property
    def unheard(self) -> bool:
        """It took requests when its worker fell silent."""
        return self.suspected and self._standing is Status.READY

    @property
    def _standing(self) -> Status:
        """Without suspicion."""
        if not self.serving:
            return Status.DOWN
        if self.unschedulable:
            return Status.UNSCHEDULABLE
        if self.draining:
            return Status.DRAINING
        return Status.EJECTED if self.ejected else Status.READY

    def can_serve(self, demand: Demand) -> bool:
        """An unknown context length (0) fits all."""
        adapter, alias = demand.adapter, demand.alias
        return (
            (not adapter or adapter in self.adapters)
            and (not alias or alias in self.aliases)
            and (self.max_model_len <= 0 or demand.context_tokens <= self.max_model_len)
        )

    @property
    def knowledge(self) -> Knowledge:
        if self.cache == "no_events":
            return Knowledge.BLIND
        if self.doubt or not self.relied_on or not self.parity:
            return Knowledge.DEGRADED
        return Knowledge.EXACT

    def is_replaceable(self, by: Collection["Instance"]) -> bool:
        """Whether others among these prefill, if it does, and decode, if it does."""
        roles = {other.role for other in by if other.id != self.id}
        prefills, decodes = bool(roles & {"both", "prefill"}), bool(roles & {"both", "decode"})
        return (prefills or self.role == "decode") and (decodes or self.role == "prefill")

    def drains_so(self, *, leaving: bool, becomes: Role | Literal[""]) -> bool:
        """Whether such a drain would change nothing."""
        return self.draining and self.leaving == leaving and self.becomes == becomes

    def may_become(self, epoch: Epoch) -> bool:
        """Whether a change of role decided in `epoch` still holds."""
        return self.role_switching and epoch >= self.announced_since

    @property
    def relied_on(self) -> bool:
        return self.cache == "empty" and self.certain and not self.contradicted

    @property
    def contents_known(self) -> bool:
        """Whether events tell what it holds, as far as nothing speaks against it."""
        return self.relied_on and not self.doubt and self.parity is not False

    @property
    def knowledge_reason(self) -> str:
        """Why knowledge is not exact; empty if it is."""
        if self.cache == "no_events":
            return "the engine publishes no KV events"
        if self.doubt or self.contradicted:
            return self.doubt or self.contradicted
        if self.cache == "unknown":
            return self.cache_detail or "it joined with unknown contents"
        if not self.certain:
            return "missed events cannot be had again: no replay socket answers, or not to its end yet"
        if self.parity is None:
            return "no probe has compared keys yet"
        return "" if self.parity else "a probe found that keys differ"


class _Roster(NamedTuple):
    """Who serves. Names are sorted: rings and ties depend on the order. `able`: `ready` and `decoders`. `on_trial`: half-open
    instances. `shortest_context`: no known `max_model_len` is less; 0: none is known."""

    ready: tuple[InstanceId, ...]
    decoders: tuple[InstanceId, ...]
    able: frozenset[InstanceId]
    on_trial: tuple[InstanceId, ...]
    shortest_context: Tokens

    def without(self, instance: InstanceId) -> "_Roster | None":
        """None: others may serve in its place."""
        if instance not in self.able:
            return self
        ready, decoders = (tuple(name for name in names if name != instance) for names in (self.ready, self.decoders))
        if self.on_trial or (self.ready and not ready) or (self.decoders and not decoders):
            return None
        return self._replace(ready=ready, decoders=decoders, able=self.able - {instance})


class Fleet:
    DERIVED: ClassVar[Derived] = {"_roster": lambda: None, "_counts": lambda: None}

    def __init__(self, *, checks_model: bool = True, unheard_serve: bool = True) -> None:
        self.model = ""
        self._checks_model = checks_model
        self._unheard_serve = unheard_serve
        self._instances: dict[InstanceId, Instance] = {}
        self._roster: _Roster | None = None
        """None: made when it is asked for. The same object until something changes."""
        self._counts: FleetCounts | None = None
        """None: made at the next change."""
        self.kv_capacity_tokens: Tokens = 0
        """Of all instances that told it."""
        self.split = False
        """Some instance only prefills or only decodes."""
        self.fetches = False
        """Two or more can fetch prefixes from each other."""

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._instances

    def get(self, instance: InstanceId) -> Instance | None:
        return self._instances.get(instance)

    def __getitem__(self, instance: InstanceId) -> Instance:
        return self._instances[instance]

    @property
    def instances(self) -> list[Instance]:
        return list(self._instances.values())

    @property
    def ready(self) -> tuple[InstanceId, ...]:
        """Instances that take prompts, sorted by name. If there are none, those that are ejected (Envoy's panic mode); if there
        are none either, those whose worker is silent."""
        return (self._roster or self._made_roster()).ready

    @property
    def any_ready(self) -> bool:
        """Whether there is one in `ready`. Most often known without listing who serves."""
        taking = any(i.status is Status.READY and i.role != "decode" for i in self._instances.values())
        return taking or bool(self.ready)

    @property
    def decoders(self) -> tuple[InstanceId, ...]:
        """Instances that decode, sorted by name, chosen like `ready`."""
        return (self._roster or self._made_roster()).decoders

    @property
    def able(self) -> frozenset[InstanceId]:
        """`ready` and `decoders`."""
        return (self._roster or self._made_roster()).able

    @property
    def on_trial(self) -> tuple[InstanceId, ...]:
        """Half-open instances, sorted by name; none if there are no others."""
        return (self._roster or self._made_roster()).on_trial

    def _made_roster(self) -> _Roster:
        present = sorted(self._instances.values(), key=lambda instance: instance.id)
        takers = self._first_able([instance for instance in present if instance.role != "decode"])
        decoders = self._first_able([instance for instance in present if instance.role != "prefill"])
        lengths = (instance.max_model_len for instance in takers + decoders)
        made = self._roster = _Roster(
            ready=tuple(instance.id for instance in takers),
            decoders=tuple(instance.id for instance in decoders),
            able=frozenset(instance.id for instance in takers + decoders),
            on_trial=tuple(sorted({*_on_trial(takers), *_on_trial(decoders)})),
            shortest_context=min((length for length in lengths if length > 0), default=0),
        )
        return made

    def ready_for(self, demand: Demand, excluded: Collection[InstanceId] = ()) -> tuple[InstanceId, ...]:
        """Those of `ready` that can serve the request and are not excluded; if none, others in the same order."""
        roster = self._roster or self._made_roster()
        ready = roster.ready
        anybody = not demand.adapter and not demand.alias and demand.context_tokens <= roster.shortest_context
        if anybody and not excluded:
            return ready

        def serves(instance: InstanceId) -> bool:
            return instance not in excluded and (anybody or self._instances[instance].can_serve(demand))

        if able := tuple(filter(serves, ready)):
            return able
        others = [i for i in self._instances.values() if i.role != "decode" and serves(i.id)]
        return tuple(sorted(instance.id for instance in self._first_able(others)))

    @property
    def unserved(self) -> str:
        """What no instance does; empty if requests can be served."""
        if not self.ready and not self.decoders:
            return "no instance takes requests"
        if not self.ready:
            return "no instance prefills"
        return "" if self.decoders else "no instance decodes"

    def _first_able(self, instances: list[Instance]) -> list[Instance]:
        """See `ready`."""
        for status in (Status.READY, Status.EJECTED):
            if able := [instance for instance in instances if instance.status is status]:
                return able
        return list(filter(self.serves_unheard, instances))

    def serves_unheard(self, instance: Instance) -> bool:
        """Whether it takes what no other instance can serve, though its worker is silent."""
        return self._unheard_serve and instance.unheard

    def join(self, event: InstanceJoined) -> Instance:
        known = self._instances.get(event.instance)
        stays = known is not None and event.role_switching and event.role == known.announced_role
        instance = Instance(
            id=event.instance,
            epoch=event.epoch,
            url=event.url,
            model=event.model,
            cost=event.prefill,
            block_tokens=event.block_tokens,
            engine_block_tokens=event.engine_block_tokens,
            kv_capacity_tokens=event.kv_capacity_tokens,
            max_model_len=event.max_model_len,
            joined_at=event.at,
            heard_at=event.at,
            cache=event.cache,
            draining=known.draining if known else False,
            draining_since=known.draining_since if known else 0.0,
            leaving=known.leaving if known else False,
            becomes=known.becomes if known and stays else "",
            drain_decided=known.drain_decided if known else None,
            adapters=tuple(event.adapters),
            aliases=tuple(event.aliases),
            role=known.role if known and stays else event.role,
            announced_role=event.role,
            announced_since=known.announced_since if known and stays else event.epoch,
            role_switching=event.role_switching,
            decode=event.decode,
            transfer_tokens_per_s=max(1.0, event.transfer_tokens_per_s) if event.transfer_tokens_per_s else 0.0,
            dp_rank=event.dp_rank,
            fetches=event.fetches,
            model_since=known.model_since if known and known.model == event.model else event.epoch,
            certain=event.certain,
            cache_detail=event.cache_detail,
            known_since=known.known_since if known else event.at,
            known_as=known.known_as if known else None,
            counted=known.counted if known and known.model == event.model else False,
        )
        if known is not None and known.becomes and not instance.becomes:
            instance.draining = False  # its worker decided otherwise
        self._instances[event.instance] = instance
        self._changed(event.instance)
        return instance

    def apply_report(self, event: InstanceReported, sequence: Sequence, *, clock_may_go_back: bool) -> None:
        instance = self._instances[event.instance]
        instance.reported = sequence
        went_back = clock_may_go_back and event.at < instance.heard_at - CLOCK_BACK_SECONDS_MIN
        instance.heard_at = event.at if went_back else max(instance.heard_at, event.at)
        instance.excused_until = event.at + event.back_within if event.back_within else 0.0
        instance.answered = instance.answered or event.serving
        instance.waiting = event.waiting
        instance.running = event.running
        if event.waiting or event.running or not event.serving:
            instance.idle_since = 0.0
            instance.counts_load = instance.counts_load or event.serving
        else:
            instance.idle_since = instance.idle_since or instance.heard_at
        instance.kv_usage = event.kv_usage
        instance.adapters = tuple(event.adapters)
        instance.aliases = tuple(event.aliases)
        instance.certain = event.certain
        if event.serving and not instance.counted:
            instance.counted = True
            self._changed(instance.id)
        if instance.serving != event.serving or instance.suspected:
            instance.serving = event.serving
            instance.suspected = False
            self._roster = None

    def note_answer(self, instance: InstanceId, at: EngineSeconds, *, dated: bool) -> None:
        """`dated`: before fold version 17; the ingress's clock may be wrong, and an arrival that tells so may be read later."""
        known = self._instances.get(instance)
        if known is None:
            return
        if not dated:
            known.answers += 1
        elif known.idle_since:
            known.idle_since = max(known.idle_since, at)

    def note_knowledge(self, instance: InstanceId, at: EngineSeconds) -> None:
        known = self._instances.get(instance)
        if known is not None and known.known_as is not known.knowledge:
            known.known_as, known.known_since = known.knowledge, at

    def suspect(self, instance: InstanceId) -> None:
        self._instances[instance].suspected = True
        self._roster = None

    def drain(
        self,
        instance: InstanceId,
        *,
        draining: bool,
        leaving: bool = False,
        becomes: Role | Literal[""] = "",
        at: EngineSeconds = 0.0,
    ) -> None:
        known = self._instances[instance]
        known.draining, known.leaving, known.becomes, known.draining_since = draining, leaving, becomes, at
        self._roster = None

    def change_role(self, instance: InstanceId, role: Role) -> None:
        self._instances[instance].role = role
        self.drain(instance, draining=False)
        self._changed(instance)

    def eject(self, instance: InstanceId) -> None:
        self._instances[instance].ejected = True
        self._instances[instance].half_open = False
        self._roster = None

    def uneject(self, instance: InstanceId, *, half_open: bool) -> None:
        self._instances[instance].ejected = False
        self._instances[instance].half_open = half_open
        self._roster = None

    def note_restart(self, instance: InstanceId, arrived_at: Sequence) -> None:
        """The leader removed it before it joined again: the present epoch inherits nothing."""
        self.drain(instance, draining=False)
        known = self._instances[instance]
        known.role, known.announced_since = known.announced_role, known.epoch
        known.arrived_at, known.model_since = arrived_at, known.epoch
        self._changed(instance)

    def leave(self, instance: InstanceId) -> None:
        self._instances.pop(instance, None)
        roster, model = self._roster, self.model
        self._changed(instance)
        if roster is not None and self.model == model:
            self._roster = roster.without(instance)

    def _changed(self, name: InstanceId) -> None:
        self._roster = None
        counts, instances, changed = self._counts, self._instances, [name]
        if counts is None:
            counts = self._counts = FleetCounts()
            changed = list(instances)
        for each in changed:
            counts.put(each, self._share(instances[each]) if each in instances else None)
        if self._checks_model:
            model = counts.model or self.model
            if model != self.model:
                self.model, changed = model, list(instances)
            for instance in filter(None, map(instances.get, changed)):
                instance.unschedulable = _misfit(instance, model)
        fitting = self.model if self._checks_model else ""
        self.kv_capacity_tokens = counts.kv_capacity_tokens
        self.fetches = counts.fetching[fitting] > 1
        self.split = counts.taking_part[fitting] > 0

    def _share(self, instance: Instance) -> Share:
        return Share(
            model=instance.model if self._checks_model else "",
            model_since=instance.model_since,
            counted=instance.counted,
            kv_capacity_tokens=instance.kv_capacity_tokens,
            fetches=instance.fetches,
            takes_part=instance.role != "both",
        )


def _on_trial(instances: list[Instance]) -> list[InstanceId]:
    half_open = [instance.id for instance in instances if instance.half_open]
    return half_open if len(half_open) < len(instances) else []


def _misfit(instance: Instance, model: str) -> str:
    return "" if instance.model == model else f"it serves the model {instance.model!r}, the pool {model!r}"
