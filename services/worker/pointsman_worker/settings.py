"""Settings of the worker."""

from dataclasses import dataclass
from typing import cast, get_args
from urllib.parse import urlsplit

import click

from pointsman.contracts.fleet import ANY_RANK, Role
from pointsman.contracts.subjects import valid_name
from pointsman.primitives import InstanceId
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
        DEFAULT_PROFILE, "What the engine is, to predict how long a prefill takes.", choices=tuple(sorted(PROFILES))
    )
    engine_calibration: str = setting(
        "", "File that `pointsman calibrate` wrote of this engine, or of one like it; wins over --engine-model."
    )
    engine_block_tokens: int = setting(0, "The engine's block size; 0 asks its /metrics.")
    kv_endpoint: str = setting(
        "", "ZMQ endpoint of the engine's KV events (tcp://HOST:5557, ipc://PATH); empty: it publishes none."
    )
    kv_replay_endpoint: str = setting("", "ZMQ endpoint of the engine's replay socket; empty: what is missed is lost.")
    dp_rank: int = setting(
        ANY_RANK,
        "Data-parallel rank to follow, of an engine that has several (vLLM's --data-parallel-size): each has a cache of its "
        "own and is an instance with a worker of its own. The endpoints are those of rank 0; the others' ports follow.",
    )
    role: str = setting(
        "both",
        "What the instance does of a request: 'prefill' or 'decode' where these are split over instances whose engines "
        "hand over KV caches (vLLM's --kv-transfer-config).",
        choices=get_args(Role),
    )
    kv_transfer_gb_per_s: float = setting(
        0.0, "How fast this engine fetches KV caches from others, to predict it, 1e9 bytes a second; 0: takes no time."
    )
    state_directory: str = setting(
        "",
        "Directory where a worker that SIGTERM stops leaves what it knows of its engine's cache, for the one that is started "
        "in its place within a minute. The instance then stays in the fleet; without a directory it leaves at every stop.",
    )
    flush_ms: float = setting(10.0, "How long cache changes are gathered before they are written to the log.")
    report_seconds: float = setting(1.0, "Wall seconds between reports of load and cache digest.")


class SettingsError(click.ClickException):
    """Settings that contradict themselves or the engine; the message is for who wrote them."""


def instance_of(settings: WorkerSettings) -> InstanceId:
    """The instance's name, given or made from the engine's URL and rank. Raises SettingsError."""
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
