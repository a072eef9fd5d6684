"""Folds the log into State and into the pool model, and compares them after each entry. A snapshot repairs a wrong
index within a second, so a final comparison would not show a defect of the fold."""

from collections.abc import Iterator
from math import isclose

from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.fleet import FleetEvent
from pointsman.contracts.requests import RequestArrived, RequestEvent
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.fleet import Instance, Knowledge
from pointsman.state.state import State
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.placement_rules import SAME
from pointsman_lab.torture.pool_model import PoolModel
from pointsman_lab.torture.pool_records import DECODING, HANDED_OVER, PENDING, PREFILL, ModelledInstance

WHOLE_CHECK_EVERY = 64


class ReferenceModel:
    def __init__(self, state: State, model: PoolModel) -> None:
        self._state = state
        self._model = model
        self._folded = 0

    def apply(self, stored: Stored) -> Iterator[str]:
        """Folds one entry on both sides. Yields differences."""
        for difference in self._differences(stored):
            yield f"after entry {stored.sequence} ({type(stored.event).__name__}{' again' if stored.duplicate else ''}): {difference}"

    def _differences(self, stored: Stored) -> Iterator[str]:
        event, state, model = stored.event, self._state, self._model
        self._folded += 1
        before = self._where(event)
        model.apply(event, stored.sequence)
        if event is None:
            state.skip(stored.sequence, subject=stored.subject, problem=stored.problem)
            return
        state.apply(event, stored.sequence)
        if state.fenced != model.fenced:
            term = event.stamp.term if event.stamp is not None else 0
            yield f"a decision of term {term} counts in term {model.term}"
        if isinstance(event, CacheEvent | FleetEvent):
            yield from self._compare_instance(event.instance)
            yield from self._compare_promises(event.instance)
        if isinstance(event, RequestEvent):
            yield from self._compare_request(event)
            for instance in dict.fromkeys((before, self._where(event))):
                if instance:
                    yield from self._compare_queue(instance, event.at)
        if self._folded % WHOLE_CHECK_EVERY == 0:
            for instance in model.instances:
                yield from self._compare_queue(instance, event.at)

    def _where(self, event: LogEvent | None) -> InstanceId | None:
        request = self._model.requests.get(event.request) if isinstance(event, RequestEvent) else None
        return request.instance if request is not None else None

    def _compare_instance(self, instance: InstanceId) -> Iterator[str]:
        mine, known = self._model.instances.get(instance), self._state.fleet.get(instance)
        if (mine is None) != (known is None):
            yield f"{instance} is {'not ' if known is None else ''}in the fleet"
            return
        if mine is None or known is None:
            if self._state.index.blocks(instance):
                yield f"something is still known of the cache of {instance}, which has left"
            return
        if (known.epoch, known.sequence) != (mine.epoch, mine.sequence):
            yield f"{instance} is at {known.epoch}, {known.sequence}, not {mine.epoch}, {mine.sequence}"
        elif mine.unverified != bool(known.doubt) and known.cache != "no_events":
            yield f"{instance} is {'not ' if mine.unverified else ''}in doubt ({known.doubt})"
        elif known.status != mine.status or known.draining != mine.draining:
            yield f"{instance} is {known.status}, draining: {known.draining}, not {mine.status}, {mine.draining}"
        elif (known.role, known.becomes) != (mine.role, mine.becomes):
            yield f"{instance} is {known.role} and becomes {known.becomes!r}, not {mine.role} and {mine.becomes!r}"
        elif known.half_open != mine.half_open:
            yield f"{instance} is {'' if known.half_open else 'not '}half-open"
        elif known.knowledge != mine.knowledge and not _is_contradicted(known, mine):
            yield f"the cache of {instance} is {known.knowledge}, not {mine.knowledge}"
        elif self._state.index.keys(instance) != mine.keys:
            yield f"the index of {instance} is not what was stored there"
        elif self._state.index.digest(instance) != mine.digest:
            yield f"the digest of {instance} is not that of its keys"

    def _compare_request(self, event: RequestEvent) -> Iterator[str]:
        mine, known = self._model.requests.get(event.request), self._state.workload.requests.get(event.request)
        if (mine is None) != (known is None):
            yield f"{event.request} is {'not ' if known is None else ''}in flight"
        elif mine is not None and known is not None:
            theirs = (
                (known.stage.value, known.instance, known.attempt, known.uncached_tokens, known.excluded),
                (known.decode, known.prefilled_by, known.rebind, known.rebound_from),
            )
            ours = (
                (mine.stage, mine.instance, mine.attempt, mine.uncached, mine.excluded),
                (mine.decode, mine.prefilled_by, mine.rebind, mine.rebound_from),
            )
            if theirs != ours:
                yield f"{event.request} is {theirs}, not {ours}"
            if isinstance(event, RequestArrived | RequestPlaced):
                hits = self._state.hits(mine.keys)
                for instance in self._model.instances:
                    blocks = hits.get(instance, 0)
                    least = self._model.hit_blocks(mine.keys, instance)
                    most = self._model.hit_blocks_max(mine.keys, instance)
                    if not least <= blocks <= most:
                        yield f"{event.request} hits {blocks} blocks at {instance}, not {least} to {most}"

    def _compare_queue(self, instance: InstanceId, now: EngineSeconds) -> Iterator[str]:
        queue, model = self._state.workload.queue(instance), self._model
        pending, inside = model.at(instance, PENDING), model.at(instance, PREFILL)
        running = {request.id for request in model.at(instance, HANDED_OVER, DECODING)}
        expected = {request.id for request in model.requests.values() if request.decode == instance}
        if [*queue.pending] != [r.id for r in pending] or [*queue.prefill] != [r.id for r in inside]:
            yield f"at {instance} wait {[*queue.pending]}, in prefill {[*queue.prefill]}, not {pending}, {inside}"
        elif set(queue.decoding) != running or set(queue.expected) != expected:
            yield f"{instance} decodes {[*queue.decoding]}, expects {[*queue.expected]}, not {running}, {expected}"
        sums = {
            "pending seconds": (queue.pending_seconds, sum(r.seconds for r in pending)),
            "pending tokens": (queue.pending_tokens, sum(r.uncached for r in pending)),
            "prefill seconds": (queue.prefill_seconds, sum(r.seconds for r in inside)),
            "prefill tokens": (queue.prefill_tokens, sum(r.uncached for r in inside)),
            "seconds left in the engine": (queue.engine_left(now)[0], model.engine_work(instance, now)[0]),
            "tokens left in the engine": (queue.engine_left(now)[1], model.engine_work(instance, now)[1]),
            "expected seconds": (
                self._state.latency.expected_seconds(instance, *queue.work_ahead(now)),
                model.queued(instance, now),
            ),
        }
        for what, (found, right) in sums.items():
            if not isclose(found, right, **SAME):
                yield f"{instance} has {found} {what}, not {right}"
        yield from self._compare_promises(instance)

    def _compare_promises(self, instance: InstanceId) -> Iterator[str]:
        found, promised = self._state.promises.blocks(instance), len(self._model.promised(instance))
        if found != promised:
            yield f"{found} blocks are promised at {instance}, not {promised}"


def _is_contradicted(known: Instance, mine: ModelledInstance) -> bool:
    """Whether an `exact` engine has contradicted its events at least twice."""
    found = known.contradicted and known.knowledge is Knowledge.DEGRADED
    return bool(found) and mine.knowledge == "exact" and mine.surprises >= 2
