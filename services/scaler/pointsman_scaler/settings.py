"""What a scaler can be told."""

from dataclasses import dataclass

from pointsman.chassis.settings import FleetSettings, ProcessSettings, setting


@dataclass(frozen=True, kw_only=True)
class ScalerSettings(FleetSettings, ProcessSettings):
    scaling: str = setting(
        "manual", "Scaling policy. 'manual': people start and stop engines, the scaler reports.", choices=("manual",)
    )
