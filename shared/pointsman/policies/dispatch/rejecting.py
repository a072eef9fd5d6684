"""Rejects a request for a reason that one of the policies gives."""

from collections.abc import Collection, Sequence

from pointsman.contracts.decisions import RequestRejected
from pointsman.policies.admission import Refusal
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.dispatch.splitting import Decoder
from pointsman.policies.dispatch.turn import Turn
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.workload import NO_REQUEST, Request


def reject(
    turn: Turn,
    request: Request,
    attempt: int,
    excluded: Collection[InstanceId],
    refusal: Refusal,
    considered: Sequence[CandidateEstimate],
    decoder: Decoder = None,
    *,
    displaced_by: RequestId = NO_REQUEST,
) -> None:
    recording = turn.context.recording
    candidates = recording.candidates(considered)
    decoders = decoder.considered if decoder is not None else []
    decode_candidates = recording.decode_candidates(decoders)
    turn.decide(
        RequestRejected(
            at=turn.now,
            stamp=turn.stamp,
            request=request.id,
            reason=refusal.reason.value,
            detail=refusal.detail,
            retry_after=refusal.retry_after,
            policy=turn.policies.routing.name,
            settings=recording.settings(turn.context.settings),
            candidates=candidates,
            others=len(considered) - len(candidates),
            attempt=attempt,
            excluded=list(excluded),
            decode_candidates=decode_candidates,
            decode_others=len(decoders) - len(decode_candidates),
            displaced_by=displaced_by,
        )
    )
