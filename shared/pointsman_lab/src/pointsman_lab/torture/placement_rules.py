"""Rules of each placement, rejection and grant, whatever the policy, on figures of the pool model."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isclose

from pointsman.contracts.decisions import (
    Candidate,
    LeaderElected,
    RequestGranted,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.contracts.reasons import RejectReason
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman_lab.torture.ejections import EjectionRules
from pointsman_lab.torture.pool_model import PoolModel
from pointsman_lab.torture.pool_records import ARRIVED, NO_INSTANCE, PENDING, BookedRequest

HOLD_MAX = 1000
AGEING = 0.05
"""Default of `shortest_prefill`: prefill seconds per second of age."""
SAME = {"rel_tol": 1e-6, "abs_tol": 1e-6}
LATE = (RejectReason.SLO_TTFT, RejectReason.SLO_UNREACHABLE)
STEPS_MAX = 2.0
"""Full steps of its engine by which a first token may be held to come later than predicted."""


@dataclass(slots=True)
class Bounds:
    window_tokens: Tokens
    running_max: int
    pending_max: int
    ordering: str
    admission: str
    rebind: bool
    ageing: float
    hold_seconds: EngineSeconds
    hold_max: int

    @classmethod
    def of(cls, settings: Settings) -> "Bounds":
        return cls(
            window_tokens=int(settings["prefill_window_tokens"]),
            running_max=int(settings["running_max"]),
            pending_max=int(settings["pending_max"]),
            ordering=str(settings["ordering"]),
            admission=str(settings["admission"]),
            rebind=bool(settings.get("rebind", False)),
            ageing=float(settings.get("order.ageing", AGEING)),
            hold_seconds=float(settings.get("hold_seconds", 0.0)),
            hold_max=int(settings.get("hold_max", HOLD_MAX)),
        )


class PlacementRules:
    def __init__(self, elected: LeaderElected, model: PoolModel) -> None:
        self._term = elected.term
        self._leader = elected.scheduler
        self._stall_counts = elected.policy == "dualmap"
        """Whether stall time counts as queue time."""
        self._kv_turnover = float(elected.settings.get("kv_turnover", 0.0)) if elected.policy == "pointsman" else 0.0
        self._kv_tpot_max = float(elected.settings.get("kv_tpot_max", inf))
        self._bounds = Bounds.of(elected.settings)
        self._model = model
        self._displaced: RequestRejected | None = None
        """Leaves the queue for the next placement, whose figures were taken while it was still there."""
        self._ejections = EjectionRules(elected.settings, model.health, model.speed)

    def _placed(self, event: RequestPlaced) -> Iterator[str]:
        model = self._model
        request = model.requests.get(event.request)
        if request is None:
            yield f"{event.request} is not in flight"
            return
        if request.stage != ARRIVED and event.attempt <= request.attempt:
            yield f"{event.request} has its place for attempt {request.attempt}"
        if missing := set(request.excluded).difference(event.excluded):
            yield f"{event.request} may go to {sorted(missing)} again, which failed it before"
        yield from self._may_take(event.instance, request, tuple(event.excluded))
        if not self._queue_has_room() and not model.on_trial(event.instance):  # a trial does not wait
            yield "the queue is full"
        yield from self._candidates(event.candidates, request, event.at, tuple(event.excluded))
        if event.instance not in model.instances:
            return
        own = next((c for c in event.candidates if c.instance == event.instance), None)
        if own is None or (event.hit_blocks, event.uncached_tokens) != (own.hit_blocks, own.uncached_tokens):
            yield f"{event.instance} offers {own}, not {event.hit_blocks} blocks, {event.uncached_tokens} tokens to compute"
            return
        work = model.prefill_cost(request.prompt_tokens, event.uncached_tokens, event.instance)
        if not isclose(event.prefill_seconds, work, **SAME):
            yield f"{event.prefill_seconds} s are booked for {event.uncached_tokens} tokens, which cost {work}"
        if not isclose(event.queue_seconds, own.queue_seconds, **SAME):
            yield f"the queue is {event.queue_seconds} s, and was weighed as {own.queue_seconds}"
        transfer = event.transfer_seconds if event.decode else 0.0
        if not isclose(event.predicted_ttft, own.queue_seconds + own.prefill_seconds + transfer, **SAME):
            yield f"its first token is predicted in {event.predicted_ttft} s, which is not the sum of its parts"
        lost = request.lost(event, displaces=self._displaced is not None)
        if not isclose(event.lost_seconds, lost, **SAME):
            yield f"it is booked with a loss of {event.lost_seconds} s, not {lost}"
        budget = request.deadline + lost - event.at
        tries = model.on_trial(event.instance)
        others = [i for i in model.ready(request, tuple(event.excluded)) if not model.on_trial(i)]
        if tries and others and (model.tried_by(event.instance) or model.at(event.instance, PENDING)):
            yield f"{event.instance} is half-open, and tried by another already"
        if self._bounds.admission != "none" and own.predicted_ttft > budget + 1e-6 and not tries:
            yield f"its first token is predicted in {own.predicted_ttft} s, {budget} s are left"
        yield from self._pair(event.instance, event.decode, request, tuple(event.excluded))

    def _rejected(self, event: RequestRejected) -> Iterator[str]:
        request = self._model.requests.get(event.request)
        if request is None:
            yield f"{event.request} is not in flight"
            return
        excluded = tuple(event.excluded)
        yield from self._candidates(event.candidates, request, event.at, excluded)
        lost = request.lost(event)
        budget = request.deadline + lost - event.at
        able = self._model.ready(request, excluded)
        if event.reason in LATE:
            latest = [
                c.predicted_ttft + STEPS_MAX * min(c.queue_seconds, self._model.full_step(c.instance))
                for c in event.candidates
            ]
            late = [seconds for seconds in latest if seconds > budget]
            if self._bounds.admission == "none":
                yield "it is refused as late, and all are admitted"
            elif self._bounds.admission == "predicted_ttft" and not late:
                yield f"it is refused as late, and would be on time everywhere: {budget} s are left"
            elif self._bounds.admission != "predicted_ttft" and len(late) < len(event.candidates):
                yield f"it is refused as late, and would be on time somewhere: {budget} s are left"
            if event.reason == RejectReason.SLO_UNREACHABLE and any(
                c.prefill_seconds <= request.slo_ttft + lost for c in event.candidates
            ):
                yield f"its objective of {request.slo_ttft + lost} s is called out of reach, and is not"
        elif event.reason == RejectReason.QUEUE_FULL and self._queue_has_room():
            yield f"the queue is called full with {self._waiting()} of {self._bounds.pending_max}"
        elif event.reason == RejectReason.NO_INSTANCE and any(self._model.instances[i].role == "both" for i in able):
            yield f"it is rejected without an instance, and {able} would take it"
        elif (
            event.reason == RejectReason.NO_INSTANCE
            and not able
            and not excluded
            and self._would_be_held(request, event.at)
        ):
            yield f"no instance takes it, and it is not held, {event.at - request.arrived_at:.2f} s after it came"

    def _granted(self, event: RequestGranted) -> Iterator[str]:
        request = self._model.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (PENDING, event.instance):
            yield f"{event.request} does not wait for {event.instance}"
            return
        known = self._model.instances.get(event.instance)
        status = known.status if known is not None else "gone"
        elsewhere = self._with_decoder(request)
        stays = status in ("draining", "ejected") and not elsewhere
        if status != "ready" and event.instance not in elsewhere and not stays:
            yield f"{event.instance} is {status}; {elsewhere} would take {event.request}"
        if event.instance in request.excluded:
            yield f"{event.instance} has failed {event.request} before"
        if self._model.on_trial(event.instance) and (others := self._model.tried_by(event.instance)):
            yield f"{event.instance} is half-open, and tried by {[other.id for other in others]} already"
        if event.attempt != request.attempt:
            yield f"{event.request} is at attempt {request.attempt}, not {event.attempt}"
        if not self._fits(request):
            inside = [
                (r.id, r.uncached, r.stage) for r in self._model.requests.values() if r.instance == event.instance
            ]
            yield f"{event.instance} has no room for {request.uncached} tokens beside {inside} ({self._bounds})"
        first = self._first(event.instance)
        if first is not None and first is not request and not request.rebound_from:
            yield f"{first.id} comes before {event.request} at {event.instance}"
        may = self._bounds.rebind and not request.rebound_from and not request.decode
        if event.rebind != may:
            yield f"its ingress is {'' if event.rebind else 'not '}to ask whether it goes elsewhere"

    def _with_decoder(self, request: BookedRequest) -> list[InstanceId]:
        """Instances for it; of those that only prefill none while nobody else would decode."""
        model = self._model
        decoded = bool(request.decode) or any(name not in request.excluded for name in model.decoders())
        able = model.ready(request, request.excluded)
        return [name for name in able if decoded or model.instances[name].role != "prefill"]

    def _may_take(
        self, instance: InstanceId, request: BookedRequest, excluded: tuple[InstanceId, ...]
    ) -> Iterator[str]:
        known = self._model.instances.get(instance)
        if instance not in self._model.ready(request, excluded):
            why = "left" if known is None else f"{known.status}, {known.role}, {sorted(known.adapters)}"
            yield f"{instance} does not take {request.id} ({why}; excluded: {excluded})"

    def _pair(
        self, instance: InstanceId, decode: InstanceId, request: BookedRequest, excluded: tuple[InstanceId, ...]
    ) -> Iterator[str]:
        known = self._model.instances.get(instance)
        if known is not None and known.role == "prefill" and decode == NO_INSTANCE:
            yield f"{instance} only prefills, and no instance decodes"
        takes = decode in self._model.decoders() and decode not in excluded
        if decode not in (NO_INSTANCE, request.decode) and not takes:
            yield f"{decode} decodes nothing for {request.id}"

    def _wrong_hit(self, hit_blocks: int, uncached: Tokens, request: BookedRequest, instance: InstanceId) -> str:
        """At least what is held or promised there, at most what was delivered lately too."""
        model = self._model
        least, most = model.hit_blocks(request.keys, instance), model.hit_blocks_max(request.keys, instance)
        right = model.uncached(request.prompt_tokens, hit_blocks, instance)
        if least <= hit_blocks <= most and uncached == right:
            return ""
        return f"{hit_blocks} blocks, {uncached} tokens to compute, not {least} to {most}, {right}"

    def _candidates(
        self, candidates: list[Candidate], request: BookedRequest, now: EngineSeconds, excluded: tuple[InstanceId, ...]
    ) -> Iterator[str]:
        model = self._model
        able = model.ready(request, excluded)
        for candidate in candidates:
            instance = candidate.instance
            if instance not in able:
                yield f"{instance} was weighed, and does not take {request.id}: {able}"
                continue
            uncached = candidate.uncached_tokens
            if problem := self._wrong_hit(candidate.hit_blocks, uncached, request, instance):
                yield f"{instance} was weighed with {problem}"
                continue
            queue = model.queued(instance, now)
            on_trial = model.on_trial(instance) and isclose(candidate.queue_seconds, queue, **SAME)
            if not on_trial:  # a trial goes there whatever the policy would say
                queue += self._routing_waits(instance, request, now)
            prefill = model.expected_prefill(
                instance, model.prefill_cost(request.prompt_tokens, uncached, instance), uncached
            )
            if not isclose(candidate.queue_seconds, queue, **SAME) or not isclose(
                candidate.prefill_seconds, prefill, **SAME
            ):
                yield (
                    f"{instance} was weighed with {candidate.queue_seconds} + {candidate.prefill_seconds} s, not "
                    f"{queue} + {prefill}"
                )
            transfer = candidate.predicted_ttft - queue - prefill
            if transfer < -1e-6 or (transfer > 1e-6 and model.instances[instance].role != "prefill"):
                yield f"{instance} was weighed with {candidate.predicted_ttft} s, which is not {queue + prefill}"

    def _routing_waits(self, instance: InstanceId, request: BookedRequest, now: EngineSeconds) -> EngineSeconds:
        """What the routing policy counts as queue beside the work."""
        stalled = self._model.stalled(instance, now) if self._stall_counts else 0.0
        if not self._kv_turnover:
            return stalled
        return stalled + self._kv_turnover * self._model.kv_wait(instance, request, self._kv_tpot_max)

    def _first(self, instance: InstanceId) -> BookedRequest | None:
        waiting = self._model.at(instance, PENDING)
        if not waiting:
            return None
        if self._bounds.ordering == "edf":
            return min(waiting, key=lambda request: request.deadline)
        if self._bounds.ordering == "shortest_prefill":
            return min(waiting, key=lambda request: request.seconds + self._bounds.ageing * request.arrived_at)
        return waiting[0]

    def _fits(self, request: BookedRequest) -> bool:
        return self._room(request.instance, request.uncached)

    def _room(self, instance: InstanceId, tokens: Tokens) -> bool:
        bounds = self._bounds
        return self._model.has_room(
            instance, tokens, window_tokens=bounds.window_tokens, running_max=bounds.running_max
        )

    def _would_be_held(self, request: BookedRequest, now: EngineSeconds) -> bool:
        held = sum(known.stage == ARRIVED for known in self._model.requests.values())
        in_time = self._bounds.hold_seconds > 0 and now - request.arrived_at < self._bounds.hold_seconds - 1e-6
        return request.stage == ARRIVED and not request.excluded and in_time and held <= self._bounds.hold_max

    def _waiting(self) -> int:
        leaves = self._displaced.request if self._displaced is not None else None
        return sum(r.stage == PENDING and r.id != leaves for r in self._model.requests.values())

    def _queue_has_room(self) -> bool:
        return self._waiting() < self._bounds.pending_max
