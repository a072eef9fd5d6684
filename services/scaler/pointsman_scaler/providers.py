"""The provider that the settings choose."""

from dataclasses import fields
from pathlib import Path

import click

from pointsman.adapters.providers.process import InstanceTemplate, ProcessProvider
from pointsman.adapters.providers.static import StaticProvider
from pointsman.ports import InstanceProvider, ProviderError, ProviderUnreachableError
from pointsman.primitives import PoolName
from pointsman.runtime import instance_supervisor
from pointsman.runtime.settings import FleetSettings, environment
from pointsman_scaler.settings import ScalerSettings


def chosen_provider(settings: ScalerSettings) -> InstanceProvider:
    """Raises click.BadParameter for missing settings, and click.ClickException where a later start may succeed."""
    try:
        return _made(settings)
    except ProviderUnreachableError as error:
        raise click.ClickException(str(error)) from error
    except ProviderError as error:
        raise click.BadParameter(str(error), param_hint="--provider") from error


def _made(settings: ScalerSettings) -> InstanceProvider:
    """A provider is imported where it is chosen."""
    match settings.provider:
        case "process":
            guard = Path(settings.engine_guard) if settings.engine_guard else None
            template = InstanceTemplate(
                engine=settings.engine_command,
                supervisor=instance_supervisor.__name__,
                environment=_worker_environment(settings),
                guard=guard,
            )
            return ProcessProvider(Path(settings.engine_directory).resolve(), template, PoolName(settings.pool))
        case "docker":
            from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

            containers = ContainerTemplate(
                image=settings.docker_engine_image,
                command=settings.docker_engine_command,
                network=settings.docker_network,
                dns=settings.docker_dns,
            )
            return DockerProvider(PoolName(settings.pool), containers)
        case "kubernetes":
            from pointsman.adapters.providers.kubernetes import KubernetesProvider

            kind, _, name = settings.kubernetes_workload.partition("/")
            if kind not in ("deployment", "statefulset") or not name:
                raise ProviderError(f"'{settings.kubernetes_workload}' is neither deployment/NAME nor statefulset/NAME")
            return KubernetesProvider(
                "deployment" if kind == "deployment" else "stateful_set", name, settings.kubernetes_namespace
            )
        case _:
            return StaticProvider()


def _worker_environment(settings: ScalerSettings) -> dict[str, str]:
    common = {field.name: getattr(settings, field.name) for field in fields(FleetSettings)}
    own = {"engine_model": settings.engine_model, "nats_credentials": settings.worker_credentials}
    return environment(common | own)
