"""Settings of the worker."""

from dataclasses import dataclass
from typing import cast, get_args
from urllib.parse import urlsplit

import click

from pointsman.contracts.fleet import ANY_RANK, Role
from pointsman.contracts.subjects import valid_name
from pointsman.primitives import InstanceId, WallSeconds
from pointsman.runtime.settings import FleetSettings, ProcessSettings, setting
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(FleetSettings, ProcessSettings):
    instance: str = setting("", "Name of the instance; by default engine-PORT, with the port of the engine's URL.")
    engine_url: str = setting("http://127.0.0.1:8000", "Where this worker reaches its engine.")
    engine_advertised_url: str = setting("", "Where the ingress reaches the engine, if that is another URL.")
    engine_api_key: str = setting("", "Key that the engine asks for (its --api-key).", secret=True)
    engine_model: str = setting(
        DEFAULT_PROFILE, "Cost profile of the engine, to predict prefill times.", choices=tuple(sorted(PROFILES))
    )
    engine_calibration: str = setting("", "File written by `pointsman calibrate`; replaces --engine-model.")
    engine_block_tokens: int = setting(0, "The engine's block size; 0 asks its /metrics.")
    kv_endpoint: str = setting("", "ZMQ endpoint of the engine's KV events (tcp://HOST:5557, ipc://PATH); empty: none.")
    kv_replay_endpoint: str = setting("", "ZMQ endpoint of the engine's replay socket; empty: missed events are lost.")
    dp_rank: int = setting(
        ANY_RANK,
        "Data-parallel rank to follow (vLLM's --data-parallel-size); each rank needs its own worker. Endpoints are those of "
        "rank 0; other ranks use the ports after them.",
    )
    role: str = setting(
        "both",
        "Part of a request that the instance does: 'prefill' or 'decode' where engines transfer KV caches "
        "(vLLM's --kv-transfer-config).",
        choices=get_args(Role),
    )
    kv_transfer_gb_per_s: float = setting(
        0.0, "Predicted speed of KV transfers to this engine, 1e9 bytes a second; 0: instant."
    )
    state_directory: str = setting(
        "",
        "Directory where SIGTERM saves what is known of the engine's cache, for a worker started within a minute; the instance "
        "then stays in the fleet. Without a directory it leaves at every stop.",
    )
    flush_ms: float = setting(10.0, "Milliseconds that cache changes are gathered before they are written to the log.")
    report_seconds: WallSeconds = setting(1.0, "Wall seconds between reports of load and cache digest.")


class SettingsError(click.ClickException):
    """Settings contradict each other or the engine."""


def instance_of(settings: WorkerSettings) -> InstanceId:
    """Raises SettingsError."""
    rank = "" if settings.dp_rank == ANY_RANK else f"-rank-{settings.dp_rank}"
    name = settings.instance or f"engine-{_port(settings.engine_url)}{rank}"
    if not valid_name(name):
        msg = f"{name!r} cannot be an instance: lower-case letters, digits and dashes, at most 63"
        raise SettingsError(msg)
    return InstanceId(name)


def role_of(settings: WorkerSettings) -> Role:
    return cast("Role", settings.role)


def _port(url: str) -> int:
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
    except ValueError as error:
        msg = f"{url!r} is no URL: {error}"
        raise SettingsError(msg) from error
    if port is None or not parts.hostname:
        msg = f"{url!r} is no http URL"
        raise SettingsError(msg)
    return port
