"""Ordering policies: which pending request of an instance is granted next. Fair to tenants: `fair_deadlines` (the default),
`deficit_longest_prefix_match`, `virtual_token_counter`. Admission has a share in it: `admission/predicted_ttft_fair.py`."""

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.policies.ordering.deficit_longest_prefix_match import DeficitLongestPrefixMatch
from pointsman.policies.ordering.earliest_deadline_first import EarliestDeadlineFirst
from pointsman.policies.ordering.fair_deadlines import FairDeadlines
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.ordering.longest_prefix_match import LongestPrefixMatch
from pointsman.policies.ordering.moore_hodgson import MooreHodgson
from pointsman.policies.ordering.shortest_prefill import ShortestPrefill
from pointsman.policies.ordering.virtual_token_counter import VirtualTokenCounter

ORDERING_POLICIES: dict[str, type[OrderingPolicy]] = {
    policy.name: policy
    for policy in (
        DeficitLongestPrefixMatch,
        EarliestDeadlineFirst,
        FairDeadlines,
        FirstComeFirstServed,
        LongestPrefixMatch,
        MooreHodgson,
        ShortestPrefill,
        VirtualTokenCounter,
    )
}
DEFAULT_ORDERING = FairDeadlines.name

__all__ = ["DEFAULT_ORDERING", "ORDERING_POLICIES", "OrderingPolicy"]
