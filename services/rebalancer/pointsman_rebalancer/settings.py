"""Settings of the rebalancer."""

from dataclasses import dataclass

from typing_extensions import override

from pointsman.policies.policy_set import rebalancing_policy
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES, RebalancingPolicy
from pointsman.policies.setting_text import settings_of
from pointsman.runtime.policy_options import policy_usage
from pointsman.runtime.settings import BlockSettings, DeploymentSettings, ProcessSettings, setting


@dataclass(frozen=True, kw_only=True)
class RebalancerSettings(DeploymentSettings, BlockSettings, ProcessSettings):
    rebalance: str = setting(DEFAULT_REBALANCING, "Rebalancing policy.", choices=tuple(sorted(REBALANCING_POLICIES)))
    set: tuple[str, ...] = setting(
        (), "Setting of the rebalancing policy as rebalance.NAME=VALUE. Repeatable. docs/policies.md names them."
    )
    rebind: bool = setting(
        False,
        "Also plan to take overdue requests out of an engine before their first token, to start again elsewhere; the "
        "scheduler needs --rebind too. The prefill done for them is lost, and counted.",
    )

    @override
    def check(self) -> None:
        chosen_policy(self)


def chosen_policy(settings: RebalancerSettings) -> RebalancingPolicy:
    """Raises click.BadParameter."""
    with policy_usage():
        return rebalancing_policy(settings.rebalance, settings_of(settings.set, {"rebalance": ""}))
