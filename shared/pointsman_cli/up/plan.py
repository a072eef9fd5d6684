"""From what was asked for to the processes that a fleet is made of. Pure: nothing here starts anything.

Every process is told what it needs by `POINTSMAN_*` variables, exactly as `docker-compose.yml` tells its services;
what nobody asked for is left to the service's own default or its table in the settings file.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

from pointsman.adapters.tcp_ports import LOOPBACK
from pointsman.contracts.fleet import Role
from pointsman.runtime.engine_command import EnginePlaces
from pointsman.runtime.settings import environment
from pointsman_cli.discovery import LOCK_FILE
from pointsman_cli.up.scripts import console_script
from pointsman_cli.up.settings import (
    BUILTIN_TOKENIZER,
    MODEL_PLACE,
    SIMULATED,
    EngineAddress,
    FurtherPool,
    UpSettings,
    words,
)
from pointsman_cli.vllm_cpu.home import EngineHome

SOCKET_PATH_MAX = 107
"""Longest path of a Unix socket, in bytes."""

SIMULATED_MODEL = "pointsman-sim"
ENGINE_BLOCK_TOKENS = 64
"""Block size of an engine that is started here, or its largest part that divides `block_tokens`."""

PORTS_EACH_ENGINE = 4
"""Its own, its worker's, and those of its KV events where they are told by TCP."""

REQUEST_PATH = frozenset({"scheduler", "ingress"})
BEHIND_THE_REQUESTS = 10
"""Niceness of services that follow the log: on a machine that is short of cores, requests come first. Not of a scaler
that starts engines: they inherit it."""

SERVICES = ("scheduler", "ingress", "rebalancer", "scaler", "recorder")
KV_TRANSFER_GB_PER_S = 12.5
"""How fast simulated engines hand KV caches over: a network of 100 Gbit/s."""

FURTHER_SERVICES = ("scheduler", "rebalancer", "recorder")
"""What each pool but the first needs of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to run. `ready_path` answers 200 once it can do its work, and as /readyz does if it lacks something. `script` is a console script of Pointsman, or,
    where it is `foreign`, a program as a shell would find it."""

    name: str
    role: str
    script: str
    url: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    ready_path: str = "/readyz"
    niceness: int = 0
    foreign: bool = False

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

    home: EngineHome | None = None
    """Where vLLM's CPU build lies, if that is what is started; `engine_threads` is what each engine may compute with."""

    engine_threads: int = 1

    ingress_ports: tuple[int, ...] = ()
    """Where each ingress listens; none: there is one, on the port of the settings."""

    further: tuple[FurtherPool, ...] = ()
    """Pools behind the same ingress."""

    prefix: str = ""
    """What the names of this pool's processes begin with."""

    @property
    def block_tokens(self) -> int:
        return self.settings.block_tokens or self.settings.kind.block_tokens

    @property
    def slo_ttft(self) -> float:
        return self.settings.slo_ttft or self.settings.kind.slo_ttft

    @property
    def engine_model(self) -> str:
        return self.settings.engine_model or self.settings.kind.engine_model

    @property
    def start_seconds_max(self) -> float:
        return self.settings.start_seconds_max or self.settings.kind.start_seconds_max

    @property
    def tokenizer(self) -> str | None:
        """What the ingress tokenises with; None leaves it to the ingress's own setting."""
        if self.settings.tokenizer is None and self.home is not None:
            return str(self.home.model)
        return self.settings.tokenizer or (BUILTIN_TOKENIZER if self.settings.kind.simulated else None)

    @property
    def instances(self) -> Path:
        """Where the scaler's process provider keeps its instances."""
        return self.data / "instances"

    def of_further(self, further: FurtherPool) -> "FleetPlan":
        """The same plan, as it reads for one of the further pools."""
        settings = replace(
            self.settings,
            pool=further.pool,
            engines=further.engines,
            schedulers=1,
            prefill=0,
            decode=0,
            lora=(),
            block_tokens=further.block_tokens or self.block_tokens,
            engine=SIMULATED,
            engine_command=None,
            engine_args="",
        )
        return replace(
            self,
            settings=settings,
            model=further.model,
            engines=further.addresses,
            scale=None,
            home=None,
            further=(),
            prefix=f"{further.pool}-",
        )

    @property
    def pools(self) -> "list[FleetPlan]":
        """The plan as it reads for each of its pools, this one first."""
        return [self, *(self.of_further(further) for further in self.further)]

    def real_engines(self) -> list[str]:
        """Names of the engines of this pool that are not simulated, without those that a scaler starts."""
        if self.settings.kind.simulated and not self.engines:
            return []
        return self.engine_names()

    def engine_names(self) -> list[str]:
        return [
            f"{self.prefix}engine-{number}" for number in range(1, (len(self.engines) or self.settings.engines) + 1)
        ]

    @property
    def ingress_url(self) -> str:
        """Of the first ingress."""
        return self.ingress_url_at(self.settings.port)

    def ingress_url_at(self, port: int) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(self.settings.host, self.settings.host)
        return f"http://{host}:{port}"


def ports_needed(settings: UpSettings, engines: int, further: Sequence[FurtherPool] = ()) -> int:
    first = (
        len(SERVICES)
        + settings.schedulers
        + settings.ingresses
        - 2
        + PORTS_EACH_ENGINE * max(settings.engines, engines)
    )
    return first + sum(len(FURTHER_SERVICES) + PORTS_EACH_ENGINE * pool.engines for pool in further)


