"""The processes of a plan, with environment (`POINTSMAN_*`) and arguments. Pure. Raises click.ClickException for a directory
that is too long for sockets."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

import click

from pointsman.adapters.tcp_ports import LOOPBACK
from pointsman.contracts.fleet import Role
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import LOCAL_ACTOR
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.runtime.engine_command import EnginePlaces
from pointsman.runtime.settings import environment
from pointsman_cli.discovery import LOCK_FILE
from pointsman_cli.up.addresses import EngineAddress
from pointsman_cli.up.plan import (
    ENGINE_BLOCK_TOKENS,
    FURTHER_SERVICES,
    PORTS_EACH_ENGINE,
    FleetPlan,
    ProcessPlan,
    archive_file,
)
from pointsman_cli.up.scripts import console_script
from pointsman_cli.up.settings import (
    BUILTIN_TOKENIZER,
    MODEL_PLACE,
    POOL_SERVICES,
    UpSettings,
    service_arguments,
    words,
)

SOCKET_PATH_MAX = 103  # of macOS; Linux takes 107
REQUEST_PATH = frozenset({"scheduler", "ingress"})
OF_THE_SECRET = frozenset({"scheduler", "ingress", "worker", "scaler"})
OF_ENGINES = frozenset({"ingress", "worker", "scaler"})
"""They know the engines' key; a scaler gives both to the workers that it starts."""
BEHIND_THE_REQUESTS = 10
"""Niceness of services that only follow the log; not of a scaler, since its engines would inherit it."""
KV_TRANSFER_GB_PER_S = 12.5
WITHOUT_TLS = {"tls_certificate": "", "tls_key": ""}
"""The commands ask the API on this machine."""


def processes(plan: FleetPlan) -> list[ProcessPlan]:
    ports = iter(plan.ports)
    first, *others = plan.pools
    planned = _pool_processes(first, POOL_SERVICES, ports)
    for other in others:
        planned += _pool_processes(other, FURTHER_SERVICES, ports)
    if plan.console_port:
        planned.append(_console(plan))
    return [_with_engine_urls(process, planned) for process in planned]


def _with_engine_urls(process: ProcessPlan, planned: Sequence[ProcessPlan]) -> ProcessPlan:
    """Each instance that is planned has one URL; those that a scaler or a person adds are on the loopback."""
    if process.role not in REQUEST_PATH:
        return process
    workers = [other.environment for other in planned if other.role == "worker"]
    urls = [f"{worker['POINTSMAN_INSTANCE']}={worker['POINTSMAN_ENGINE_URL']}" for worker in workers]
    added = environment({"engine_urls": (*urls, f"http://{LOOPBACK}:*")})
    return replace(process, environment={**process.environment, **added})


def _pool_processes(plan: FleetPlan, services: Sequence[str], ports: Iterator[int]) -> list[ProcessPlan]:
    planned = [
        _service(plan, role, next(ports), name, number)
        for role in services
        for number, name in enumerate(_names(plan, role))
    ]
    for number, name in enumerate(plan.engine_names(), 1):
        if plan.engines:
            address = plan.engines[number - 1]
        else:
            engine, address = _engine(plan, name, [next(ports) for _ in range(PORTS_EACH_ENGINE - 1)])
            address = replace(address, role=_role(plan.settings, number))
            planned.append(engine)
        planned.append(_worker(plan, name, address, next(ports)))
    return planned


def _role(settings: UpSettings, number: int) -> Role:
    if settings.split is None:
        return "both"
    return "prefill" if number <= settings.roles[0] else "decode"


def _names(plan: FleetPlan, role: str) -> list[str]:
    count = {"scheduler": plan.settings.schedulers, "ingress": plan.settings.ingresses}.get(role, 1)
    return [plan.prefix + role, *(f"{role}-{number}" for number in range(2, count + 1))]


