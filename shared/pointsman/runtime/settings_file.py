"""The settings file of `--config`. All processes share one, so each knows the tables and keys of all and refuses others:
a misspelt key would leave a default in force, such as an ingress without keys. It does not read values; click does."""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

TABLES = frozenset(
    {"console", "engine-sim", "ingress", "rebalancer", "recorder", "scaler", "scheduler", "up", "worker"}
)
SETTINGS = frozenset(
    {
        "access_log",
        "admin_host",
        "admin_port",
        "admin_token_file",
        "admission",
        "allow_field",
        "allow_host",
        "also",
        "api_key",
        "archive_bytes_max",
        "archive_days",
        "archive_url",
        "block_size",
        "block_tokens",
        "body_bytes_max",
        "checkpoint_seconds",
        "chunk_timeout_seconds",
        "connections_per_address",
        "console",
        "console_port",
        "copies",
        "data",
        "data_parallel_size",
        "discover",
        "discover_urls",
        "docker_dns",
        "docker_engine_command",
        "docker_engine_image",
        "docker_network",
        "dp_rank",
        "drain_seconds_max",
        "engine",
        "engine_advertised_url",
        "engine_api_key",
        "engine_args",
        "engine_block_tokens",
        "engine_calibration",
        "engine_command",
        "engine_directory",
        "engine_guard",
        "engine_model",
        "engine_url",
        "engine_urls",
        "fault_drop_event_batches",
        "fault_lose_event_batches",
        "fetches",
        "first_byte_factor",
        "first_byte_seconds_min",
        "flush_ms",
        "forward_tenant",
        "hold_max",
        "hold_seconds",
        "host",
        "ingresses",
        "instance",
        "instances",
        "keep_alive_seconds",
        "kubernetes_namespace",
        "kubernetes_workload",
        "kv_blocks",
        "kv_endpoint",
        "kv_events_config",
        "kv_hold_seconds",
        "kv_offloading_gb_per_s",
        "kv_offloading_size",
        "kv_replay_endpoint",
        "kv_transfer_config",
        "kv_transfer_gb_per_s",
        "lame_duck_seconds",
        "lease_seconds",
        "leave_seconds",
        "log_age_seconds_max",
        "log_bytes_max",
        "log_format",
        "log_level",
        "log_replicas",
        "lora",
        "lora_modules",
        "max_instances",
        "max_model_len",
        "max_num_batched_tokens",
        "media_hosts",
        "min_instances",
        "model",
        "name",
        "nats",
        "nats_api_prefix",
        "nats_ca",
        "nats_certificate",
        "nats_credentials",
        "nats_domain",
        "nats_key",
        "num_gpu_blocks_override",
        "oidc_audience",
        "oidc_issuer",
        "oidc_jwks_url",
        "oidc_tenant_claim",
        "operator_credentials",
        "order",
        "pause_down_seconds",
        "pause_up_seconds",
        "pending_max",
        "policy",
        "pool",
        "pool_tokenizer",
        "pools",
        "port",
        "prefill_window_tokens",
        "probe",
        "processes",
        "provider",
        "reader_token_file",
        "rebalance",
        "rebind",
        "report_seconds",
        "request_seconds_max",
        "request_timeout_seconds",
        "require_keys",
        "retries_max",
        "retry_budget",
        "rivals",
        "role",
        "role_switching",
        "running_max",
        "scaler_lease_seconds",
        "scaling",
        "scheduler_timeout_seconds",
        "schedulers",
        "secret",
        "seed",
        "set",
        "shadow",
        "shared_kv_store",
        "slo_tpot_seconds",
        "slo_ttft",
        "slo_ttft_seconds",
        "speed",
        "split",
        "start_seconds_max",
        "state_directory",
        "step_down",
        "step_up",
        "stream_interval",
        "stream_usage",
        "suspect_seconds",
        "tokenizer",
        "waiter_seconds",
        "worker_credentials",
    }
)
"""Of all processes; those that a process does not have are for others. A process cannot import the settings of others."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a file says to one process: in its table, and at the top for every process that has the setting."""

    top: Mapping[str, Any]
    table: Mapping[str, Any]

    @property
    def merged(self) -> dict[str, Any]:
        return {**self.top, **self.table}


def read_settings_file(path: Path, table: str, known: Collection[str]) -> FileSettings:
    """`known`: settings of the process. Of a directory all `*.toml` count, the last wins. Raises click.BadParameter."""
    top: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for file in sorted(path.glob("*.toml")) if path.is_dir() else [path]:
        content = _content(file)
        for key, value in content.items():
            _check(file, key, value, tables=TABLES | {table}, settings=SETTINGS.union(known))
        found = content.get(table)
        mine = found if isinstance(found, dict) else {}
        for key in mine:
            if key not in known:
                _refuse(file, f"[{table}] has no setting {key}", _meant(key, known) or "see --help for those there are")
        top |= {key: value for key, value in content.items() if key in known and not isinstance(value, dict)}
        own |= mine
    return FileSettings(top, own)


def _check(file: Path, key: str, value: object, *, tables: Collection[str], settings: Collection[str]) -> None:
    if isinstance(value, dict):
        if key not in tables:
            known = ", ".join(f"[{name}]" for name in sorted(tables))
            _refuse(file, f"there is no table [{key}]", _meant(key, tables, "[{}]") or f"there are {known}")
    elif key in tables and key not in settings:
        _refuse(file, f"{key} is a table", f"write [{key}] on a line of its own, its settings below it")
    elif key not in settings:
        _refuse(file, f"no process has a setting {key}", _meant(key, settings) or "see --help of the processes")


def _meant(key: str, known: Iterable[str], shown: str = "{}") -> str:
    close = get_close_matches(key, sorted(known), n=1)
    return f"did you mean {shown.format(close[0])}?" if close else ""


def _refuse(file: Path, what: str, what_to_do: str) -> None:
    message = f"{file}: {what}; {what_to_do}"
    raise click.BadParameter(message)


def _content(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        message = f"cannot read {file}: {error.strerror}"
        raise click.BadParameter(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{file} is not valid TOML: {error}"
        raise click.BadParameter(message) from error
