"""Prefill/decode split: the decode instance of a placed request, and the hand-over after its prefill."""

from collections.abc import Collection

from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.decisions import HandOverRefused, RequestHandedOver
from pointsman.policies.admission import Refusal
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.decode_placement import (
    SAME_INSTANCE,
    DecodeAssignment,
    DecodeChoice,
    DecodeRefusal,
    decode_candidate,
)
from pointsman.policies.dispatch.granting import grant_next
from pointsman.policies.dispatch.turn import Turn
from pointsman.primitives import InstanceId
from pointsman.state.workload import NO_INSTANCE, Request, Stage

Decoder = DecodeChoice | DecodeRefusal | None


def decoder_for(turn: Turn, request: Request, excluded: Collection[InstanceId], *, check_load: bool = True) -> Decoder:
    seen = turn.context.policy_state
    if not seen.fleet.split:
        return None
    return turn.policies.decode_placement.choose(seen, request, turn.now, excluded=excluded, check_load=check_load)


def assignment(
    turn: Turn, request: Request, candidate: CandidateEstimate, decoder: Decoder
) -> DecodeAssignment | Refusal:
    """`candidate` itself if it decodes too and is fast enough."""
    if decoder is None:
        return SAME_INSTANCE
    seen, policy = turn.context.policy_state, turn.policies.decode_placement
    instance = seen.fleet[candidate.instance]
    if instance.role == "both":
        alone = decode_candidate(seen, instance, request, turn.now, candidate.hit_blocks)
        if policy.fast_enough(alone, request):
            return SAME_INSTANCE
    return decoder.refusal if isinstance(decoder, DecodeRefusal) else decoder.assignment


def decode_after_move(turn: Turn, request: Request, instance: InstanceId) -> InstanceId | None:
    """NO_INSTANCE if `instance` decodes too, None if there is none."""
    if turn.state.fleet[instance].role != "prefill":
        return NO_INSTANCE
    if request.decode:
        return request.decode
    decoder = decoder_for(turn, request, request.excluded, check_load=False)
    return decoder.chosen.instance if isinstance(decoder, DecodeChoice) else None


def hand_over(turn: Turn, command: HandOverRequest) -> None:
    """Choose the decode instance after a prefill, or refuse if all are overloaded; the request may ask again."""
    request = turn.state.workload.requests.get(command.request)
    if request is None or request.instance != command.instance or request.attempt != command.attempt:
        return
    if request.stage is not Stage.PREFILL and not request.awaits_decoder:
        return
    chosen = turn.policies.decode_placement.choose(
        turn.context.policy_state, request, turn.now, excluded=request.excluded, planned=request.decode
    )
    instance = NO_INSTANCE if isinstance(chosen, DecodeRefusal) else chosen.chosen.instance
    candidates = turn.context.recording.decode_candidates(chosen.considered, instance)
    others = len(chosen.considered) - len(candidates)
    if isinstance(chosen, DecodeRefusal):
        turn.decide(
            HandOverRefused(
                at=turn.now,
                stamp=turn.stamp,
                request=request.id,
                source=command.instance,
                attempt=command.attempt,
                reason=chosen.refusal.reason.value,
                detail=chosen.refusal.detail,
                retry_after=chosen.refusal.retry_after,
                prefill=command.prefill,
                candidates=candidates,
                others=others,
            )
        )
    else:
        turn.decide(
            RequestHandedOver(
                at=turn.now,
                stamp=turn.stamp,
                request=request.id,
                source=command.instance,
                instance=instance,
                attempt=command.attempt,
                prefill=command.prefill,
                reason=chosen.reason,
                candidates=candidates,
                others=others,
            )
        )
    grant_next(turn, command.instance)