def _service(plan: FleetPlan, role: str, port: int, name: str, number: int) -> ProcessPlan:
    host, url, admin_url = LOOPBACK, _url(port), ""
    admin: dict[str, object] = {}
    if role == "ingress":
        admin_url, admin = url, {"admin_host": LOOPBACK, "admin_port": port}
        host, port = plan.settings.host, (plan.ingress_ports or (plan.settings.port,))[number]
        url = plan.ingress_url_at(port)
    return ProcessPlan(
        name=name,
        role=role,
        script=f"pointsman-{role}",
        url=url,
        admin_url=admin_url,
        environment=_common(plan, role, host, port) | environment(_own(plan, role) | admin),
        arguments=service_arguments(plan.settings.set).get(role, ()),
        niceness=0 if role in REQUEST_PATH or (role == "scaler" and plan.settings.scaled) else BEHIND_THE_REQUESTS,
    )


def _console(plan: FleetPlan) -> ProcessPlan:
    """Of the first pool. It needs no secret: it only reads the log, and acts as an operator for those with the token."""
    operator = plan.credentials.file(BusUser(BusRole.OPERATOR, LOCAL_ACTOR)) if plan.credentials else None
    own = {"admin_token_file": plan.console_token, "operator_credentials": operator}
    shared = _common(replace(plan, config=None), "console", LOOPBACK, plan.console_port)
    return ProcessPlan(
        name="console",
        role="console",
        script="pointsman",
        url=_url(plan.console_port),
        environment=shared | environment(own),
        arguments=("console", *service_arguments(plan.settings.set).get("console", ())),
        niceness=BEHIND_THE_REQUESTS,
    )


def _own(plan: FleetPlan, role: str) -> dict[str, object]:
    settings = plan.settings
    hold_seconds = settings.kind.hold_seconds if settings.scaled else None
    own: dict[str, dict[str, object]] = {
        "scheduler": {"policy": settings.policy, "hold_seconds": hold_seconds},
        "scaler": _scaling(plan),
        "ingress": {"slo_ttft_seconds": plan.slo_ttft, "tokenizer": plan.tokenizer, "hold_seconds": hold_seconds}
        | WITHOUT_TLS
        | _several(plan),
        "recorder": {"archive_url": f"sqlite+aiosqlite:///{archive_file(plan.data, plan.prefix)}"},
    }
    return own.get(role, {})


def _several(plan: FleetPlan) -> dict[str, object]:
    if not plan.further:
        return {}
    return {
        "pools": (plan.settings.pool, *(further.pool for further in plan.further)),
        "pool_tokenizer": tuple(f"{f.pool}={'' if f.addresses else BUILTIN_TOKENIZER}" for f in plan.further),
    }


def _scaling(plan: FleetPlan) -> dict[str, object]:
    if not plan.settings.scaled:
        return {"split": ""}  # POINTSMAN_SPLIT is `up`'s own
    lowest, highest = plan.settings.bounds
    program, *arguments = engine_command(plan)
    if plan.settings.kind.simulated:
        program = str(console_script(program))
    return {
        "scaling": SloAttainment.name,
        "provider": "process",
        "min_instances": lowest,
        "max_instances": highest,
        "engine_command": shlex.join([program, *arguments]),
        "engine_model": plan.engine_model,
        "engine_directory": plan.instances,
        "engine_guard": plan.data / LOCK_FILE,
        "worker_credentials": plan.credentials_of("worker", "{instance}"),
        "split": plan.settings.split,
        **_transfers(plan),
    }


def _transfers(plan: FleetPlan) -> dict[str, object]:
    """Of a split pool's workers, which those of a scaler take from its environment."""
    if plan.settings.split is None:
        return {}
    simulated = plan.settings.kind.simulated
    return {
        "role_switching": True if simulated else None,
        "kv_transfer_gb_per_s": KV_TRANSFER_GB_PER_S if simulated else None,
    }


def _engine(plan: FleetPlan, name: str, ports: list[int]) -> tuple[ProcessPlan, EngineAddress]:
    port, kv_port, replay_port = ports
    kv, replay = _sockets(plan, name)
    places = EnginePlaces(instance=name, port=port, kv=kv, replay=replay, kv_port=kv_port, replay_port=replay_port)
    command = engine_command(plan)
    program, *arguments = places.filled(command)
    simulated = plan.settings.kind.simulated
    process = ProcessPlan(
        name=name,
        role="engine",
        script=program,
        url=_url(port),
        environment=environment({"config": plan.config}) if simulated else {},
        arguments=tuple(arguments),
        ready_path="/health",
        foreign=not simulated,
    )
    return process, EngineAddress(process.url, *places.sockets(command))


