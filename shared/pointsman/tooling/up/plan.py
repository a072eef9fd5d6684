"""From what was asked for to the processes that a fleet is made of. Pure: nothing here starts anything.

Every process is told what it needs by `POINTSMAN_*` variables, exactly as `docker-compose.yml` tells its services;
what nobody asked for is left to the service's own default or its table in the settings file.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from pointsman.chassis.settings import environment
from pointsman.tooling.discovery import LOCK_FILE
from pointsman.tooling.up.ports import LOOPBACK
from pointsman.tooling.up.scripts import console_script
from pointsman.tooling.up.settings import EngineAddress, UpSettings

SOCKET_PATH_MAX = 107
"""Longest path of a Unix socket, in bytes."""

SIMULATED_MODEL = "pointsman-sim"
ENGINE_BLOCK_TOKENS = 64
"""Block size of a simulated engine, or its largest part that divides `block_tokens`."""

PORTS_EACH_ENGINE = 2
REQUEST_PATH = frozenset({"scheduler", "ingress"})
BEHIND_THE_REQUESTS = 10
"""Niceness of services that follow the log: on a machine that is short of cores, requests come first. Not of a scaler
that starts engines: they inherit it."""

HOLD_WALL_SECONDS = 60.0
"""How long requests wait for a first engine, where a scaler starts one."""

SERVICES = ("scheduler", "ingress", "rebalancer", "scaler", "recorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to run. `ready_path` answers 200 once it can do its work."""

    name: str
    role: str
    script: str
    url: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    ready_path: str = "/ready"
    niceness: int = 0

    @property
    def probe_url(self) -> str:
        return self.url + self.ready_path


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Everything that is decided before the first process starts."""

    settings: UpSettings
    data: Path
    nats: str
    nats_port: int
    """Where our own nats-server listens, if there is one."""

    model: str
    secret: str
    config: Path | None
    runtime: Path
    """A short private directory for Unix sockets."""

    ports: tuple[int, ...]
    """Free ports, `ports_needed` of them."""

    engines: tuple[EngineAddress, ...]
    """Engines that already run; none where they are simulated."""

    scale: tuple[int, int] | None = None
    """Least and most instances that the scaler keeps; where it does, no engine is planned here."""

    @property
    def instances(self) -> Path:
        """Where the scaler's process provider keeps its instances."""
        return self.data / "instances"

    @property
    def ingress_url(self) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(self.settings.host, self.settings.host)
        return f"http://{host}:{self.settings.port}"


def ports_needed(settings: UpSettings, engines: int) -> int:
    return len(SERVICES) + settings.schedulers - 1 + PORTS_EACH_ENGINE * max(settings.engines, engines)


def processes(plan: FleetPlan) -> list[ProcessPlan]:
    """The processes of the fleet but for the nats-server, in the order people want to read them."""
    ports = iter(plan.ports)
    planned = [_service(plan, role, next(ports), name) for role in SERVICES for name in _names(plan, role)]
    for number in range(1, (len(plan.engines) or plan.settings.engines) + 1):
        name = f"engine-{number}"
        if plan.engines:
            address = plan.engines[number - 1]
        else:
            engine = _simulated_engine(plan, name, next(ports))
            planned.append(engine)
            address = EngineAddress(engine.url, *_sockets(plan, name))
        planned.append(_worker(plan, name, address, next(ports)))
    return planned


def _names(plan: FleetPlan, role: str) -> list[str]:
    others = range(2, plan.settings.schedulers + 1) if role == "scheduler" else ()
    return [role, *(f"{role}-{number}" for number in others)]


def _service(plan: FleetPlan, role: str, port: int, name: str) -> ProcessPlan:
    host = LOOPBACK
    url = _url(port)
    if role == "ingress":
        host, port, url = plan.settings.host, plan.settings.port, plan.ingress_url
    return ProcessPlan(
        name=name,
        role=role,
        script=f"pointsman-{role}",
        url=url,
        environment=_common(plan, host, port) | environment(_own(plan, role)),
        niceness=0 if role in REQUEST_PATH or (role == "scaler" and plan.scale) else BEHIND_THE_REQUESTS,
    )


