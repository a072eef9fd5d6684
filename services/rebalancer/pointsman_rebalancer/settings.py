"""What a rebalancer can be told."""

from dataclasses import dataclass

from pointsman.chassis.settings import FleetSettings, ProcessSettings


@dataclass(frozen=True, kw_only=True)
class RebalancerSettings(FleetSettings, ProcessSettings):
    """Nothing of its own yet: it has no policy to choose."""
