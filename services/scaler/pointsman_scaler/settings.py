"""Settings of the scaler."""

from dataclasses import dataclass

import click
from typing_extensions import override

from pointsman.bounds import COUNT, POSITIVE
from pointsman.policies.policy_set import scaling_policy
from pointsman.policies.scaling import DEFAULT_SCALING, SCALING_POLICIES, Limits, ScalingPolicy
from pointsman.policies.scaling.roles import NOT_SIZED, RoleSizes, parse_split
from pointsman.policies.setting_text import settings_of
from pointsman.primitives import WallSeconds
from pointsman.runtime.policy_options import policy_usage
from pointsman.runtime.settings import TEXT, FleetSettings, ProcessSettings, setting
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

PROVIDERS = ("static", "process", "docker", "kubernetes")


@dataclass(frozen=True, kw_only=True)
class ScalerSettings(FleetSettings, ProcessSettings):
    scaling: str = setting(
        DEFAULT_SCALING,
        "Scaling policy. 'manual': the size set by 'pointsman scale'.",
        choices=tuple(sorted(SCALING_POLICIES)),
    )
    set: tuple[str, ...] = setting(
        (), "Setting of the scaling policy as scaling.NAME=VALUE. Repeatable. docs/policies.md names them."
    )
    provider: str = setting(
        "static", "Where engines come from. 'static': started by hand; the scaler logs what to do.", choices=PROVIDERS
    )
    min_instances: int = setting(1, "Smallest size; 0 lets the pool scale to zero.")
    max_instances: int = setting(8, "Largest size.")
    split: str = setting(
        "", "P+D: of the first instances P prefill and D decode. Their workers run with --role-switching."
    )
    step_up: int = setting(2, "Largest growth of one decision.", bounds=COUNT)
    step_down: int = setting(1, "Largest shrinking of one decision.", bounds=COUNT)
    pause_up_seconds: float = setting(30.0, "Engine seconds between two growths.")
    pause_down_seconds: float = setting(60.0, "Engine seconds between a change and the next shrinking.")
    drain_seconds_max: WallSeconds = setting(
        300.0, "Wall seconds that draining may take; then the instance is stopped."
    )
    start_seconds_max: WallSeconds = setting(
        600.0, "Wall seconds that a started instance may take to answer; then it is replaced.", bounds=POSITIVE
    )
    engine_command: str = setting(
        "",
        "Process provider: an engine's command line. {port}, {kv_events}, {index} and more are filled in "
        "(docs/engines.md); for vLLM: vllm serve MODEL --port {port} --kv-events-config {kv_events}",
    )
    engine_model: str = setting(
        DEFAULT_PROFILE, "Cost profile of the started engines, for their workers.", choices=tuple(sorted(PROFILES))
    )
    worker_credentials: str = setting(
        "",
        "Process provider: file with the NATS user of a started worker; {instance} is filled in.",
    )
    engine_directory: str = setting(".pointsman/instances", "Process provider: directory of locks and logs.", form=TEXT)
    engine_guard: str = setting("", "Process provider: a file that the fleet locks; instances end when it is free.")
    docker_engine_image: str = setting("vllm/vllm-openai:latest", "Docker provider: image of an engine.")
    docker_engine_command: str = setting("", "Docker provider: command of an engine; {instance} is filled in.")
    docker_network: str = setting("pointsman", "Docker provider: network that engines join.")
    docker_dns: str = setting(
        "",
        "Docker provider: HOST:PORT of the workers' --discover dns:HOST:PORT; engines join the network as HOST. Without it "
        "workers discover docker:pointsman.part=engine.",
    )
    kubernetes_workload: str = setting(
        "statefulset/engine", "Kubernetes provider: deployment/NAME or statefulset/NAME; its pods are the instances."
    )
    kubernetes_namespace: str = setting("default", "Kubernetes provider: its namespace.")
    scaler_lease_seconds: WallSeconds = WallSeconds(3.0)
    """No option: the same for all scalers of a pool. Wall seconds of the acting one's lease."""

    @property
    def limits(self) -> Limits:
        return Limits(
            lowest=self.min_instances,
            highest=self.max_instances,
            step_up=self.step_up,
            step_down=self.step_down,
            pause_up_s=self.pause_up_seconds,
            pause_down_s=self.pause_down_seconds,
        )

    @property
    def roles(self) -> RoleSizes:
        """Raises ValueError."""
        return parse_split(self.split) if self.split else NOT_SIZED

    @override
    def check(self) -> None:
        if self.min_instances > self.max_instances:
            message = f"must be from 0 to --max-instances ({self.max_instances}), not {self.min_instances}"
            raise click.BadParameter(message, param_hint="--min-instances")
        try:
            roles = self.roles
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--split") from error
        if self.provider == "process" and "{port}" not in self.engine_command:
            message = "does not contain {port}, so the engine would not listen where it is expected"
            raise click.BadParameter(message, param_hint="--engine-command")
        if roles.total > self.max_instances:
            message = f"{roles.total} instances are more than --max-instances ({self.max_instances})"
            raise click.BadParameter(message, param_hint="--split")
        chosen_policy(self)


def chosen_policy(settings: ScalerSettings) -> ScalingPolicy:
    """Raises click.BadParameter."""
    with policy_usage():
        return scaling_policy(settings.scaling, settings_of(settings.set, {"scaling": ""}))
