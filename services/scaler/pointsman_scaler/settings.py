"""Settings of the scaler."""

from dataclasses import dataclass

from pointsman.policies.scaling import DEFAULT_SCALING, SCALING_POLICIES
from pointsman.runtime.settings import FleetSettings, ProcessSettings, setting
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

PROVIDERS = ("static", "process", "docker", "kubernetes")


@dataclass(frozen=True, kw_only=True)
class ScalerSettings(FleetSettings, ProcessSettings):
    scaling: str = setting(
        DEFAULT_SCALING,
        "Scaling policy. 'manual': as many as people ask for with 'pointsman scale'.",
        choices=tuple(sorted(SCALING_POLICIES)),
    )
    set: tuple[str, ...] = setting(
        (), "Setting of the scaling policy as scaling.NAME=VALUE. Repeatable. docs/policies.md names them."
    )
    provider: str = setting(
        "static", "Where engines come from. 'static': from people; the scaler says what to do.", choices=PROVIDERS
    )
    min_instances: int = setting(1, "Never fewer instances than this; with 0 the pool may sleep.")
    max_instances: int = setting(8, "Never more instances than this.")
    step_up: int = setting(2, "Instances that one decision adds at most.")
    step_down: int = setting(1, "Instances that one decision takes away at most.")
    pause_up_seconds: float = setting(30.0, "Engine seconds from one growth to the next.")
    pause_down_seconds: float = setting(60.0, "Engine seconds from any change to the next shrinking.")
    drain_seconds_max: float = setting(
        300.0, "Wall seconds that a draining instance may take to finish what it has; then it is stopped all the same."
    )
    start_seconds_max: float = setting(
        600.0, "Wall seconds that a started instance may take to answer; then it is stopped and another one started."
    )
    scaler_lease_seconds: float = setting(
        3.0, "Wall seconds after which another scaler takes over from one that is silent; the same for all of a pool."
    )
    engine_command: str = setting(
        "",
        "Process provider: an engine's command line. {port}, {kv_events}, {index} and more are filled in "
        "(docs/engines.md); for vLLM: vllm serve MODEL --port {port} --kv-events-config {kv_events}",
    )
    engine_model: str = setting(
        DEFAULT_PROFILE, "What the started engines are, for their workers.", choices=tuple(sorted(PROFILES))
    )
    engine_directory: str = setting(
        ".pointsman/instances", "Process provider: where locks and logs of the started instances lie."
    )
    engine_guard: str = setting(
        "", "Process provider: a file that is locked as long as the fleet lives; when it is free, instances end."
    )
    docker_engine_image: str = setting("vllm/vllm-openai:latest", "Docker provider: image of an engine.")
    docker_engine_command: str = setting("", "Docker provider: command of an engine; {instance} is filled in.")
    docker_worker_image: str = setting("pointsman", "Docker provider: image of the worker beside it.")
    docker_network: str = setting("pointsman", "Docker provider: network that both join.")
    kubernetes_workload: str = setting(
        "statefulset/engine", "Kubernetes provider: deployment/NAME or statefulset/NAME, whose pods are the instances."
    )
    kubernetes_namespace: str = setting("default", "Kubernetes provider: its namespace.")
