"""What State consists of: settings, an attribute for each part, and what several parts answer together. Data only:
`state.State` has the fold. It is a class of its own because the functions that State calls (`holdings`, `lifecycle`) and
those that ask it (`kv_shares`, `instance_status`) name its type."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pointsman.contracts.decisions import RequestPlaced, RequestRejected, Settings, TierTokens
from pointsman.primitives import (
    BlockKey,
    EngineSeconds,
    Epoch,
    InstanceId,
    Name,
    Sequence,
    Term,
    Tokens,
    WallSeconds,
    engine_seconds,
)
from pointsman.state import fold_versions
from pointsman.state.best_effort import BestEffort
from pointsman.state.dead_letters import DeadLetters
from pointsman.state.derived import Derived
from pointsman.state.fleet import Fleet, Instance
from pointsman.state.hotness import Hotness
from pointsman.state.latency_model import LatencyModel
from pointsman.state.no_index import NoIndex
from pointsman.state.outages import Outages
from pointsman.state.outliers import Outliers
from pointsman.state.output_lengths import OutputLengths
from pointsman.state.pending_requests import PendingRequests
from pointsman.state.prefix_copies import CopiesUnderWay, PrefixDemand
from pointsman.state.prefix_index import PrefixIndex
from pointsman.state.priority_classes import LOWEST, QueueClass
from pointsman.state.promises import Promises
from pointsman.state.recent_decisions import RecentDecisions
from pointsman.state.reported_hits import Contradictions, ReportedHits
from pointsman.state.scaling import Scaling
from pointsman.state.session_affinity import SessionAffinity
from pointsman.state.slower_tiers import SlowerTiers, TierBlocks
from pointsman.state.tenants import Tenants
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad
from pointsman.state.transfers import Transfers
from pointsman.state.ttft_intervals import TtftIntervals
from pointsman.state.workload import EMPTY_QUEUE, NO_EPOCH, AttemptBefore, Request, Workload

if TYPE_CHECKING:
    from pointsman.state.instance_columns import InstanceColumns

CLOCK_STEP_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
"""A date of the leader that differs by more from the one before is of a clock that was set, and counts from then on."""
STEP_MAX = 2**32
"""How far a term, epoch or number may jump, so that one entry cannot exhaust the range."""

T = TypeVar("T", bound=Tracker)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    block_tokens: Tokens = 64
    speed: float = 1.0
    affinity_level_tokens: Tokens = 512
    hot_share: float = 1.0
    cold_share: float = 0.5
    fold_version: int = fold_versions.FOLD_VERSION


class StateParts:
    DERIVED: ClassVar[Derived] = {"_columns": lambda: None}

    def __init__(
        self,
        settings: PoolSettings,
        trackers: Iterable[Tracker] = (),
        *,
        latency: LatencyModel | None = None,
        index: bool = True,
    ) -> None:
        """`trackers`: those that the chosen policies need. `latency`: replaces the default model, for simulations. `index`:
        see `drop_index`."""
        self.settings = settings
        version = settings.fold_version
        self.learns_from_deliveries = version >= fold_versions.DELIVERIES_CHECKED
        """False without an index, too."""
        self.output_lengths = OutputLengths()
        self.tenants = Tenants(self.output_lengths if version >= fold_versions.OUTPUT_LENGTHS else None)
        self.pending = PendingRequests()
        self.fleet = Fleet(
            checks_model=version >= fold_versions.DELIVERIES_CHECKED,
            unheard_serve=version >= fold_versions.UNHEARD_SERVE,
        )
        self.best_effort = BestEffort(self.fleet, repriced=version >= fold_versions.QUEUE_CLASS)
        self.use_trackers(trackers)
        self.epochs: dict[InstanceId, Epoch] = {}
        """The newest of each instance that is there or was."""
        self.unregistered: dict[InstanceId, EngineSeconds] = {}
        """Last report of instances that have not joined; they are asked to join again."""
        self.index: PrefixIndex = PrefixIndex()
        """What devices hold, by cache events."""
        self.slower = SlowerTiers()
        self.promises = Promises()
        """Prefixes that placed requests will leave, until cache events tell."""
        self.deferred = Promises()
        """Of pending best-effort requests: others do not rely on them."""
        self.delivered = ReportedHits()
        """Prefixes that engines reported as hits; they count as held where cache events lack them."""
        self.contradictions = Contradictions()
        self.workload = Workload()
        self._columns: InstanceColumns | None = None
        self.session_affinity = SessionAffinity()
        self.hotness = Hotness(
            block_tokens=settings.block_tokens,
            level_tokens=settings.affinity_level_tokens,
            hot_share=settings.hot_share,
            cold_share=settings.cold_share,
        )
        self.latency = latency or LatencyModel(
            settings.block_tokens,
            by_length=version >= fold_versions.SECONDS_BY_LENGTH,
            by_rate=version >= fold_versions.PREFILL_RATE,
        )
        self.ttft_intervals = TtftIntervals()
        self.decode_load = DecodeLoad()
        self.decode_load.fold_version = version
        self.outages = Outages(settings.speed)
        self.outliers = Outliers(settings.speed, fold_version=version)
        self.scaling = Scaling()
        self.transfers = Transfers()
        self.copies = CopiesUnderWay()
        self.demand = PrefixDemand(level_blocks=max(1, settings.affinity_level_tokens // settings.block_tokens))
        self.placements = 0
        self.term = Term(0)
        self.term_policy: Name = ""
        self.term_settings: Settings = {}
        """Those in LeaderElected or, if the log has lost it, in a placement."""
        self.elected: Sequence = 0
        """Place of the newest election in the log."""
        self.sequence: Sequence = 0
        self.last_at: EngineSeconds = 0.0
        """Date of the newest event, by whatever clock."""
        self.now: EngineSeconds = 0.0
        """By the leader's clock, as far as the log tells: what ends by time ends by it."""
        self.settled_at: EngineSeconds = 0.0
        """When `State.settle` looked through all of it."""
        self.recent_decisions = RecentDecisions()
        self.fenced = 0
        """Decisions ignored, as they are of an earlier term."""
        self.writes_lost = 0
        self.dead_letters = DeadLetters()
        if not index:
            self.drop_index()

    def use_trackers(self, trackers: Iterable[Tracker]) -> None:
        self.trackers: tuple[Tracker, ...] = (*trackers, self.pending, self.best_effort)
        for tracker in self.trackers:
            tracker.fold_version = self.settings.fold_version

    def drop_index(self) -> None:
        """Keeps what loads and queues need: from here on hits are those recorded with decisions or promised, and caches
        are neither judged nor learned about. Queues stay exact, but for prefixes fetched from other instances: they are priced without
        what the target held before."""
        self.index = NoIndex({instance: self.index.blocks(instance) for instance in self.index.instances})
        self.slower.drop_indexes()
        self.delivered, self.contradictions = ReportedHits(), Contradictions()
        self.learns_from_deliveries = False
        for instance in self.fleet.instances:
            instance.doubt, instance.contradicted, instance.forged = "", "", False

    @property
    def knows_keys(self) -> bool:
        return not isinstance(self.index, NoIndex)

    @property
    def columns(self) -> "InstanceColumns":
        """Up to date, of all ready instances. Only with the default latency model."""
        known = self._columns
        if known is not None and known.names is self.fleet.ready:
            known.refresh()
            return known
        # Imported here: who never decides for a large pool needs no arrays.
        from pointsman.state.instance_columns import InstanceColumns

        made = self._columns = InstanceColumns(self.fleet, self.workload, self.latency)
        return made

    def tracker(self, kind: type[T]) -> T:
        """Asserts that a chosen policy requires it."""
        found = next((tracker for tracker in self.trackers if isinstance(tracker, kind)), None)
        assert found is not None, f"no chosen policy keeps {kind.__name__}"
        return found

    def note_policies(self, policy: Name, settings: Settings) -> None:
        """Whole numbers as they are read from the log, so that the leader knows them as its followers do."""
        self.term_policy = policy
        self.term_settings = {n: v if isinstance(v, bool | str) else float(v) for n, v in settings.items()}

    def settings_of(self, event: RequestPlaced | RequestRejected) -> Settings:
        """Empty if unknown, and for a rejection that no policy of the term made."""
        return event.settings or (self.term_settings if event.policy == self.term_policy else {})

    def newest_epoch(self, instance: InstanceId) -> Epoch:
        """Joins under a lower epoch are ignored."""
        return self.epochs.get(instance, NO_EPOCH)

    def current(self, instance: InstanceId, epoch: Epoch) -> Instance | None:
        known = self.fleet.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def hits(self, keys: list[BlockKey], *, promised: bool = True) -> dict[InstanceId, int]:
        """Leading blocks of a prompt on each instance's device, by events, deliveries or promises."""
        hits = self.index.hits(keys)
        if promised:
            self.promises.extend_hits(keys, hits)
        self.delivered.extend_hits(keys, hits)
        return hits

    def hits_of(self, request: Request) -> dict[InstanceId, int]:
        """Without an index: what its placement recorded, and promises."""
        if not isinstance(self.index, NoIndex):
            return self.hits(request.keys)
        hits = self.index.recorded_hits(request.id)
        self.promises.extend_hits(request.keys, hits)
        return hits

    def queue_seconds(self, instance: InstanceId, now: EngineSeconds, priority: QueueClass = LOWEST) -> EngineSeconds:
        """Corrected prefill work ahead of a new request there. Pending work of classes below `priority` is behind it."""
        queue = self.workload.queues.get(instance, EMPTY_QUEUE)
        return self.latency.expected_seconds(instance, *queue.work_ahead(now, priority))

    def engine_wait(self, instance: Instance, now: EngineSeconds) -> EngineSeconds:
        """Until its engine has computed what it has got, and then one token."""
        queue = self.workload.queues.get(instance.id, EMPTY_QUEUE)
        seconds, tokens = queue.engine_left(now)
        return self.latency.expected_seconds(instance.id, seconds, tokens) + self.step_seconds(instance)

    def forget_speed(self, instance: InstanceId) -> None:
        self.latency.forget(instance)
        if instance in self.workload.queues:
            self.workload.queue(instance).learn_step(0.0)

    def drop_idle_queue(self, instance: InstanceId) -> None:
        """If the instance has left: names may never come back."""
        version = self.settings.fold_version
        if version < fold_versions.IDLE_QUEUES or instance in self.fleet or not self.workload.drop_idle_queue(instance):
            return
        if version >= fold_versions.LEFT_FORGOTTEN and instance:
            self._forget_departed(instance)
        self.latency.changed.discard(instance)

    def _forget_departed(self, instance: InstanceId) -> None:
        """Also what events taught that came after it had left."""
        self.latency.forget(instance)
        self.ttft_intervals.forget(instance)
        self.outliers.left(instance)
        self.decode_load.left(instance, self.now)
        for tracker in self.trackers:
            tracker.left(instance, self.last_at)

    def step_seconds(self, instance: Instance) -> EngineSeconds:
        """For a prompt of which all but one token is cached."""
        return self.latency.prefill_seconds(instance, 1, 0)

    def cached(
        self, instance: Instance, hit_blocks: int, loads: TierBlocks, prompt_tokens: Tokens
    ) -> tuple[Tokens, list[TierTokens]]:
        """Prompt tokens that are not computed, and those of them that are loaded back. `hit_blocks`: on the device."""
        cached = self.latency.cached_tokens(instance, hit_blocks, prompt_tokens)
        loaded = []
        for tier, blocks in loads.items():
            hit_blocks += blocks
            reached = self.latency.cached_tokens(instance, hit_blocks, prompt_tokens)
            if reached > cached:
                loaded.append(TierTokens(tier, reached - cached))
                cached = reached
        return cached, loaded

    @property
    def clock_step(self) -> EngineSeconds:
        return engine_seconds(CLOCK_STEP_WALL_SECONDS, self.settings.speed)

    def grant_place(self, request: Request | AttemptBefore) -> float:
        """Orders grants. By their dates before fold version 11: with two clocks in the log that is no order."""
        return request.grant if self.settings.fold_version >= fold_versions.ATTEMPTS_COUNTED else request.granted_at

    def next_grant_place(self, at: EngineSeconds) -> float:
        """Of the first grant that is made from now on."""
        return self.workload.grants + 1 if self.settings.fold_version >= fold_versions.ATTEMPTS_COUNTED else at


def check_step(what: str, known: int, new: int) -> None:
    """Raises ValueError if a counter jumps by more than STEP_MAX."""
    if new > known + STEP_MAX:
        raise ValueError(f"{what} {new} is too far ahead of {known}")
