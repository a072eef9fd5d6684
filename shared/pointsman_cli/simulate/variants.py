"""What is compared: a routing policy with its settings, an ordering and an admission policy.

On the command line a policy may carry settings of its own, `dualmap:both_over=least_loaded`, so that an ablation
stands in the same table as what it ablates; `--set dualmap.both_over=...` is for all variants of a policy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from pointsman.contracts.decisions import Settings
from pointsman.policies.policy_set import UnknownPolicyError, policy_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One combination. `policy` is the routing policy as the user wrote it, `routing` its name.

    `note`: what else sets it apart, where it stands beside others of the same policies, such as a condition of its own.
    """

    policy: str
    routing: str
    ordering: str
    admission: str
    settings: Settings = field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> str:
        """What tells variants apart wherever they are counted."""
        return f"{self.called} {self.ordering} {self.admission}"

    @property
    def called(self) -> str:
        """The routing policy, with what sets it apart."""
        return f"{self.routing}, {self.note}" if self.note else self.policy

    def label(self, among: Iterable["Variant"]) -> str:
        """What tells this one from the others: ordering and admission are named only where they differ."""
        others = list(among)
        parts = [self.called]
        if len({other.ordering for other in others}) > 1:
            parts.append(self.ordering)
        if len({other.admission for other in others}) > 1:
            parts.append(self.admission)
        return " + ".join(parts)


def variants(
    policies: Sequence[str], orderings: Sequence[str], admissions: Sequence[str], settings: Sequence[str] = ()
) -> list[Variant]:
    """Every combination, in the order given. Raises UnknownPolicyError for a name or a setting that does not exist."""
    common = [_common_setting(text) for text in settings]
    routings = {policy.partition(":")[0] for policy in policies}
    for routing, name, _ in common:
        if routing not in routings:
            msg = f"--set {routing}.{name}: {routing} is not among the policies"
            raise UnknownPolicyError(msg)
    found = []
    for policy, ordering, admission in product(policies, orderings, admissions):
        routing, *own = policy.split(":")
        chosen: Settings = {name: value for owner, name, value in common if owner == routing}
        chosen |= dict(_setting(text, policy) for text in own)
        policy_set(routing=routing, ordering=ordering, admission=admission, settings=chosen)
        found.append(Variant(policy=policy, routing=routing, ordering=ordering, admission=admission, settings=chosen))
    return found


def _common_setting(text: str) -> tuple[str, str, str]:
    owner, dot, rest = text.partition(".")
    if not dot:
        msg = f"--set {text}: write POLICY.NAME=VALUE"
        raise UnknownPolicyError(msg)
    return owner, *_setting(rest, f"--set {text}")


def _setting(text: str, where: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        msg = f"{where}: write a setting as NAME=VALUE, not {text}"
        raise UnknownPolicyError(msg)
    return name, value
