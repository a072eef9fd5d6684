"""Routing policies: each maps a `PoolView` to a `Choice`. Each docstring names source, bias and limits."""

from pointsman.policies.routing.approximate_token_load import ApproximateTokenLoad
from pointsman.policies.routing.base import Choice, NoInstance, RoutingPolicy
from pointsman.policies.routing.cache_affinity import CacheAffinity
from pointsman.policies.routing.d2lpm import D2Lpm
from pointsman.policies.routing.dualmap import DualMap
from pointsman.policies.routing.dynamo_cost import DynamoCost
from pointsman.policies.routing.lbgr import Lbgr
from pointsman.policies.routing.least_loaded import LeastLoaded
from pointsman.policies.routing.min_ttft import MinTtft
from pointsman.policies.routing.pointsman import Pointsman
from pointsman.policies.routing.power_of_two import PowerOfTwo
from pointsman.policies.routing.preble import Preble
from pointsman.policies.routing.random_choice import RandomChoice
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.policies.routing.sticky_least_loaded import StickyLeastLoaded

ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy
    for policy in (
        ApproximateTokenLoad,
        CacheAffinity,
        D2Lpm,
        DualMap,
        DynamoCost,
        Lbgr,
        LeastLoaded,
        MinTtft,
        Pointsman,
        PowerOfTwo,
        Preble,
        RandomChoice,
        RoundRobin,
        StickyLeastLoaded,
    )
}
DEFAULT_ROUTING = Pointsman.name

__all__ = ["DEFAULT_ROUTING", "ROUTING_POLICIES", "Choice", "NoInstance", "RoutingPolicy"]
