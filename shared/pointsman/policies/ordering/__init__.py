"""Ordering policies: which of an instance's waiting requests is granted next. One file a policy."""

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.policies.ordering.earliest_deadline_first import EarliestDeadlineFirst
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed

ORDERING_POLICIES: dict[str, type[OrderingPolicy]] = {
    policy.name: policy for policy in (FirstComeFirstServed, EarliestDeadlineFirst)
}
DEFAULT_ORDERING = FirstComeFirstServed.name

__all__ = ["DEFAULT_ORDERING", "ORDERING_POLICIES", "OrderingPolicy"]
