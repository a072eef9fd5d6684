"""Settings of the worker."""

from dataclasses import dataclass
from typing import get_args

import click
from typing_extensions import override

from pointsman.adapters.discovery.sources import FORMS
from pointsman.bounds import COUNT, Bounds
from pointsman.contracts.fleet import ANY_RANK, Role
from pointsman.primitives import BLOCK_TOKENS_MAX, WallSeconds
from pointsman.runtime.engine_keys import EngineKeySettings
from pointsman.runtime.engine_urls import EngineUrlType
from pointsman.runtime.settings import FleetSettings, ProcessSettings, setting
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

DEFAULT_ENGINE_URL = "http://127.0.0.1:8000"
FRESH_WALL_SECONDS: WallSeconds = WallSeconds(120.0)
"""Age up to which a saved session is used."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(FleetSettings, EngineKeySettings, ProcessSettings):
    discover: tuple[str, ...] = setting(
        (), f"Where to find engines to follow: {FORMS}. May be given several times. Default: those of --engine-url."
    )
    discover_urls: tuple[str, ...] = setting(
        (),
        "URL at which this worker may ask an engine that --discover found, as [INSTANCE=]URL with * in host and port. May be "
        "given several times. Default: any. A source that lies gets the --engine-api-key otherwise.",
        form=EngineUrlType(),
    )
    engine_url: tuple[str, ...] = setting(
        (), f"Where this worker reaches an engine. May be given several times. Default: {DEFAULT_ENGINE_URL}."
    )
    instance: str = setting(
        "", "Name of the instance, for one engine; by default engine-PORT, with several HOST-PORT, of the engine's URL."
    )
    engine_advertised_url: str = setting(
        "", "Where the ingress reaches the engine, if that is another URL; {host} and {port} are those of the engine's."
    )
    engine_model: str = setting(
        DEFAULT_PROFILE, "Cost profile of the engine, to predict prefill times.", choices=tuple(sorted(PROFILES))
    )
    engine_calibration: str = setting("", "File written by `pointsman calibrate`; replaces --engine-model.")
    engine_block_tokens: int = setting(
        0, "The engine's block size; 0 asks its /metrics.", bounds=Bounds(most=BLOCK_TOKENS_MAX)
    )
    kv_endpoint: str = setting(
        "",
        "ZMQ endpoint of the engine's KV events (tcp://HOST:5557, ipc://PATH); empty: none. With several engines "
        "tcp://{host}:5557: {host} is the host of the engine's URL.",
    )
    kv_replay_endpoint: str = setting(
        "", "ZMQ endpoint of the engine's replay socket, with {host} as above; empty: missed events are lost."
    )
    data_parallel_size: int = setting(
        1,
        "Data-parallel ranks of each engine (vLLM's --data-parallel-size); each is an instance. Endpoints are those of rank "
        "0; other ranks use the ports after them.",
        bounds=COUNT,
    )
    dp_rank: int = setting(
        ANY_RANK, "The only rank to follow, where each has a worker of its own.", bounds=Bounds(least=ANY_RANK)
    )
    role: str = setting(
        "both",
        "Part of a request that the instance does: 'prefill' or 'decode' where engines transfer KV caches "
        "(vLLM's --kv-transfer-config).",
        choices=get_args(Role),
    )
    role_switching: bool = setting(
        False,
        "The engine can take any role (as with vLLM's NixlConnector), so a scaler or 'pointsman drain --role' may change that "
        "of --role.",
    )
    fetches: bool = setting(
        False,
        "The engines fetch prefixes from each other: they run with NixlConnector (vLLM's --kv-transfer-config).",
    )
    kv_transfer_gb_per_s: float = setting(
        0.0, "Predicted speed of KV transfers to this engine, 1e9 bytes a second; 0: instant."
    )
    shared_kv_store: bool = setting(
        False,
        "The engines' KV connector keeps blocks in one store for all of them (Mooncake's store, one LMCache server, LMCache with a "
        "remote backend), so each can load what any of them stored there.",
    )
    state_directory: str = setting(
        "",
        "Directory where SIGTERM saves what is known of the engines' caches, for a worker started within "
        f"{FRESH_WALL_SECONDS:g} s; the instances "
        "then stay in the fleet. Without a directory those of --engine-url leave at every stop.",
    )
    flush_ms: float = setting(
        10.0,
        "Milliseconds that cache changes are gathered before they are written to the log; longer, up to 500, while the pool "
        "writes more than 1,000 cache events a second.",
    )
    report_seconds: WallSeconds = WallSeconds(1.0)
    """No option: schedulers suspect a worker by its silence. Wall seconds between reports of load and cache digest."""

    @override
    def check(self) -> None:
        from pointsman_worker.targets import listed_targets  # which imports this module

        listed_targets(self)


class SettingsError(click.ClickException):
    """Settings contradict the engine."""
