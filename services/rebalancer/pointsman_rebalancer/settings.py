"""What a rebalancer can be told."""

from dataclasses import dataclass

from pointsman.chassis.settings import FleetSettings, ProcessSettings, setting
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES


@dataclass(frozen=True, kw_only=True)
class RebalancerSettings(FleetSettings, ProcessSettings):
    rebalance: str = setting(DEFAULT_REBALANCING, "Rebalancing policy.", choices=tuple(sorted(REBALANCING_POLICIES)))
    rebalance_settings: tuple[str, ...] = setting(
        (), "Setting of the rebalancing policy as NAME=VALUE; may be repeated. docs/policies.md names them."
    )
    hot_share: float = setting(1.0, "As the scheduler is told: what is hot decides which instances a prefix maps to.")
    cold_share: float = setting(0.5, "As the scheduler is told.")
