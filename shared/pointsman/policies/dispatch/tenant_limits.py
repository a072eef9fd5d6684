"""Limits of tenants: sets the policies in force, and rejects what is over a limit. State decides whether an arrival is over
one (`state/tenants.py`), so that retries, moves and repeated commands are not counted again."""

from pointsman.contracts.decisions import RequestRejected
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet
from pointsman.policies.admission import Refusal
from pointsman.policies.dispatch.granting import grant_next
from pointsman.policies.dispatch.turn import Turn
from pointsman.primitives import Name
from pointsman.state.workload import OverLimit, Request

POLICY = "tenant_limits"
"""Of these rejections: they depend on no other policy and no setting."""


def set_policies(turn: Turn, policies: TenantPolicies, by: Name) -> None:
    """No decision if they are in force already."""
    if policies == turn.state.tenants.policies:
        return
    turn.decide(TenantPoliciesSet(at=turn.now, stamp=turn.stamp, policies=policies, by=by))
    for instance in list(turn.state.workload.queues):  # a share of the KV capacity may have grown
        grant_next(turn, instance)


def reject_over_limit(turn: Turn, request: Request, over: OverLimit, attempt: int) -> None:
    refusal = Refusal(over.reason, f"the limit of {over.limit} is used up", over.passes_at - turn.now)
    turn.decide(
        RequestRejected(
            at=turn.now,
            stamp=turn.stamp,
            request=request.id,
            reason=refusal.reason.value,
            detail=refusal.detail,
            retry_after=refusal.retry_after,
            policy=POLICY,
            settings={},
            candidates=[],
            attempt=attempt,
        )
    )
