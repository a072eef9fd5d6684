"""Earlier versions of policies, so that their logs can be verified and asked what-if. Found by what a record holds: the
policy's name and all settings of that version, of which the present one lacks some. No command line offers them."""

from dataclasses import fields
from typing import TypeVar, cast

from pointsman.contracts.decisions import Settings
from pointsman.policies.policy import Policy
from pointsman.policies.retired.min_ttft_1 import MinTtft1
from pointsman.policies.retired.pointsman_1 import Pointsman1
from pointsman.policies.retired.predicted_ttft_fair_1 import PredictedTtftFair1

RETIRED: tuple[type[Policy], ...] = (MinTtft1, Pointsman1, PredictedTtftFair1)

P = TypeVar("P", bound=Policy)


def present_or_retired(present: type[P], settings: Settings) -> type[P]:
    """The version of a policy that has these recorded settings."""
    now = {field.name for field in fields(present)}
    for policy in RETIRED:
        then = {field.name for field in fields(policy)}
        if policy.name == present.name and then <= settings.keys() and not then <= now:
            return cast("type[P]", policy)
    return present
