"""Earlier versions of policies, so that their logs can be verified and asked what-if. Found by what a record holds: the
policy's name and all settings of that version. No command line offers them."""

from dataclasses import fields

from pointsman.contracts.decisions import Settings
from pointsman.policies.retired.min_ttft_1 import MinTtft1
from pointsman.policies.retired.pointsman_1 import Pointsman1
from pointsman.policies.routing.base import RoutingPolicy

RETIRED: tuple[type[RoutingPolicy], ...] = (Pointsman1, MinTtft1)


def retired_routing(name: str, settings: Settings, present: type[RoutingPolicy]) -> type[RoutingPolicy] | None:
    """None: `settings` are of the present version."""
    now = {field.name for field in fields(present)}
    for policy in RETIRED:
        then = {field.name for field in fields(policy)}
        if policy.name == name and then <= settings.keys() and not settings.keys() <= now:
            return policy
    return None