def _own(plan: FleetPlan, role: str) -> dict[str, object]:
    """What one service is told beyond what all are told."""
    settings = plan.settings
    own: dict[str, dict[str, object]] = {
        "scheduler": {
            "policy": settings.policy,
            "admission": settings.admission,
            "order": settings.order,
            "hold_seconds": HOLD_WALL_SECONDS if plan.scale else None,
        },
        "rebalancer": {"rebalance": settings.rebalance},
        "scaler": _scaling(plan),
        "ingress": {"slo_ttft": settings.slo_ttft, "tokenizer": None if plan.engines else "builtin"},
        "recorder": {"archive_url": f"sqlite+aiosqlite:///{archive_file(plan.data)}"},
    }
    return own.get(role, {})


def _scaling(plan: FleetPlan) -> dict[str, object]:
    """What the scaler is told so that it starts engines and workers just as they are started here."""
    if plan.scale is None:
        return {}
    lowest, highest = plan.scale
    engine = [str(console_script("pointsman-engine-sim")), *_engine_arguments(plan, "{port}", "{kv}", "{replay}")]
    return {
        "scaling": plan.settings.scaling,
        "provider": "process",
        "min_instances": lowest,
        "max_instances": highest,
        "engine_command": shlex.join(engine),
        "engine_model": plan.settings.engine_model,
        "engine_directory": plan.instances,
        "engine_guard": plan.data / LOCK_FILE,
    }


def archive_file(data: Path) -> Path:
    """Where the recorder's SQLite file lies."""
    return data / "archive.sqlite"


def _simulated_engine(plan: FleetPlan, name: str, port: int) -> ProcessPlan:
    """Started like `vllm serve`: by flags, and knowing nothing of Pointsman."""
    kv_endpoint, replay_endpoint = _sockets(plan, name)
    arguments = _engine_arguments(plan, str(port), kv_endpoint, replay_endpoint)
    return ProcessPlan(
        name=name,
        role="engine",
        script="pointsman-engine-sim",
        url=_url(port),
        environment=environment({"config": plan.config}),
        arguments=arguments,
        ready_path="/health",
    )


def _engine_arguments(plan: FleetPlan, port: str, kv_endpoint: str, replay_endpoint: str) -> tuple[str, ...]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": kv_endpoint,
        "replay_endpoint": replay_endpoint,
    }
    settings = plan.settings
    arguments = [
        *("--model", plan.model),
        *("--host", LOOPBACK),
        *("--port", port),
        *("--engine-model", settings.engine_model),
        *("--speed", str(settings.speed)),
        *("--block-size", str(gcd(settings.block_tokens, ENGINE_BLOCK_TOKENS))),
        *("--kv-events-config", json.dumps(events)),
    ]
    if settings.kv_blocks is not None:
        arguments += ["--num-gpu-blocks-override", str(settings.kv_blocks)]
    return tuple(arguments)


def _worker(plan: FleetPlan, instance: str, address: EngineAddress, port: int) -> ProcessPlan:
    own = {
        "instance": instance,
        "engine_url": address.url,
        "kv_endpoint": address.kv_endpoint,
        "kv_replay_endpoint": address.kv_replay_endpoint,
        "engine_model": plan.settings.engine_model,
    }
    return ProcessPlan(
        name=instance.replace("engine-", "worker-"),
        role="worker",
        script="pointsman-worker",
        url=_url(port),
        environment=_common(plan, LOOPBACK, port) | environment(own),
    )


def _common(plan: FleetPlan, host: str, port: int) -> dict[str, str]:
    settings = plan.settings
    return environment(
        {
            "nats": plan.nats,
            "pool": settings.pool,
            "speed": settings.speed,
            "block_tokens": settings.block_tokens,
            "secret": plan.secret,
            "host": host,
            "port": port,
            "config": plan.config,
        }
    )


def _sockets(plan: FleetPlan, engine: str) -> tuple[str, str]:
    paths = [plan.runtime / f"{engine}.{kind}" for kind in ("kv", "replay")]
    for path in paths:
        if len(str(path).encode()) > SOCKET_PATH_MAX:
            message = f"{path} is too long for a Unix socket; set TMPDIR to a shorter directory"
            raise ValueError(message)
    return f"ipc://{paths[0]}", f"ipc://{paths[1]}"


def _url(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"
