"""Who is in the fleet, and how far what we know of them can be trusted.

An instance that reports a newer epoch has started again with an empty cache; older epochs are ignored. Knowledge
is `exact` while events flow, each missed one can be had again and digests agree; `degraded` after a gap, a differing
digest, a failed probe or deliveries that contradict the events, and where missed events cannot be had again; and
`blind` where the engine publishes no events.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from pointsman.contracts.fleet import ANY_RANK, DecodeCost, InstanceJoined, InstanceReported, PrefillCost, Role
from pointsman.primitives import Epoch, InstanceId, Seconds, Sequence, Tokens


class Status(StrEnum):
    """`ready` takes requests. `down`: its engine does not answer. `suspected`: its worker is silent."""

    READY = "ready"
    DOWN = "down"
    SUSPECTED = "suspected"
    DRAINING = "draining"


class Knowledge(StrEnum):
    EXACT = "exact"
    DEGRADED = "degraded"
    BLIND = "blind"


@dataclass(slots=True)
class Instance:
    """One engine as the log tells it. `sequence` is the last cache event applied in this epoch."""

    id: InstanceId
    epoch: Epoch
    url: str
    model: str
    cost: PrefillCost
    block_tokens: Tokens
    engine_block_tokens: Tokens
    kv_capacity_tokens: Tokens
    max_model_len: Tokens
    joined_at: Seconds
    heard_at: Seconds
    cache: str
    arrived_at: Sequence = field(default=0, compare=False)
    """Where in the log it joined when it was not there before: since then it has been, under whatever epoch."""
    serving: bool = True
    suspected: bool = False
    draining: bool = False
    leaving: bool = False
    """Whether a scaler will stop it once it has drained."""
    answered: bool = False
    """Whether its worker has reported in this epoch that the engine serves: before, it is no capacity."""
    sequence: Sequence = 0
    parity: bool | None = None
    doubt: str = ""
    """Why the index may differ from the engine's cache; empty while it does not."""
    cache_detail: str = ""
    """Why its contents are unknown."""
    certain: bool = True
    """Whether missed events can be had again."""
    contradicted: str = field(default="", compare=False)
    """How the engine has contradicted its own events, by what it delivered from its cache; empty while it has not."""
    known_since: Seconds = field(default=0.0, compare=False)
    """When `knowledge` last changed."""
    known_as: "Knowledge | None" = field(default=None, compare=False)
    """What it changed to."""
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves, each under a name of its own."""
    aliases: tuple[str, ...] = ()
    """Further names of `model` itself."""
    role: Role = "both"
    decode: DecodeCost | None = None
    transfer_tokens_per_s: float = 0.0
    dp_rank: int = ANY_RANK

    @property
    def status(self) -> Status:
        if self.suspected:
            return Status.SUSPECTED
        if not self.serving:
            return Status.DOWN
        return Status.DRAINING if self.draining else Status.READY

    def has(self, adapter: str) -> bool:
        """Whether it can serve requests for this LoRA adapter; for those without one (empty) every instance can."""
        return not adapter or adapter in self.adapters

    @property
    def knowledge(self) -> Knowledge:
        if self.cache == "no_events":
            return Knowledge.BLIND
        if self.doubt or not self.relied_on or not self.parity:
            return Knowledge.DEGRADED
        return Knowledge.EXACT

    @property
    def relied_on(self) -> bool:
        """Whether what its events say is taken for all that is in its cache."""
        return self.cache == "empty" and self.certain and not self.contradicted

    @property
    def knowledge_reason(self) -> str:
        """Why its cache is not known exactly; empty where it is."""
        if self.cache == "no_events":
            return "the engine publishes no KV events"
        if self.doubt or self.contradicted:
            return self.doubt or self.contradicted
        if self.cache == "unknown":
            return self.cache_detail or "it joined with unknown contents"
        if not self.certain:
            return "missed events cannot be had again: no replay socket answers"
        if self.parity is None:
            return "no probe has compared keys yet"
        return "" if self.parity else "a probe found that keys differ"


class Fleet:
    """The instances, in the order they first joined."""

    def __init__(self) -> None:
        self._instances: dict[InstanceId, Instance] = {}
        self._ready: tuple[InstanceId, ...] | None = None
        self._decoders: tuple[InstanceId, ...] = ()
        self.split = False
        """Whether there is an instance that does not do all of a request."""

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
        """Instances that take new requests, that is prompts, sorted by name: the ring and every tie depend on this order."""
        if self._ready is None:
            able = sorted((i.id, i.role) for i in self._instances.values() if i.status is Status.READY)
            self._ready = tuple(instance for instance, role in able if role != "decode")
            self._decoders = tuple(instance for instance, role in able if role != "prefill")
        return self._ready

    def ready_with(self, adapter: str) -> tuple[InstanceId, ...]:
        """Those of `ready` that have this LoRA adapter; all of them where none is asked for (empty)."""
        return tuple(i for i in self.ready if self._instances[i].has(adapter)) if adapter else self.ready

    @property
    def decoders(self) -> tuple[InstanceId, ...]:
        """Instances that take what others have prefilled, sorted by name."""
        _ = self.ready  # which sorts both out
        return self._decoders

    def join(self, event: InstanceJoined) -> Instance:
        """Take in a new instance or a new epoch of a known one; the caller has checked the epoch."""
        known = self._instances.get(event.instance)
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
            leaving=known.leaving if known else False,
            adapters=tuple(event.adapters),
            aliases=tuple(event.aliases),
            role=event.role,
            decode=event.decode,
            transfer_tokens_per_s=event.transfer_tokens_per_s,
            dp_rank=event.dp_rank,
            certain=event.certain,
            cache_detail=event.cache_detail,
            known_since=known.known_since if known else event.at,
            known_as=known.known_as if known else None,
        )
        self._instances[event.instance] = instance
        self._changed()
        return instance

    def hear(self, event: InstanceReported) -> None:
        """Load and liveness from a report."""
        instance = self._instances[event.instance]
        instance.heard_at = max(instance.heard_at, event.at)
        instance.answered = instance.answered or event.serving
        instance.waiting = event.waiting
        instance.running = event.running
        instance.kv_usage = event.kv_usage
        instance.adapters = tuple(event.adapters)
        instance.aliases = tuple(event.aliases)
        instance.certain = event.certain
        if instance.serving != event.serving or instance.suspected:
            instance.serving = event.serving
            instance.suspected = False
            self._ready = None

    def note_knowledge(self, instance: InstanceId, at: Seconds) -> None:
        """Remember since when the instance is known as well as it is now; no-op for one that is not there."""
        known = self._instances.get(instance)
        if known is not None and known.known_as is not known.knowledge:
            known.known_as, known.known_since = known.knowledge, at

    def suspect(self, instance: InstanceId) -> None:
        self._instances[instance].suspected = True
        self._ready = None

    def drain(self, instance: InstanceId, *, draining: bool, leaving: bool = False) -> None:
        self._instances[instance].draining = draining
        self._instances[instance].leaving = leaving
        self._ready = None

    def begin_anew(self, instance: InstanceId, arrived_at: Sequence) -> None:
        """The leader had let go of it before it joined again: its present life takes nothing over."""
        self.drain(instance, draining=False)
        self._instances[instance].arrived_at = arrived_at

    def leave(self, instance: InstanceId) -> None:
        self._instances.pop(instance, None)
        self._changed()

    def _changed(self) -> None:
        self._ready = None
        self.split = any(instance.role != "both" for instance in self._instances.values())
