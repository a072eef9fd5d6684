"""The ingress's view of a pool: instances, models, block size and elections, folded from fleet and leader events."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import structlog

from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.fleet import FleetEvent, InstanceJoined, InstanceLeft
from pointsman.policies.heard_reports import PULSE_WALL_SECONDS
from pointsman.ports import Clock, EventLog, LogEntry, LogReset
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, PoolName, Term, Tokens, WallSeconds, engine_seconds
from pointsman.runtime.containment import DeadLetterWatch, contained
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.health import HealthBoard
from pointsman.state.fleet import Instance, Status
from pointsman.state.state import PoolSettings, State
from pointsman_ingress.http.request_headers import cleaned

log = structlog.get_logger()

VIEW_PART = "view"
MODELS_PART = "models"
NAMES_SHOWN_MAX = 8
REFUSED_MAX = 1_000
FRESH_WALL_SECONDS: WallSeconds = WallSeconds(5.0)  # workers report every second


@dataclass(frozen=True, slots=True)
class Model:
    """`base`: the engines' model; `adapter`: a LoRA adapter, or empty. `since`: engine time since which the pool has served
    it without a break."""

    name: str
    base: str
    adapter: str
    since: EngineSeconds
    context_tokens: Tokens = 0

    @property
    def alias(self) -> str:
        return "" if self.adapter or self.name == self.base else self.name


class FleetView:
    def __init__(self, clock: Clock, board: HealthBoard, urls: EngineUrls) -> None:
        self._clock = clock
        self._board = board
        self.pool = board.pool
        self._urls = urls
        self._refused: dict[InstanceId, str] = {}
        self._state = self._empty()
        self._models: dict[str, Model] = {}
        self._leaders_block_tokens: Tokens = 0
        self._joined_block_tokens: Tokens = 0
        self._newest_at: EngineSeconds = 0.0
        """Of the events read: who writes an earlier time into a later one has served nothing for longer."""
        self._elsewhere: Mapping[str, PoolName] = {}
        self._changed = asyncio.Event()
        self._dead_letters = DeadLetterWatch(board.pool)
        self._election_listeners: list[Callable[[Term], None]] = []
        self._model_listeners: list[Callable[[], None]] = []
        self.is_read = False  # the log's end was reached once
        board.missing(VIEW_PART, "the log is not read yet")
        self._report_ready()

    def on_election(self, listener: Callable[[Term], None]) -> None:
        """The listener receives the term of each new leader; 0 after a log reset."""
        self._election_listeners.append(listener)

    def on_models(self, listener: Callable[[], None]) -> None:
        """Called after each change of `models`."""
        self._model_listeners.append(listener)

    def served_elsewhere(self, names: Mapping[str, PoolName]) -> None:
        """Report names of this pool for which other pools get the requests."""
        if names == self._elsewhere:
            return
        self._elsewhere = names
        if not names:
            self._board.restored(MODELS_PART)
            return
        shown = {cleaned(name): names[name] for name in sorted(names)[:NAMES_SHOWN_MAX]}
        log.warning("model_served_elsewhere", pool=self.pool, names=len(names), served_by=shown)
        listed = ", ".join(f"'{name}' go to pool {owner}" for name, owner in shown.items())
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        self._board.degraded(MODELS_PART, f"requests for {listed}, which served the name first{more}")

    async def follow(self, events: EventLog) -> None:
        """Runs without end."""
        async for entry in events.read(kinds=("fleet", "leader"), at_end=self._at_end):
            if isinstance(entry, LogReset):
                log.warning("fleet_view_reset", reason=entry.reason)
                self._state = self._empty()
                self._elected(Term(0))
            else:
                with contained("fleet_view"):
                    self._apply(entry)
                self._dead_letters.look(self._state.dead_letters)
            self._report_ready()
            self._changed.set()

    async def changed(self) -> None:
        """Supports one waiter."""
        await self._changed.wait()
        self._changed.clear()

    @property
    def instances(self) -> list[Instance]:
        return self._state.fleet.instances

    @property
    def fetches(self) -> bool:
        """Whether engines may fetch prefixes from each other."""
        return self._state.fleet.fetches

    @property
    def ready(self) -> list[Instance]:
        """Sorted by name."""
        fleet = self._state.fleet
        return [fleet[instance] for instance in fleet.ready]

    @property
    def reachable(self) -> list[Instance]:
        """Prefilling instances that are ready or ejected; if none, suspected or draining ones."""
        able = [i for i in self._schedulable if i.role != "decode"]
        present = [i for i in able if i.status in (Status.READY, Status.EJECTED)]
        return present or [i for i in able if i.status in (Status.SUSPECTED, Status.DRAINING)]

    def ejection_active(self, instance: Instance) -> bool:
        """Until the time that the leader set; without a leader nothing else ends an ejection."""
        return instance.ejected and self._clock.now() < self._state.outliers.record(instance.id).until

    def get(self, instance: InstanceId, epoch: Epoch) -> Instance | None:
        known = self._state.fleet.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def agrees(self, grant: RouteGranted) -> bool:
        """False if the log knows an instance of this grant under another URL: then no leader has made it, or this view
        lags behind."""
        return self._agrees(grant.instance, grant.url) and self._agrees(grant.decode, grant.decode_url)

    def fresh(self, instance: Instance) -> bool:
        return self._clock.now() - instance.heard_at < engine_seconds(FRESH_WALL_SECONDS, self._clock.speed)

    def is_working(self, instance: InstanceId) -> bool:
        """Whether it computes requests, by its worker. One that ends them all is in the log within seconds, one that hangs
        fails new requests and is ejected."""
        known = self._state.fleet.get(instance)
        if known is None or known.ejected or known.status not in (Status.READY, Status.DRAINING):
            return False
        heard_within = engine_seconds(PULSE_WALL_SECONDS + FRESH_WALL_SECONDS, self._clock.speed)
        return known.running > 0 and self._clock.now() - known.heard_at < heard_within

    @property
    def models(self) -> dict[str, Model]:
        """Those served last if there are no instances."""
        return self._models

    @property
    def base(self) -> Model | None:
        """None before an instance has joined."""
        return next((model for model in reversed(self._models.values()) if model.name == model.base), None)

    @property
    def block_tokens(self) -> Tokens:
        """Per block key: the leader's, or the first worker's; 0 before an instance has joined."""
        return self._leaders_block_tokens or self._joined_block_tokens

    def context_of(self, model: Model) -> Tokens:
        """0 if unknown."""
        return max((i.max_model_len for i in self._schedulable if i.can_serve(model)), default=0)

    @property
    def _schedulable(self) -> list[Instance]:
        return [instance for instance in self.instances if not instance.unschedulable]

    def _agrees(self, instance: InstanceId, url: str) -> bool:
        known = self._state.fleet.get(instance)
        return known is None or known.url == url

    def _at_end(self) -> None:
        if not self.is_read:
            self.is_read = True
            self._board.restored(VIEW_PART)
            self._changed.set()

    def _apply(self, entry: LogEntry) -> None:
        event, known = entry.event, self._state.term
        said = self._said(event) if isinstance(event, FleetEvent) else None
        if event is None or isinstance(event, LeaderElected | FleetEvent):
            self._state.apply_entry(entry)
        if isinstance(event, LeaderElected):
            if self._state.term > known:
                self._leaders_block_tokens = int(event.pool.get("block_tokens", 0))
            self._elected(self._state.term)
        elif isinstance(event, FleetEvent):
            self._newest_at = max(self._newest_at, event.at)
            if isinstance(event, InstanceJoined | InstanceLeft):
                self._refused.pop(event.instance, None)
            if isinstance(event, InstanceJoined):
                self._check_url(event)
            if said != self._said(event):
                self._update_models()

    def _said(self, event: FleetEvent) -> object:
        """From which `models` follow. Most events change nothing of it, and all instances of a large fleet take a millisecond."""
        i = self._state.fleet.get(event.instance)
        return i and (i.model, i.aliases, i.adapters, i.block_tokens, i.unschedulable)

    def _check_url(self, joined: InstanceJoined) -> None:
        """The leader removes it too, if it has the same setting."""
        instance = joined.instance
        if self._urls.cover(instance, joined.url):
            return
        if len(self._refused) >= REFUSED_MAX:
            self._refused.clear()
        self._refused[instance] = reason = self._urls.refusal(instance, joined.url)
        log.error("instance_refused", instance=instance, url=joined.url[:200], reason=reason)
        self._state.apply(InstanceLeft(at=joined.at, instance=instance, epoch=joined.epoch, reason=reason))

    def _elected(self, term: Term) -> None:
        for listener in self._election_listeners:
            listener(term)

    def _update_models(self) -> None:
        schedulable = self._schedulable
        alike = Counter((instance.model, instance.aliases, instance.adapters) for instance in schedulable)
        votes = Counter[tuple[str, str]]()
        for names, count in alike.items():
            for named in _names_of(*names):
                votes[named] += count
        offered: dict[str, Model] = {}
        for names in alike:  # in the order of their first instances
            for name, adapter in _names_of(*names):
                if name not in offered or votes[name, adapter] > votes[name, offered[name].adapter]:
                    known = self._models.get(name)
                    since = known.since if known else self._newest_at
                    offered[name] = Model(name, names[0], adapter, since)
        before, self._models = self._models, offered or self._models
        if before != self._models:
            for listener in self._model_listeners:
                listener()
        self._joined_block_tokens = next((i.block_tokens for i in schedulable), self._joined_block_tokens)

    def _report_ready(self) -> None:
        if self._state.fleet.any_ready:
            self._board.restored("fleet")
        else:
            unschedulable = [f"{i.id} is unschedulable: {i.unschedulable}" for i in self.instances if i.unschedulable]
            refused = [f"{instance} is refused: {reason}" for instance, reason in self._refused.items()]
            self._board.degraded("fleet", "; ".join(["no engine is ready", *unschedulable, *refused]))

    def _empty(self) -> State:
        return State(PoolSettings(speed=self._clock.speed))


def _names_of(model: str, aliases: tuple[str, ...], adapters: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    further = {**dict.fromkeys(aliases, ""), **{adapter: adapter for adapter in adapters}}
    yield model, ""
    yield from ((name, adapter) for name, adapter in further.items() if name != model)