def processes(plan: FleetPlan) -> list[ProcessPlan]:
    """The processes of the fleet but for the nats-server, in the order people want to read them."""
    ports = iter(plan.ports)
    first, *others = plan.pools
    planned = _pool_processes(first, SERVICES, ports)
    for other in others:
        planned += _pool_processes(other, FURTHER_SERVICES, ports)
    return planned


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
    """What the engine with this number does: first come those that prefill."""
    if not settings.split:
        return "both"
    return "prefill" if number <= settings.prefill else "decode"


def _names(plan: FleetPlan, role: str) -> list[str]:
    count = {"scheduler": plan.settings.schedulers, "ingress": plan.settings.ingresses}.get(role, 1)
    return [plan.prefix + role, *(f"{role}-{number}" for number in range(2, count + 1))]


def _service(plan: FleetPlan, role: str, port: int, name: str, number: int) -> ProcessPlan:
    """`number`: which of those with this role it is, from 0."""
    host = LOOPBACK
    url = _url(port)
    if role == "ingress":
        host, port = plan.settings.host, (plan.ingress_ports or (plan.settings.port,))[number]
        url = plan.ingress_url_at(port)
    return ProcessPlan(
        name=name,
        role=role,
        script=f"pointsman-{role}",
        url=url,
        environment=_common(plan, role, host, port) | environment(_own(plan, role)),
        niceness=0 if role in REQUEST_PATH or (role == "scaler" and plan.scale) else BEHIND_THE_REQUESTS,
    )


def _own(plan: FleetPlan, role: str) -> dict[str, object]:
    """What one service is told beyond what all are told."""
    settings = plan.settings
    hold_seconds = settings.kind.hold_seconds if plan.scale else None
    own: dict[str, dict[str, object]] = {
        "scheduler": {
            "policy": settings.policy,
            "admission": settings.admission,
            "order": settings.order,
            "hold_seconds": hold_seconds,
            "rebind": settings.rebind,
        },
        "rebalancer": {"rebalance": settings.rebalance, "rebind": settings.rebind},
        "scaler": _scaling(plan),
        "ingress": {
            "slo_ttft_seconds": plan.slo_ttft,
            "tokenizer": plan.tokenizer,
            "hold_seconds": hold_seconds,
            "processes": settings.processes,
        }
        | _several(plan),
        "recorder": {"archive_url": f"sqlite+aiosqlite:///{archive_file(plan.data, plan.prefix)}"},
    }
    return own.get(role, {})


def _several(plan: FleetPlan) -> dict[str, object]:
    """What the ingress is told of further pools."""
    if not plan.further:
        return {}
    return {
        "pools": (plan.settings.pool, *(further.pool for further in plan.further)),
        "pool_tokenizer": tuple(f"{f.pool}={'' if f.addresses else BUILTIN_TOKENIZER}" for f in plan.further),
    }


def _scaling(plan: FleetPlan) -> dict[str, object]:
    """What the scaler is told so that it starts engines and workers just as they are started here."""
    if plan.scale is None:
        return {}
    lowest, highest = plan.scale
    program, *arguments = engine_command(plan)
    if plan.settings.kind.simulated:
        program = str(console_script(program))
    return {
        "scaling": plan.settings.scaling,
        "provider": "process",
        "min_instances": lowest,
        "max_instances": highest,
        "engine_command": shlex.join([program, *arguments]),
        "engine_model": plan.engine_model,
        "engine_directory": plan.instances,
        "engine_guard": plan.data / LOCK_FILE,
    }


def archive_file(data: Path, prefix: str = "") -> Path:
    """Where the recorder's SQLite file lies; `prefix` is that of a further pool."""
    return data / f"{prefix}archive.sqlite"


def _engine(plan: FleetPlan, name: str, ports: list[int]) -> tuple[ProcessPlan, EngineAddress]:
    """An engine to start, by flags and knowing nothing of Pointsman; and where its worker finds it."""
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
    """The command line of an engine that is started, its places not filled in yet (`chassis.engine_command`)."""
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
    if settings.split:
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        command += ["--kv-transfer-config", json.dumps(connector), "--kv-transfer-gb-per-s", str(KV_TRANSFER_GB_PER_S)]
    for adapter in settings.lora:
        command += ["--lora-modules", f"{adapter}={adapter}"]
    return command


def _cache_and_events(plan: FleetPlan) -> list[str]:
    """What the simulated engine and vLLM are told in the same words."""
    told = ["--block-size", str(gcd(plan.block_tokens, ENGINE_BLOCK_TOKENS)), "--kv-events-config", "{kv_events}"]
    if plan.settings.kv_blocks is not None:
        told += ["--num-gpu-blocks-override", str(plan.settings.kv_blocks)]
    return told


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
        "kv_transfer_gb_per_s": KV_TRANSFER_GB_PER_S if plan.settings.split and plan.settings.kind.simulated else None,
    }
    return ProcessPlan(
        name=instance.replace("engine-", "worker-"),
        role="worker",
        script="pointsman-worker",
        url=_url(port),
        environment=_common(plan, "worker", LOOPBACK, port) | environment(own),
    )


def _common(plan: FleetPlan, role: str, host: str, port: int) -> dict[str, str]:
    """What all are told alike; an ingress learns from each pool how many tokens its keys stand for."""
    settings = plan.settings
    return environment(
        {
            "nats": plan.nats,
            "pool": settings.pool,
            "speed": settings.speed,
            "block_tokens": plan.block_tokens if role != "ingress" else None,
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
