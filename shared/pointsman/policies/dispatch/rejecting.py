"""Rejects a request for a reason that one of the policies gives."""

from collections.abc import Collection, Sequence

from pointsman.contracts.decisions import RequestRejected
from pointsman.policies.admission import Refusal
from pointsman.policies.dispatch.splitting import Decoder
from pointsman.policies.dispatch.turn import Turn
from pointsman.policies.pool_view import CandidateEstimate
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.workload import Request

NO_REQUEST = RequestId("")


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
    turn.decide(
        RequestRejected(
            at=turn.now,
            stamp=turn.stamp,
            request=request.id,
            reason=refusal.reason.value,
            detail=refusal.detail,
            retry_after=refusal.retry_after,
            policy=turn.policies.routing.name,
            settings=turn.leader.settings,
            candidates=[o.recorded() for o in considered],
            attempt=attempt,
            excluded=list(excluded),
            decode_candidates=decoder.considered if decoder is not None else [],
            displaced_by=displaced_by,
        )
    )
