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
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft, InstanceReported
from pointsman.contracts.requests import RequestEvent
from pointsman.primitives import BlockKey, Epoch, InstanceId, Sequence
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage
from pointsman_torture.network import Stored

WHOLE_CHECK_EVERY = 64
"""Entries between two looks at every request."""


class HoldingTwin:
    """What one life of an instance holds, as a set."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
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

    def hear(self, report: InstanceReported) -> None:
        """A report settles every doubt, either way."""
        if report.epoch == self.epoch and report.sequence >= self.sequence:
            same = report.sequence == self.sequence and report.blocks == len(self.keys)
            self.doubtful = not (same and report.digest == reduce(xor, self.keys, 0))


class FoldTwin:
    """Folds the log beside a State and says where the two part."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._holdings: dict[InstanceId, HoldingTwin] = {}
        self._newest: dict[InstanceId, Epoch] = {}
        self._term = 0
        self._fenced = 0
        self._folded = 0

    def apply(self, stored: Stored) -> Iterator[str]:
        """Fold one entry on both sides. Gives what differs afterwards."""
        event, state = stored.event, self._state
        self._folded += 1
        if event is None:
            state.skip(stored.sequence)
            return
        state.apply(event, stored.sequence)
        if event.stamp is not None and event.stamp.term < self._term:
            self._fenced += 1
            if state.fenced != self._fenced:
                yield f"{_of(stored)}: a decision of term {event.stamp.term} counts in term {self._term}"
            return
        if isinstance(event, LeaderElected):
            self._term = max(self._term, event.term)
        instance = getattr(event, "instance", None)
        if isinstance(event, InstanceJoined):
            if event.epoch > self._newest.get(event.instance, Epoch(-1)):
                self._newest[event.instance] = event.epoch
                self._holdings[event.instance] = HoldingTwin(event.epoch)
        elif isinstance(event, InstanceLeft):
            known = self._holdings.get(event.instance)
            if known is not None and known.epoch == event.epoch:
                del self._holdings[event.instance]
        elif isinstance(event, CacheEvent) and event.instance in self._holdings:
            self._holdings[event.instance].apply(event)
        elif isinstance(event, InstanceReported) and event.instance in self._holdings:
            self._holdings[event.instance].hear(event)
        if instance and isinstance(event, CacheEvent | InstanceJoined | InstanceLeft | InstanceReported):
            yield from self._compare(InstanceId(instance), stored)
        if isinstance(event, RequestEvent):
            request = state.workload.requests.get(event.request)
            if request is not None:
                yield from self._compare_request(request, stored)
        if self._folded % WHOLE_CHECK_EVERY == 0:
            yield from self._compare_promises(stored)

    def _compare(self, instance: InstanceId, stored: Stored) -> Iterator[str]:
        twin, known = self._holdings.get(instance), self._state.fleet.get(instance)
        if (twin is None) != (known is None):
            yield f"{_of(stored)}: {instance} is {'not ' if known is None else ''}in the fleet"
        elif twin is None:
            if self._state.index.blocks(instance) or self._state.speculation.blocks(instance):
                yield f"{_of(stored)}: something is still known of {instance}, which has left"
        elif known is not None:
            if (known.epoch, known.sequence) != (twin.epoch, twin.sequence):
                yield f"{_of(stored)}: {instance} is at {known.epoch}, {known.sequence}, not {twin.epoch}, {twin.sequence}"
            elif twin.doubtful != bool(known.doubt) and known.cache != "no_events":
                yield f"{_of(stored)}: {instance} is {'not ' if twin.doubtful else ''}in doubt ({known.doubt})"
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
                (Stage.DECODING, line.decoding),
            )
            if request.id in part
        ]
        expected = [] if request.stage is Stage.ARRIVED else [(request.instance, request.stage)]
        if stands != expected:
            yield f"{_of(stored)}: {request.id} stands in {stands}, not {expected}"

    def _compare_promises(self, stored: Stored) -> Iterator[str]:
        """Whatever waits or is in prefill is promised where it is, unless the instance began anew since."""
        state = self._state
        for request in state.workload.requests.values():
            known = state.fleet.get(request.instance)
            if request.stage not in (Stage.PENDING, Stage.PREFILL) or known is None or known.epoch != request.epoch:
                continue
            promised: dict[InstanceId, int] = {}
            state.speculation.extend_hits(request.keys, promised)
            short = len(request.keys) - promised.get(request.instance, 0)
            if short:
                yield f"{_of(stored)}: {short} blocks of {request.id} are not promised at {request.instance}"


def _of(stored: Stored) -> str:
    return f"after entry {stored.sequence} ({type(stored.event).__name__}{' again' if stored.echo else ''})"
