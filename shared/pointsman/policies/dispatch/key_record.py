"""Records changes of API keys among the leader's decisions. The keys themselves are no part of State."""

from pointsman.contracts.access import ApiKeyChanged, KeyAction
from pointsman.policies.dispatch.turn import Turn
from pointsman.primitives import Tenant


def record_key(turn: Turn, key: str, tenant: Tenant, action: KeyAction, *, by: str) -> None:
    turn.decide(ApiKeyChanged(at=turn.now, stamp=turn.stamp, key=key, tenant=tenant, action=action, by=by))
