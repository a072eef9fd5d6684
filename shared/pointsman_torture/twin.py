"""Slow, obvious twins of what State keeps, folded from the same entries and compared after each.

A fleet heals: whatever the index has wrong, a digest tells within a second and a snapshot puts right. A defect of the fold
would hide behind that at the end of a run, so it is looked for entry by entry.
"""

from collections.abc import Iterator
from functools import reduce
from operator import xor

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheGap,
    CacheSnapshot,
)
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import HandOverRefused, LeaderElected, RequestHandedOver
from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceReported,
    InstanceSuspected,
    InstanceUndrained,
)
from pointsman.contracts.requests import PrefillFinished, RequestEvent
from pointsman.primitives import BlockKey, Epoch, InstanceId, Seconds, Sequence
from pointsman.state.state import CONFIRMATION_WALL_SECONDS, State
from pointsman.state.workload import Request, Stage
from pointsman_torture.network import Stored

WHOLE_CHECK_EVERY = 64
"""Entries between two looks at every request."""
WITHOUT_TOKEN = (Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER)
PREFILLED = (PrefillFinished, RequestHandedOver, HandOverRefused)
DECIDED = (InstanceSuspected, InstanceDraining, InstanceUndrained)


class HoldingTwin:
    """What one life of an instance holds, as a set, and how it stands."""

    def __init__(self, epoch: Epoch, arrived_at: Sequence, *, draining: bool = False) -> None:
        """`arrived_at`: where the first life began of those that followed each other without a break."""
        self.epoch = epoch
        self.arrived_at = arrived_at
        self.suspected = False
        self.draining = draining
        self.sequence: Sequence = 0
        self.keys: set[BlockKey] = set()
        self.doubtful = False
        """Whether something is missing that no snapshot has replaced since."""

    def apply(self, event: CacheEvent) -> None:
        if event.epoch != self.epoch:
            return
        again = event.sequence < self.sequence if isinstance(event, CacheSnapshot) else event.sequence <= self.sequence
        if again:
            return
        self.doubtful = self.doubtful or event.sequence > self.sequence + 1
        self.sequence = event.sequence
        match event:
            case BlocksStored():
                self.keys.update(key for run in event.runs for key in unpack_keys(run.keys))
            case BlocksRemoved():
                self.keys.difference_update(unpack_keys(event.keys))
            case CacheCleared():
                self.keys.clear()
            case CacheSnapshot():
                self.keys = {key for run in event.runs for key in unpack_keys(run.keys)}
                self.doubtful = False
            case CacheGap():
                self.doubtful = True
            case _:
                pass

    def decide(self, decision: InstanceSuspected | InstanceDraining | InstanceUndrained) -> None:
        """What a leader says of how it stands."""
        if isinstance(decision, InstanceSuspected):
            self.suspected = self.suspected or decision.epoch == self.epoch
        elif decision.stamp is not None and decision.stamp.as_of >= self.arrived_at:
            self.draining = isinstance(decision, InstanceDraining)

    def let_go(self, as_of: Sequence) -> None:
        """The leader let go of an earlier life, before it knew of this one."""
        if as_of >= self.arrived_at:
            self.arrived_at, self.draining = as_of + 1, False

    def hear(self, report: InstanceReported) -> None:
        """A report settles every doubt, either way."""
        if report.epoch == self.epoch:
            self.suspected = False
        if report.epoch == self.epoch and report.sequence >= self.sequence:
            same = report.sequence == self.sequence and report.blocks == len(self.keys)
            self.doubtful = not (same and report.digest == reduce(xor, self.keys, 0))


