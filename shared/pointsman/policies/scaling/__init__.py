"""Scaling policies: the number of instances of a pool. `limits` turns targets into decisions."""

from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.policies.scaling.limits import Limits, limited
from pointsman.policies.scaling.manual import Manual
from pointsman.policies.scaling.schedule import Schedule
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.policies.scaling.target_utilisation import TargetUtilisation

SCALING_POLICIES: dict[str, type[ScalingPolicy]] = {
    policy.name: policy for policy in (Manual, Schedule, SloAttainment, TargetUtilisation)
}
DEFAULT_SCALING = Manual.name

__all__ = ["DEFAULT_SCALING", "SCALING_POLICIES", "Limits", "PoolSize", "ScaleTarget", "ScalingPolicy", "limited"]
