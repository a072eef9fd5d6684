"""The parts of State, before any event: settings, one attribute a part, and the questions that span several parts.

Data only: `state.State.apply` and the functions that it calls (`holdings`, `lifecycle`) change it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from pointsman.primitives import BlockKey, Epoch, InstanceId, Seconds, Sequence, Term, Tokens
from pointsman.state.dead_letters import DeadLetters
from pointsman.state.fleet import Fleet, Instance
from pointsman.state.hotness import Hotness
from pointsman.state.latency_model import LatencyModel
from pointsman.state.outages import Outages
from pointsman.state.outliers import Outliers
from pointsman.state.prefix_index import PrefixIndex
from pointsman.state.promises import Promises
from pointsman.state.recent_decisions import RecentDecisions
from pointsman.state.reported_hits import Contradictions, ReportedHits
from pointsman.state.scaling import Scaling
from pointsman.state.session_affinity import SessionAffinity
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad
from pointsman.state.workload import NO_EPOCH, Workload

TRIAL_OPEN_WALL_SECONDS = 10.0
"""How long a failed trial of a half-open instance may stay unattributed before another request may try it."""

FOLD_VERSION = 3
"""Rules of the fold. LeaderElected names its version, so that replay decides alike. 1: events are believed as they are
(logs without a version); 2: checked against what engines deliver; 3: lost and held time is added to a request's SLO."""

STEP_MAX = 2**32
"""How far a term, epoch or number may jump ahead: one entry must not use up the numbers."""

T = TypeVar("T", bound=Tracker)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings of the fold, the same for every reader of a log."""

    block_tokens: Tokens = 64
    speed: float = 1.0
    affinity_level_tokens: Tokens = 512
    hot_share: float = 1.0
    cold_share: float = 0.5
    fold_version: int = FOLD_VERSION


class StateParts:
    """Everything known of one pool."""

    def __init__(
        self, settings: PoolSettings, trackers: Iterable[Tracker] = (), *, latency: LatencyModel | None = None
    ) -> None:
        """`trackers`: what the chosen policies need beyond the other parts. `latency`: another model, for simulations."""
        self.settings = settings
        self.learns_from_deliveries = settings.fold_version >= 2
        self.trackers = tuple(trackers)
        self.fleet = Fleet(checks_model=self.learns_from_deliveries)
        self.epochs: dict[InstanceId, Epoch] = {}
        """The highest epoch under which each instance ever joined."""
        self.unregistered: dict[InstanceId, Seconds] = {}
        """Instances that report without having joined, with their last report; they are asked to join again."""
        self.index = PrefixIndex()
        self.promises = Promises()
        self.delivered = ReportedHits()
        self.contradictions = Contradictions()
        self.workload = Workload()
        self.session_affinity = SessionAffinity()
        self.hotness = Hotness(
            block_tokens=settings.block_tokens,
            level_tokens=settings.affinity_level_tokens,
            hot_share=settings.hot_share,
            cold_share=settings.cold_share,
        )
        self.latency = latency or LatencyModel(settings.block_tokens)
        self.decode_load = DecodeLoad()
        """Decode speed of instances; kept only where prefill and decode are split."""
        self.outages = Outages(settings.speed)
        self.outliers = Outliers(settings.speed)
        self.scaling = Scaling()
        self.placements = 0
        self.term = Term(0)
        self.elected: Sequence = 0
        """Place in the log of the newest entry on the leader's subject."""
        self.sequence: Sequence = 0
        """The last log entry applied."""
        self.last_at: Seconds = 0.0
        """The latest time of any event."""
        self.recent_decisions = RecentDecisions()
        self.fenced = 0
        """Entries of deposed leaders that were ignored."""
        self.writes_lost = 0
        self.dead_letters = DeadLetters()

    def tracker(self, kind: type[T]) -> T:
        """The tracker of this kind. Asserts that a chosen policy asked for it."""
        found = next((tracker for tracker in self.trackers if isinstance(tracker, kind)), None)
        assert found is not None, f"no chosen policy keeps {kind.__name__}"
        return found

    def newest_epoch(self, instance: InstanceId) -> Epoch:
        """The highest epoch under which this instance joined; joins under a lower one are ignored."""
        return self.epochs.get(instance, NO_EPOCH)

    def current(self, instance: InstanceId, epoch: Epoch) -> Instance | None:
        """The instance, if this is its present epoch."""
        known = self.fleet.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def hits(self, keys: list[BlockKey]) -> dict[InstanceId, int]:
        """Leading blocks of a prompt that each instance holds, by its events or deliveries, or will hold soon."""
        hits = self.index.hits(keys)
        self.promises.extend_hits(keys, hits)
        self.delivered.extend_hits(keys, hits)
        return hits

    def ejection_reason(self, instance: Instance) -> str:
        """Why it is ejected or half-open; empty where it is neither."""
        record = self.outliers.record(instance.id)
        if instance.ejected:
            return f"ejected for {record.until - record.ejected_at:g} s, {record.why}"
        return f"half-open, takes one request at a time: {record.why}" if instance.half_open else ""

    def has_trial_request(self, instance: InstanceId) -> bool:
        """Whether a half-open instance has a request granted since, or one whose failure is not attributed yet."""
        since = self.outliers.record(instance).half_open_since
        queue = self.workload.queues.get(instance)
        if queue is not None and any(
            r.granted_at >= since for r in (*queue.prefill.values(), *queue.decoding.values())
        ):
            return True
        return self.outliers.is_open(
            instance, since=max(since, self.last_at - TRIAL_OPEN_WALL_SECONDS * self.settings.speed)
        )


def check_step(what: str, known: int, new: int) -> None:
    """Raises ValueError where a counter jumps by more than STEP_MAX."""
    if new > known + STEP_MAX:
        msg = f"{what} {new} is too far ahead of {known}"
        raise ValueError(msg)
