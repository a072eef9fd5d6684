"""Settings of the rebalancer."""

from dataclasses import dataclass

from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES
from pointsman.runtime.settings import FleetSettings, ProcessSettings, setting


@dataclass(frozen=True, kw_only=True)
class RebalancerSettings(FleetSettings, ProcessSettings):
    rebalance: str = setting(DEFAULT_REBALANCING, "Rebalancing policy.", choices=tuple(sorted(REBALANCING_POLICIES)))
    set: tuple[str, ...] = setting(
        (), "Setting of the rebalancing policy as rebalance.NAME=VALUE. Repeatable. docs/policies.md names them."
    )
    rebind: bool = setting(
        False,
        "Also plan to take overdue requests out of an engine before their first token, to start again elsewhere; the "
        "scheduler needs --rebind too. The prefill done for them is lost, and counted.",
    )
