"""Places requests: into the queue of an instance, held until one is ready, or rejected."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import msgspec

from pointsman.contracts.block_keys import KEY_BYTES
from pointsman.contracts.codec import short_reason
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestArrived
from pointsman.policies.admission import Refusal
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.decode_placement import SAME_INSTANCE, DecodeAssignment, DecodeChoice, DecodeRefusal
from pointsman.policies.dispatch import queue_bound
from pointsman.policies.dispatch.granting import grant_next
from pointsman.policies.dispatch.rejecting import reject
from pointsman.policies.dispatch.splitting import Decoder, assignment, decoder_for
from pointsman.policies.dispatch.tenant_limits import reject_over_limit
from pointsman.policies.dispatch.turn import Turn
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing import NoInstance
from pointsman.policies.routing.base import Choice
from pointsman.primitives import NO_SECONDS, EngineSeconds, InstanceId, WallSeconds, engine_seconds
from pointsman.state import fold_versions
from pointsman.state.instance_status import has_trial_request
from pointsman.state.workload import NO_INSTANCE, Request, Stage

RETRY_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
"""Retry-After if it is unknown when an instance will be ready."""
STARTING_WALL_SECONDS_MIN: WallSeconds = WallSeconds(1.0)
PLACED_MAX = 400
"""Of the held requests, in one turn."""
REFUSED_KEYS_MAX = 64
"""Block keys in the log of a request over a limit of its tenant, for `what-if`. All those of long prompts would let such a
tenant fill the log."""


def route(turn: Turn, command: RouteRequest) -> None:
    """A repeated command gives no decision, unless an earlier leader only recorded the arrival."""
    workload = turn.state.workload
    request = workload.requests.get(command.request)
    if request is None and workload.end_of(command.request):
        return
    if request is not None and _has_its_place(request, command.attempt):
        return
    arrived_earlier = request is not None
    if request is None:
        _arrive(turn, command)
        request = workload.requests[command.request]
    source = request.instance
    _place(turn, request, command.attempt, command.excluded, arrived_earlier=arrived_earlier)
    grant_next(turn, request.instance)
    if source and source != request.instance:
        grant_next(turn, source)


def place_held(turn: Turn) -> None:
    """Thousands may be held while no instance is ready: they are counted once, and who stays held costs next to nothing.
    The others are placed in turns that are shorter than the lease."""
    held_count, placed = _held_count(turn), 0
    for request in list(turn.state.workload.requests.values()) if held_count else ():
        if request.stage is not Stage.ARRIVED or _may_hold(turn, request, held_count):
            continue
        _place(turn, request, request.attempt, request.excluded, arrived_earlier=True, held_count=held_count)
        grant_next(turn, request.instance)
        held_count -= 1
        placed += 1
        if placed == PLACED_MAX:
            return


def _has_its_place(request: Request, attempt: int) -> bool:
    """Whether this attempt was placed before, or the client has seen part of the answer."""
    if request.stage is Stage.ARRIVED:  # an earlier leader took it in
        return False
    return attempt <= request.attempt or (request.stage is Stage.DECODING and request.streaming)


def _arrive(turn: Turn, command: RouteRequest) -> None:
    keys, most = command.keys, REFUSED_KEYS_MAX * KEY_BYTES
    if len(keys) > most and not command.instead_of and turn.state.tenants.is_over_limit(command.tenant, turn.now):
        keys = keys[:most]
    turn.decide(
        RequestArrived(
            at=turn.now,
            stamp=turn.stamp,
            request=command.request,
            arrived_at=command.arrived_at,
            ingress=command.ingress,
            tenant=command.tenant,
            keys=keys,
            prompt_tokens=command.prompt_tokens,
            max_output_tokens=command.max_output_tokens,
            slo_ttft=command.slo_ttft,
            slo_tpot=command.slo_tpot,
            session=command.session,
            exact=command.exact,
            streaming=command.streaming,
            adapter=command.adapter,
            followed=command.followed,
            held_up=command.held_up or NO_SECONDS,
            sent_at=command.sent_at or NO_SECONDS,
            alias=command.alias,
            context_tokens=command.context_tokens,
            client_request_id=command.client_request_id,
            cache_group=command.cache_group,
            priority=command.priority,
            answers=command.answers,
            instead_of=command.instead_of,
        )
    )


class Answer(msgspec.Struct, frozen=True):
    """What a request gets, before anything is decided. `request`: with its lost time in its SLO. `displaced`: the request
    that has to make room."""

    request: Request
    admitted: Choice | Refusal
    considered: Sequence[CandidateEstimate]
    decoder: Decoder
    decode: DecodeAssignment = SAME_INSTANCE
    displaced: Request | None = None
    lost_seconds: EngineSeconds = 0.0


def answer_to(
    turn: Turn,
    request: Request,
    attempt: int,
    excluded: Collection[InstanceId],
    *,
    arrived_earlier: bool,
    held_count: int | None = None,
) -> Answer | None:
    """Changes nothing, so a shadow policy may ask too. None: the request is held. `arrived_earlier`: before this
    turn. `held_count`: requests held, this one included; None: counted if need be."""
    lost = _lost_seconds(turn, request, attempt, arrived_earlier=arrived_earlier)
    if lost:
        request = replace(request, slo_ttft=request.slo_ttft + lost)
    decoder = decoder_for(turn, request, excluded)
    view = _view(turn, request, excluded, decoder)
    trial = _trial(turn, view)
    try:
        choice = trial or turn.policies.routing.choose(view)
    except NoInstance as answer:
        if not _may_hold(turn, request, _held_count(turn) if held_count is None else held_count):
            no_instance = Refusal(RejectReason.NO_INSTANCE, str(answer), _retry_after(turn))
            return Answer(request, _no_decoder(turn, decoder, excluded) or no_instance, [], decoder)
        return None
    place = None if trial else queue_bound.place_for(turn, request)
    if isinstance(place, Refusal):
        return Answer(request, place, choice.considered, decoder)
    admitted: Choice | Refusal = choice
    if not trial:
        admitted = turn.policies.admission.admit(view, choice)
    if isinstance(admitted, Refusal):
        return Answer(request, admitted, choice.considered, decoder)
    decode = assignment(turn, view.request, admitted.chosen, decoder)
    if isinstance(decode, Refusal):
        return Answer(request, decode, choice.considered, decoder)
    return Answer(request, admitted, admitted.considered, decoder, decode, place, lost)


def _place(
    turn: Turn,
    request: Request,
    attempt: int,
    excluded: Collection[InstanceId],
    *,
    arrived_earlier: bool,
    held_count: int | None = None,
) -> None:
    if request.over_limit is not None:
        reject_over_limit(turn, request, request.over_limit, attempt)
        return
    try:
        answer = answer_to(turn, request, attempt, excluded, arrived_earlier=arrived_earlier, held_count=held_count)
    except Exception as error:  # noqa: BLE001 - a request that no policy can take must not keep others from their place
        defect = short_reason(f"it cannot be placed: {type(error).__name__}: {error}")
        reject(turn, request, attempt, excluded, Refusal(RejectReason.NO_INSTANCE, defect, NO_SECONDS), [])
        return
    if answer is None:
        return
    if isinstance(answer.admitted, Refusal):
        reject(turn, answer.request, attempt, excluded, answer.admitted, answer.considered, answer.decoder)
        return
    displaced = queue_bound.displace(turn, answer.displaced, answer.request) if answer.displaced else NO_INSTANCE
    _queue(turn, answer, answer.admitted, attempt, excluded)
    if displaced:
        grant_next(turn, displaced)


def _queue(turn: Turn, answer: Answer, admitted: Choice, attempt: int, excluded: Collection[InstanceId]) -> None:
    """Into the queue of the chosen instance, with what was weighed and predicted."""
    candidate, decode = admitted.chosen, answer.decode
    ttft = predicted_ttft(candidate, decode)
    upper = NO_SECONDS
    if turn.state.settings.fold_version >= fold_versions.UPPER_TTFT:
        intervals = turn.context.policy_state.ttft_intervals
        upper = ttft * intervals.factor(candidate.instance, *candidate.interval_of)
    recording = turn.context.recording
    candidates = recording.candidates(admitted.considered, candidate.instance)
    decode_candidates = recording.decode_candidates(decode.considered, decode.instance)
    transfer = decode.transfer_seconds or (candidate.transfer_seconds if candidate.fetch_from else NO_SECONDS)
    turn.decide(
        RequestPlaced(
            at=turn.now,
            stamp=turn.stamp,
            request=answer.request.id,
            instance=candidate.instance,
            hit_blocks=candidate.hit_blocks,
            uncached_tokens=candidate.uncached_tokens,
            queue_seconds=candidate.queue_seconds,
            prefill_seconds=candidate.work_seconds,
            predicted_ttft=ttft,
            predicted_ttft_upper=upper,
            policy=turn.policies.routing.name,
            settings=recording.settings(turn.context.settings),
            reason=admitted.reason,
            candidates=candidates,
            others=len(admitted.considered) - len(candidates),
            attempt=attempt,
            excluded=list(excluded),
            decode=decode.instance,
            decode_reason=decode.reason,
            decode_candidates=decode_candidates,
            decode_others=len(decode.considered) - len(decode_candidates),
            transfer_seconds=transfer or NO_SECONDS,
            fetch_from=candidate.fetch_from,
            fetched_tokens=candidate.fetched_tokens,
            lost_seconds=answer.lost_seconds or NO_SECONDS,
            best_effort=admitted.best_effort,
            loads=list(candidate.loads),
            load_seconds=candidate.load_seconds or NO_SECONDS,
        )
    )


def _view(turn: Turn, request: Request, excluded: Collection[InstanceId], decoder: Decoder) -> PoolView:
    seen = turn.context.policy_state
    if decoder is None:
        return PoolView(seen, request, turn.now, excluded=excluded)
    transfer = decoder.chosen.transfer_seconds if isinstance(decoder, DecodeChoice) else None
    return PoolView(seen, request, turn.now, excluded=excluded, transfer_seconds=transfer)


def _trial(turn: Turn, view: PoolView) -> Choice | None:
    """The half-open instance that gets this request: routing policies have learned to avoid it."""
    if view.retried:
        return None
    for name in view.on_trial:
        queue = turn.state.workload.queues.get(name)
        if not (queue and queue.pending) and not has_trial_request(turn.state, name) and not _failed_trial(turn, name):
            candidate = view.candidate(name)
            return Choice(candidate, f"{name} is tried again after its ejection", [candidate])
    return None


def _failed_trial(turn: Turn, name: InstanceId) -> bool:
    """Whether it is about to be ejected again. In a split fleet it may have to stay, since nobody else has its role."""
    state = turn.state
    return (
        state.settings.fold_version >= fold_versions.FAILED_TRIALS
        and not state.fleet.split
        and bool(state.outliers.record(name).trial_failure)
    )


def _lost_seconds(turn: Turn, request: Request, attempt: int, *, arrived_earlier: bool) -> EngineSeconds:
    """Time without a ready instance, or at a failed engine: not load, so admission adds it to the SLO."""
    if turn.state.settings.fold_version < fold_versions.HOLDING or request.stage is Stage.PENDING:
        return 0.0
    if request.stage is Stage.ARRIVED:
        is_further = arrived_earlier or attempt > 1 or bool(request.instead_of)
        return max(0.0, turn.now - request.arrived_at) if is_further else 0.0
    return max(0.0, turn.now - request.granted_at)


def predicted_ttft(candidate: CandidateEstimate, decode: DecodeAssignment) -> EngineSeconds:
    if not decode.instance:
        return candidate.predicted_ttft
    return candidate.queue_seconds + candidate.prefill_seconds + candidate.load_seconds + decode.transfer_seconds


def _no_decoder(turn: Turn, decoder: Decoder, excluded: Collection[InstanceId]) -> Refusal | None:
    if isinstance(decoder, DecodeRefusal) and any(i not in excluded for i in turn.context.policy_state.fleet.ready):
        return decoder.refusal
    return None


# Holding requests while no instance is ready


def _held_count(turn: Turn) -> int:
    return sum(request.stage is Stage.ARRIVED for request in turn.state.workload.requests.values())


def _may_hold(turn: Turn, request: Request, held_count: int) -> bool:
    """`held_count`: itself included."""
    policies = turn.policies
    if request.stage is not Stage.ARRIVED or request.excluded or _is_servable(turn, request):
        return False
    if turn.now - request.arrived_at >= policies.hold_seconds or _holds_none(turn):
        return False
    return held_count <= policies.hold_max


def _holds_none(turn: Turn) -> bool:
    """Even where the leader's clock is behind that of an ingress."""
    return not turn.policies.hold_seconds and turn.state.settings.fold_version >= fold_versions.HOLD_NONE


def _is_servable(turn: Turn, request: Request) -> bool:
    fleet = turn.state.fleet
    able = fleet.ready_for(request)
    if not fleet.split or turn.state.settings.fold_version < fold_versions.HOLDING:
        return bool(able)
    decodes = any(fleet[instance].can_serve(request) for instance in fleet.decoders)
    return any(decodes or fleet[instance].role != "prefill" for instance in able)


def _retry_after(turn: Turn) -> EngineSeconds:
    """An instance that is being started is assumed to need as long again as it has taken so far."""
    settings, hold = turn.state.settings, turn.policies.hold_seconds
    if not hold or settings.fold_version < fold_versions.HOLDING:
        return 1.0
    decided = turn.state.scaling.decided
    if decided is not None and decided.wanted > len(turn.state.fleet.ready):
        return min(max(turn.now - decided.at, engine_seconds(STARTING_WALL_SECONDS_MIN, settings.speed)), hold)
    return min(engine_seconds(RETRY_WALL_SECONDS, settings.speed), hold)