class FoldTwin:
    """Folds the log beside a State and says where the two part."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._holdings: dict[InstanceId, HoldingTwin] = {}
        self._newest: dict[InstanceId, Epoch] = {}
        self._decided: set[tuple[int, int]] = set()
        self._unconfirmed: list[tuple[Seconds, Request, InstanceId, Epoch]] = []
        """Prompts whose first token has come: until when they are promised, and in which life of which instance, unless a
        block of theirs is evicted before."""
        self._term = 0
        self._fenced = 0
        self._folded = 0

    def apply(self, stored: Stored) -> Iterator[str]:
        """Fold one entry on both sides. Gives what differs afterwards."""
        event, state = stored.event, self._state
        self._folded += 1
        if event is None:
            state.skip(stored.sequence, subject=stored.subject, problem=stored.problem)
            return
        first_token = self._first_token(event)
        state.apply(event, stored.sequence)
        if isinstance(event, CacheCleared) or (isinstance(event, BlocksRemoved) and not event.expired):
            self._evict(event)
        if first_token is not None:
            self._unconfirmed.append(first_token)
            yield from self._compare_promises(stored)
        if event.stamp is not None and event.stamp.term < self._term:
            self._fenced += 1
            if state.fenced != self._fenced:
                yield f"{_of(stored)}: a decision of term {event.stamp.term} counts in term {self._term}"
            return
        if event.stamp is not None:
            decision = (event.stamp.term, event.stamp.number)
            if decision in self._decided:
                if isinstance(event, FleetEvent):
                    yield from self._compare(event.instance, stored)
                return
            self._decided.add(decision)
        if isinstance(event, LeaderElected):
            self._term = max(self._term, event.term)
        instance, leaves = getattr(event, "instance", None), False
        if isinstance(event, InstanceJoined):
            if event.epoch > self._newest.get(event.instance, Epoch(-1)):
                self._newest[event.instance] = event.epoch
                before = self._holdings.get(event.instance)
                self._holdings[event.instance] = HoldingTwin(
                    event.epoch,
                    before.arrived_at if before is not None else stored.sequence,
                    draining=before is not None and before.draining,
                )
        elif isinstance(event, InstanceLeft):
            known = self._holdings.get(event.instance)
            if known is not None and known.epoch == event.epoch:
                del self._holdings[event.instance]
                leaves = True
            elif known is not None and event.stamp is not None and event.epoch < known.epoch:
                known.let_go(event.stamp.as_of)
        elif isinstance(event, CacheEvent) and event.instance in self._holdings:
            self._holdings[event.instance].apply(event)
        elif isinstance(event, InstanceReported) and event.instance in self._holdings:
            self._holdings[event.instance].hear(event)
        elif isinstance(event, DECIDED) and event.instance in self._holdings:
            self._holdings[event.instance].decide(event)
        if instance and isinstance(event, CacheEvent | FleetEvent):
            yield from self._compare(InstanceId(instance), stored, leaves=leaves)
        if isinstance(event, RequestEvent):
            request = state.workload.requests.get(event.request)
            if request is not None:
                yield from self._compare_request(request, stored)
        if self._folded % WHOLE_CHECK_EVERY == 0:
            yield from self._compare_promises(stored)

    def _first_token(self, event: LogEvent) -> tuple[Seconds, Request, InstanceId, Epoch] | None:
        """What is promised for a while yet, if this event is the first token of a request, or the end of a prefill that is
        decoded elsewhere; asked before it is applied."""
        if not isinstance(event, PREFILLED) or (event.stamp is not None and event.stamp.term < self._term):
            return None
        request = self._state.workload.requests.get(event.request)
        if request is None:
            return None
        if isinstance(event, PrefillFinished):
            counts = request.stage in (Stage.PREFILL, Stage.HANDED_OVER) and request.instance == event.instance
        else:
            counts = request.stage is Stage.PREFILL and request.instance == event.source
        if not counts or (isinstance(event, RequestHandedOver | HandOverRefused) and event.attempt < request.attempt):
            return None
        until = event.at + CONFIRMATION_WALL_SECONDS * self._state.settings.speed
        return until, request, request.instance, request.epoch

    def _evict(self, event: BlocksRemoved | CacheCleared) -> None:
        """What was computed and is gone again is promised no longer. (Nor looked at, where this is an old copy.)"""
        removed = set(unpack_keys(event.keys)) if isinstance(event, BlocksRemoved) else None
        self._unconfirmed = [
            kept
            for kept in self._unconfirmed
            if kept[2] != event.instance or (removed is not None and removed.isdisjoint(kept[1].keys))
        ]

    def _compare(self, instance: InstanceId, stored: Stored, *, leaves: bool = False) -> Iterator[str]:
        twin, known = self._holdings.get(instance), self._state.fleet.get(instance)
        if (twin is None) != (known is None):
            yield f"{_of(stored)}: {instance} is {'not ' if known is None else ''}in the fleet"
        elif twin is None:
            promised = leaves and self._state.speculation.blocks(instance)
            if self._state.index.blocks(instance) or promised:  # a leader may promise later, who has not heard of it
                yield f"{_of(stored)}: something is still known of {instance}, which has left"
        elif known is not None:
            if (known.epoch, known.sequence) != (twin.epoch, twin.sequence):
                yield f"{_of(stored)}: {instance} is at {known.epoch}, {known.sequence}, not {twin.epoch}, {twin.sequence}"
            elif twin.doubtful != bool(known.doubt) and known.cache != "no_events":
                yield f"{_of(stored)}: {instance} is {'not ' if twin.doubtful else ''}in doubt ({known.doubt})"
            elif (known.suspected, known.draining) != (twin.suspected, twin.draining):
                stands = f"suspected: {known.suspected}, draining: {known.draining}"
                yield f"{_of(stored)}: {instance} is {stands}, not {twin.suspected}, {twin.draining}"
            elif self._state.index.keys(instance) != twin.keys:
                yield f"{_of(stored)}: the index of {instance} is not what was stored there"

    def _compare_request(self, request: Request, stored: Stored) -> Iterator[str]:
        """A request stands in one line, and its blocks count as held there."""
        lines = self._state.workload.lines
        stands = [
            (instance, stage)
            for instance, line in lines.items()
            for stage, part in (
                (Stage.PENDING, line.pending),
                (Stage.PREFILL, line.prefill),
                (request.stage if request.stage is Stage.HANDED_OVER else Stage.DECODING, line.decoding),
            )
            if request.id in part
        ]
        expected = [] if request.stage is Stage.ARRIVED else [(request.instance, request.stage)]
        if stands != expected:
            yield f"{_of(stored)}: {request.id} stands in {stands}, not {expected}"

    def _compare_promises(self, stored: Stored) -> Iterator[str]:
        """Whatever waits or is in prefill is promised where it is, and what was prefilled until the engine can have said
        so, unless the instance began anew since."""
        state = self._state
        due = [(r, r.instance, r.epoch) for r in state.workload.requests.values() if r.stage in WITHOUT_TOKEN]
        self._unconfirmed = [kept for kept in self._unconfirmed if kept[0] > state.last_at]
        due += [(request, instance, epoch) for _, request, instance, epoch in self._unconfirmed]
        for request, instance, epoch in due:
            known = state.fleet.get(instance)
            if known is None or known.epoch != epoch:
                continue
            promised: dict[InstanceId, int] = {}
            state.speculation.extend_hits(request.keys, promised)
            short = len(request.keys) - promised.get(instance, 0)
            if short:
                yield f"{_of(stored)}: {short} blocks of {request.id} are not promised at {instance}"


def _of(stored: Stored) -> str:
    return f"after entry {stored.sequence} ({type(stored.event).__name__}{' again' if stored.echo else ''})"
