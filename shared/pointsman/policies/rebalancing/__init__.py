"""Rebalancing policies: which pending requests should move to another instance."""

from pointsman.policies.rebalancing.base import Migration, MigrationPlan, RebalancingPolicy
from pointsman.policies.rebalancing.dualmap_pair import DualMapPair
from pointsman.policies.rebalancing.global_benefit import GlobalBenefit
from pointsman.policies.rebalancing.off import Off
from pointsman.policies.rebalancing.work_stealing import WorkStealing

REBALANCING_POLICIES: dict[str, type[RebalancingPolicy]] = {
    policy.name: policy for policy in (WorkStealing, DualMapPair, GlobalBenefit, Off)
}
DEFAULT_REBALANCING = WorkStealing.name

__all__ = ["DEFAULT_REBALANCING", "REBALANCING_POLICIES", "Migration", "MigrationPlan", "RebalancingPolicy"]