def engine_command(plan: FleetPlan) -> list[str]:
    """An engine's command line with unfilled placeholders (`runtime.engine_command`)."""
    settings = plan.settings
    more = words("--engine-args", settings.engine_args)
    if settings.engine_command is not None:
        command = words("--engine-command", settings.engine_command)
        return [part.replace(MODEL_PLACE, settings.model or "") for part in command] + more
    if plan.home is not None:
        arguments = ["--port", "{port}", *_cache_and_events(plan), *more]
        return plan.home.serve_command(arguments, served_model=plan.model, threads=plan.engine_threads)
    return [*_simulated_engine(plan), *more]


def _simulated_engine(plan: FleetPlan) -> list[str]:
    settings = plan.settings
    command = [
        "pointsman-engine-sim",
        *("--model", plan.model),
        *("--host", LOOPBACK),
        *("--port", "{port}"),
        *("--engine-model", plan.engine_model),
        *("--speed", str(settings.speed)),
        *_cache_and_events(plan),
    ]
    if settings.split is not None:
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        command += ["--kv-transfer-config", json.dumps(connector), "--kv-transfer-gb-per-s", str(KV_TRANSFER_GB_PER_S)]
    for adapter in settings.lora:
        command += ["--lora-modules", f"{adapter}={adapter}"]
    return command


def _cache_and_events(plan: FleetPlan) -> list[str]:
    options = ["--block-size", str(gcd(plan.block_tokens, ENGINE_BLOCK_TOKENS)), "--kv-events-config", "{kv_events}"]
    if plan.settings.kv_blocks is not None:
        options += ["--num-gpu-blocks-override", str(plan.settings.kv_blocks)]
    return options


def _worker(plan: FleetPlan, instance: str, address: EngineAddress, port: int) -> ProcessPlan:
    own = {
        "instance": instance,
        "engine_url": address.url,
        "kv_endpoint": address.kv_endpoint,
        "dp_rank": address.dp_rank,
        "state_directory": plan.data / "workers",
        "kv_replay_endpoint": address.kv_replay_endpoint,
        "engine_model": plan.engine_model,
        "role": address.role if address.role != "both" else None,
        **_transfers(plan),
    }
    return ProcessPlan(
        name=instance.replace("engine-", "worker-"),
        role="worker",
        script="pointsman-worker",
        url=_url(port),
        environment=_common(plan, "worker", LOOPBACK, port, instance) | environment(own),
        arguments=service_arguments(plan.settings.set).get("worker", ()),
    )


def _common(plan: FleetPlan, role: str, host: str, port: int, instance: str = "") -> dict[str, str]:
    """An ingress takes the block size from each pool's log, a recorder needs none."""
    settings = plan.settings
    return environment(
        {
            "nats": plan.nats,
            "nats_credentials": plan.credentials_of(role, instance) or "",
            **settings.tls_files,
            "pool": settings.pool,
            "speed": settings.speed,
            "block_tokens": plan.block_tokens if role not in ("ingress", "recorder") else None,
            "secret": plan.secret if role in OF_THE_SECRET else None,
            "engine_api_key": (settings.engine_api_key or None) if role in OF_ENGINES else None,
            "host": host,
            "port": port,
            "config": plan.config,
        }
    )


def _sockets(plan: FleetPlan, engine: str) -> tuple[str, str]:
    paths = [plan.runtime / f"{engine}.{kind}" for kind in ("kv", "replay")]
    for path in paths:
        if len(str(path).encode()) > SOCKET_PATH_MAX:
            raise click.ClickException(f"{path} is too long for a Unix socket; set TMPDIR to a shorter directory")
    return f"ipc://{paths[0]}", f"ipc://{paths[1]}"


def _url(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"
