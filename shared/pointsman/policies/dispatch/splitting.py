"""Prefill/decode split: which instance decodes a placed request, and the hand-over when its prefill is over."""

from collections.abc import Collection

from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.decisions import HandOverRefused, RequestHandedOver
from pointsman.policies.admission import Refusal
from pointsman.policies.decode_placement import (
    SAME_INSTANCE,
    DecodeAssignment,
    DecodeChoice,
    DecodeRefusal,
    decode_candidate,
)
from pointsman.policies.dispatch.granting import grant_next
from pointsman.policies.dispatch.turn import Turn
from pointsman.policies.pool_view import CandidateEstimate
from pointsman.primitives import InstanceId
from pointsman.state.workload import NO_INSTANCE, Request, Stage

Decoder = DecodeChoice | DecodeRefusal | None
"""The instance that would decode what another one prefills; None where no instance of the pool is split."""


def decoder_for(turn: Turn, request: Request, excluded: Collection[InstanceId], *, check_load: bool = True) -> Decoder:
    known = turn.leader.policy_state
    if not known.fleet.split:
        return None
    return turn.policies.decode_placement.choose(known, request, turn.now, excluded=excluded, check_load=check_load)


def assignment(
    turn: Turn, request: Request, candidate: CandidateEstimate, decoder: Decoder
) -> DecodeAssignment | Refusal:
    """The decode instance of a request that `candidate` prefills: itself where it decodes too and is fast enough."""
    if decoder is None:
        return SAME_INSTANCE
    known, policy = turn.leader.policy_state, turn.policies.decode_placement
    instance = known.fleet[candidate.instance]
    if instance.role == "both":
        alone = decode_candidate(known, instance, request, turn.now, candidate.hit_blocks)
        if policy.fast_enough(alone, request):
            return SAME_INSTANCE
    return decoder.refusal if isinstance(decoder, DecodeRefusal) else decoder.assignment


def decode_after_move(turn: Turn, request: Request, instance: InstanceId) -> InstanceId | None:
    """The decode instance of an admitted request that moves to `instance`: NO_INSTANCE where that one decodes too, None where
    there is none."""
    if turn.state.fleet[instance].role != "prefill":
        return NO_INSTANCE
    if request.decode:
        return request.decode
    decoder = decoder_for(turn, request, request.excluded, check_load=False)
    return decoder.chosen.instance if isinstance(decoder, DecodeChoice) else None


def hand_over(turn: Turn, command: HandOverRequest) -> None:
    """A prefill is over: choose the decode instance, or refuse where all are overloaded. A refused request may ask again;
    one that was handed over or has ended gets no decision."""
    request = turn.state.workload.requests.get(command.request)
    if request is None or request.instance != command.instance or request.attempt != command.attempt:
        return
    if request.stage is not Stage.PREFILL and not request.awaits_decoder:
        return
    chosen = turn.policies.decode_placement.choose(
        turn.leader.policy_state, request, turn.now, excluded=request.excluded, planned=request.decode
    )
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
                candidates=chosen.considered,
            )
        )
    else:
        turn.decide(
            RequestHandedOver(
                at=turn.now,
                stamp=turn.stamp,
                request=request.id,
                source=command.instance,
                instance=chosen.chosen.instance,
                attempt=command.attempt,
                prefill=command.prefill,
                reason=chosen.reason,
                candidates=chosen.considered,
            )
        )
    grant_next(turn, command.instance)
