"""The fleet as the ingress knows it: which engines can be asked, which models there are, what their block keys stand for,
and who leads.

Folds the fleet's events with `State`, like everyone else. What the ingress cannot know from those events alone
(queues, caches) is the scheduler's business.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.fleet import FleetEvent
from pointsman.ports import Clock, EventLog, LogEntry, LogReset
from pointsman.primitives import Epoch, InstanceId, Seconds, Term, Tokens
from pointsman.runtime.containment import DeadLetterWatch, contained
from pointsman.runtime.health import HealthBoard
from pointsman.state.fleet import Instance, Status
from pointsman.state.state import PoolSettings, State

log = structlog.get_logger()

VIEW_PART = "view"
FRESH_WALL_SECONDS: Seconds = 5.0
"""Workers report every second; one not heard for this long may be gone already."""


@dataclass(frozen=True, slots=True)
class Model:
    """A name that clients may ask for. `base` is the model that engines were started with, `adapter` the LoRA adapter on
    it (empty without one). Engine time `since` it was first served."""

    name: str
    base: str
    adapter: str
    since: Seconds
    context_tokens: Tokens = 0
    """Of a request that is so short that its length makes no difference (`Demand`)."""

    @property
    def alias(self) -> str:
        """The name, where it is a further one of the base model itself."""
        return "" if self.adapter or self.name == self.base else self.name


class FleetView:
    """What the log says of the fleet, as of the last event read."""

    def __init__(self, clock: Clock, board: HealthBoard) -> None:
        self._clock = clock
        self._board = board
        self._state = self._nothing()
        self._models: dict[str, Model] = {}
        self._leaders_block_tokens: Tokens = 0
        self._joined_block_tokens: Tokens = 0
        self._changed = asyncio.Event()
        self._dead_letters = DeadLetterWatch()
        self._hear_elections: list[Callable[[Term], None]] = []
        self.is_read = False
        """Whether the log has been read to its end once."""
        board.missing(VIEW_PART, "the log is not read yet")
        self._note_ready()

    def on_election(self, hear: Callable[[Term], None]) -> None:
        """Call `hear` with the term of each leader that the log tells of; with 0 where the log begins anew."""
        self._hear_elections.append(hear)

    async def follow(self, events: EventLog) -> None:
        """Fold the fleet's events and elections, for ever."""
        async for entry in events.read(kinds=("fleet", "leader"), at_end=self._at_end):
            if isinstance(entry, LogReset):
                log.warning("fleet_view_reset", reason=entry.reason)
                self._state = self._nothing()
                self._elected(Term(0))
            else:
                with contained("fleet_view"):
                    self._take_in(entry)
                self._dead_letters.look(self._state.dead_letters)
            self._note_ready()
            self._changed.set()

    def _at_end(self) -> None:
        if not self.is_read:
            self.is_read = True
            self._board.restored(VIEW_PART)
            self._changed.set()

    def _take_in(self, entry: LogEntry) -> None:
        if entry.event is None:
            self._state.skip(entry.sequence, subject=entry.subject, problem=entry.problem)
        elif isinstance(entry.event, LeaderElected):
            known = self._state.term
            self._state.apply(entry.event, entry.sequence)
            if self._state.term > known:  # else it is no election: a leader comes with a term of its own
                self._leaders_block_tokens = int(entry.event.pool.get("block_tokens", 0))
            self._elected(self._state.term)
        elif isinstance(entry.event, FleetEvent):
            self._state.apply(entry.event, entry.sequence)
            self._note_models()

    async def changed(self) -> None:
        """Wait until there was an event since the last call. Meant for one waiting task."""
        await self._changed.wait()
        self._changed.clear()

    @property
    def instances(self) -> list[Instance]:
        return self._state.fleet.instances

    @property
    def ready(self) -> list[Instance]:
        """Instances that take new requests (decode-only ones do not), sorted by name."""
        fleet = self._state.fleet
        return [fleet[instance] for instance in fleet.ready]

    @property
    def reachable(self) -> list[Instance]:
        """Instances that prefill and are ready or ejected, or, where none is, not known to be down."""
        able = [i for i in self._fitting if i.role != "decode"]
        present = [i for i in able if i.status in (Status.READY, Status.EJECTED)]
        return present or [i for i in able if i.status in (Status.SUSPECTED, Status.DRAINING)]

    def is_out(self, instance: Instance) -> bool:
        """Whether its ejection lasts, by the leader's word: where nobody leads nobody ends it."""
        return instance.ejected and self._clock.now() < self._state.outliers.record(instance.id).until

    def get(self, instance: InstanceId, epoch: Epoch) -> Instance | None:
        """That life of the instance, if it is still the present one."""
        known = self._state.fleet.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def fresh(self, instance: Instance) -> bool:
        """Whether its worker has reported just now (and not merely in a log from long ago)."""
        return self._clock.now() - instance.heard_at < FRESH_WALL_SECONDS * self._clock.speed

    @property
    def models(self) -> dict[str, Model]:
        """Every name that an instance answers to, whether or not it is ready; while there is no instance at all, those
        that were answered to last: a pool without engines still has its model."""
        return self._models

    @property
    def base(self) -> Model | None:
        """The pool's model; None while no instance has ever joined."""
        return next((model for model in reversed(self._models.values()) if model.name == model.base), None)

    @property
    def block_tokens(self) -> Tokens:
        """What one block key of this pool stands for: as its leader says, for whose index keys are made. Where the log does
        not tell that, as the first of its workers says; 0 while no instance has ever joined."""
        return self._leaders_block_tokens or self._joined_block_tokens

    def context_of(self, model: Model) -> Tokens:
        """The longest context that an instance offers for this model, ready or not: a request that is too long only for who
        is ready may be asked again. 0 while unknown."""
        return max((i.max_model_len for i in self._fitting if i.can_serve(model)), default=0)

    def _elected(self, term: Term) -> None:
        for hear in self._hear_elections:
            hear(term)

    @property
    def _fitting(self) -> list[Instance]:
        return [instance for instance in self.instances if not instance.unschedulable]

    def _note_models(self) -> None:
        """What a name stands for, alias or adapter, is what most instances say that have it."""
        said = Counter((name, adapter) for instance in self._fitting for name, adapter in _names_of(instance))
        offered: dict[str, Model] = {}
        for instance in self._fitting:
            for name, adapter in _names_of(instance):
                if name not in offered or said[name, adapter] > said[name, offered[name].adapter]:
                    known = self._models.get(name)
                    since = known.since if known else instance.joined_at
                    offered[name] = Model(name, instance.model, adapter, since)
        self._models = offered or self._models
        self._joined_block_tokens = next((i.block_tokens for i in self._fitting), self._joined_block_tokens)

    def _note_ready(self) -> None:
        if self._state.fleet.ready:
            self._board.restored("fleet")
        else:
            apart = [f"{i.id} is unschedulable: {i.unschedulable}" for i in self.instances if i.unschedulable]
            self._board.degraded("fleet", "; ".join(["no engine is ready", *apart]))

    def _nothing(self) -> State:
        return State(PoolSettings(speed=self._clock.speed))


def _names_of(instance: Instance) -> Iterator[tuple[str, str]]:
    """What the instance may be asked for, and with which adapter; each name once."""
    further = {**dict.fromkeys(instance.aliases, ""), **{adapter: adapter for adapter in instance.adapters}}
    yield instance.model, ""
    yield from ((name, adapter) for name, adapter in further.items() if name != instance.model)
