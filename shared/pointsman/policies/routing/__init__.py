"""Routing policies: where a request goes.

One file a policy; its docstring gives source, bias and limits. All see the same `PoolView` and answer with a
`Choice` and its reason; deciding changes nothing.
"""

from pointsman.policies.routing.base import Choice, NoInstance, RoutingPolicy
from pointsman.policies.routing.dualmap import DualMap
from pointsman.policies.routing.least_loaded import LeastLoaded
from pointsman.policies.routing.min_ttft import MinTtft
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.policies.routing.sticky_least_loaded import StickyLeastLoaded

ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (DualMap, LeastLoaded, MinTtft, RoundRobin, StickyLeastLoaded)
}
DEFAULT_ROUTING = DualMap.name

__all__ = ["DEFAULT_ROUTING", "ROUTING_POLICIES", "Choice", "NoInstance", "RoutingPolicy"]
