"""The fleet: which process runs on which host, and a supervisor for each that starts it again, as systemd would."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from pointsman.adapters.owner_only import write_whole
from pointsman.contracts.permissions import ANY_INSTANCE, BusRole, BusUser
from pointsman.contracts.subjects import LOCAL_ACTOR
from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.ports import Link
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import USERS_FILE, Credentials
from pointsman.runtime.embedded_nats import nats_server_binary
from pointsman.runtime.settings import environment
from pointsman_cli.discovery import FleetFile, FleetProcess
from pointsman_cli.up.child import ServiceProcess
from pointsman_cli.up.plan import ProcessPlan, archive_file
from pointsman_cli.up.scripts import console_script
from pointsman_lab.background import background
from pointsman_lab.faults.fleet import FleetUnderTest
from pointsman_lab.hosts.namespaces import NETWORK, Host, Hosts

POOL, MODEL, BLOCK_TOKENS = PoolName("default"), "pointsman-sim", 64
SECRET = "several-hosts"
CONFIGURATIONS = Path(__file__).parents[5] / "deploy" / "nats"
NATS_PORT, API_PORT, ADMIN_PORT, SERVICE_PORT, ENGINE_PORT, KV_PORT = 4222, 8080, 8081, 9100, 8000, 5557
SLO_TTFT_SECONDS = 5.0
START_SECONDS_MAX = 60.0
POLL_SECONDS = 0.1
SCHEDULER_HOSTS = 2


class FleetNotReadyError(Exception):
    """The message names what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsShape:
    """`variables`: environment of every process."""

    servers: int
    engines_each: int
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class HostFleet(FleetUnderTest):
    hosts: Hosts | None = None
    processes: dict[str, list[ServiceProcess]] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    """Hosts that are gone: nothing is started there."""

    @property
    @override
    def file(self) -> FleetFile:
        running = [
            FleetProcess(one.name, one.role, one.pid, one.url, one.admin_url)
            for host in self.processes
            for one in self.processes[host]
        ]
        return FleetFile(
            nats=self.nats,
            ingress="",
            pool=POOL,
            model=MODEL,
            policy=DEFAULT_ROUTING,
            speed=1.0,
            slo_ttft=SLO_TTFT_SECONDS,
            block_tokens=BLOCK_TOKENS,
            secret_file=str(self.data / "secret"),
            credentials=str(self.data / "credentials"),
            data=str(self.data),
            pid=os.getpid(),
            started_at=0.0,
            processes=running,
        )

    @override
    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for process in self.file.processes if process.pid}

    @override
    async def nats_victim(self, link: Link) -> str:
        servers = self.file.of_role("nats")
        return servers[0].name if len(servers) == 1 else await self.log_leader(link)

    def host_of(self, process_name: str) -> str:
        (found,) = [host for host, of_host in self.processes.items() if process_name in {one.name for one in of_host}]
        return found

    def kill_host(self, name: str) -> list[int]:
        """Kills all its processes, and starts none until `return_host`. Returns the pids."""
        self.absent.add(name)
        for process in self.processes[name]:
            process.kill()
        return [process.pid for process in self.processes[name]]

    def return_host(self, name: str) -> None:
        self.absent.discard(name)

    async def keep(self, host: str, process: ServiceProcess) -> None:
        """Runs until cancelled. Raises OSError."""
        while True:
            while host in self.absent:  # noqa: ASYNC110 - a host that is gone is asked nothing
                await asyncio.sleep(POLL_SECONDS)
            await process.start()
            await process.exited()
            await asyncio.sleep(process.restart_wait())

    async def ready(self) -> None:
        """Raises FleetNotReadyError."""
        waited = [one for host in self.processes.values() for one in host if one.role != "nats"]
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            ready = await asyncio.gather(*(one.is_ready() for one in waited))
            lacking = [one for one, well in zip(waited, ready, strict=True) if not well]
            if not lacking:
                return
            if time.monotonic() > deadline:
                raise FleetNotReadyError("; ".join(f"{one.name}: {one.waiting_for or 'no answer'}" for one in lacking))
            await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def start_hosts(shape: HostsShape, hosts: Hosts, directory: Path) -> AsyncIterator[HostFleet]:
    """Call it on the clients' host. Raises FleetNotReadyError, OSError."""
    data = directory / "data"
    for place in ("logs", "workers"):
        (data / place).mkdir(parents=True, exist_ok=True)
    write_whole(data / "secret", SECRET.encode())
    servers = hosts.hosts[: shape.servers]
    nats = ",".join(f"nats://{host.address}:{NATS_PORT}" for host in servers)
    credentials = Credentials(data / "credentials")
    credentials.make([POOL], workers=[BusUser(BusRole.WORKER, ANY_INSTANCE, POOL)], operators=[LOCAL_ACTOR])
    fleet = HostFleet(data, nats, hosts=hosts)
    planner = _Planner(fleet, shape, credentials, servers)
    for number, host in enumerate(hosts.hosts[:-1]):
        plans = planner.plans_of(host, number, _instances(number, shape))
        fleet.processes[host.name] = [ServiceProcess(plan, data / "logs") for plan in plans]
    keeping = (fleet.keep(host, process) for host, processes in fleet.processes.items() for process in processes)
    try:
        async with background(*keeping):
            await fleet.ready()
            yield fleet
    finally:
        for name in fleet.processes:
            fleet.kill_host(name)


def _instances(host: int, shape: HostsShape) -> list[str]:
    return [f"engine-{host * shape.engines_each + number}" for number in range(1, shape.engines_each + 1)]


@dataclass(slots=True)
class _Planner:
    fleet: HostFleet
    shape: HostsShape
    credentials: Credentials
    servers: Sequence[Host]
    port: int = SERVICE_PORT

    def plans_of(self, host: Host, number: int, instances: Sequence[str]) -> list[ProcessPlan]:
        plans = [self._nats(host)] if host in self.servers else []
        if number < SCHEDULER_HOSTS:
            plans += [self._service(host, "scheduler", number), self._ingress(host, number)]
        else:
            archive = {"archive_url": f"sqlite+aiosqlite:///{archive_file(self.fleet.data)}"}
            plans += [self._service(host, "recorder", 0, archive), self._service(host, "rebalancer", 0)]
        plans += [self._engine(host, place, instance) for place, instance in enumerate(instances)]
        return [*plans, self._worker(host, number, instances)]

    def _nats(self, host: Host) -> ProcessPlan:
        name = f"nats-{host.number - 10}"
        store = self.fleet.data / name
        store.mkdir(exist_ok=True)
        text = (CONFIGURATIONS / ("cluster.conf" if self.shape.servers > 1 else "nats.conf")).read_text()
        changed = {
            '"/data"': json.dumps(str(store)),
            'include "users/nats-users.conf"': "",
            'include "nats-users.conf"': "",
        }
        changed |= {
            f'"nats://{f"nats-{one.number - 10}"}:6222"': f'"nats://{one.address}:6222"' for one in self.servers
        }
        for old, new in changed.items():
            text = text.replace(old, new)
        file = store / "nats-server.conf"
        write_whole(file, text.encode() + (self.credentials.directory / USERS_FILE).read_bytes())
        return self._plan(
            host,
            name,
            "nats",
            [nats_server_binary(), "-c", str(file)],
            {"NATS_NAME": name},
            url=f"nats://{host.address}",
        )

    def _nats_of(self, host: Host) -> str:
        """As deploy/systemd/pointsman.toml: the host's own server by its loopback."""
        addresses = ["127.0.0.1" if server is host else server.address for server in self.servers]
        return ",".join(f"nats://{address}:{NATS_PORT}" for address in addresses)

    def _ingress(self, host: Host, number: int) -> ProcessPlan:
        own = {
            "port": API_PORT,
            "admin_port": ADMIN_PORT,
            "admin_host": "0.0.0.0",
            "tokenizer": "builtin",
            "access_log": "true",
            "slo_ttft_seconds": SLO_TTFT_SECONDS,
            "block_tokens": None,
        }
        return self._service(host, "ingress", number, own, port=API_PORT, admin_port=ADMIN_PORT)

    def _service(
        self,
        host: Host,
        role: str,
        number: int,
        own: Mapping[str, object] | None = None,
        *,
        port: int = 0,
        admin_port: int = 0,
        instance: str = "",
    ) -> ProcessPlan:
        self.port += 1
        port = port or self.port
        settings = {
            "nats": self._nats_of(host),
            "nats_credentials": self.credentials.file(BusUser(BusRole(role), instance, POOL)),
            "log_replicas": len(self.servers),
            "secret_file": self.fleet.data / "secret",
            "block_tokens": BLOCK_TOKENS,
            "engine_urls": f"http://{NETWORK}.*:*" if role in ("scheduler", "ingress") else None,
            "host": "0.0.0.0",
            "port": port,
            "log_format": "json",
            **(own or {}),
        }
        return self._plan(
            host,
            role if not number else f"{role}-{number + 1}",
            role,
            [str(console_script(f"pointsman-{role}"))],
            {**environment(settings), **self.shape.variables},
            url=f"http://{host.address}:{port}",
            admin_url=f"http://{host.address}:{admin_port}" if admin_port else "",
        )

    def _engine(self, host: Host, place: int, instance: str) -> ProcessPlan:
        port, kv_port = ENGINE_PORT + place, KV_PORT + 2 * place
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{kv_port}",
            "replay_endpoint": f"tcp://*:{kv_port + 1}",
        }
        command = [
            str(console_script("pointsman-engine-sim")),
            "--model",
            MODEL,
            "--host",
            "0.0.0.0",
            "--port",
            str(port),
        ]
        command += ["--stream-interval", "10", "--kv-events-config", json.dumps(events)]
        return self._plan(
            host, instance, "engine", command, {}, url=f"http://{host.address}:{port}", ready_path="/health"
        )

    def _worker(self, host: Host, number: int, instances: Sequence[str]) -> ProcessPlan:
        """One for all engines of the host."""
        lines = []
        for place, instance in enumerate(instances):
            port, kv_port = ENGINE_PORT + place, KV_PORT + 2 * place
            lines += [
                "[[engine]]",
                f'name = "{instance}"',
                f'url = "http://127.0.0.1:{port}"',
                f'advertised_url = "http://{host.address}:{port}"',
                f'kv_endpoint = "tcp://127.0.0.1:{kv_port}"',
                f'kv_replay_endpoint = "tcp://127.0.0.1:{kv_port + 1}"',
            ]
        engines = self.fleet.data / f"{host.name}.toml"
        engines.write_text("\n".join(lines) + "\n")
        own = {"discover": f"file:{engines}", "state_directory": self.fleet.data / "workers" / host.name}
        return self._service(host, "worker", number, own, instance=ANY_INSTANCE)

    def _plan(
        self,
        host: Host,
        name: str,
        role: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        url: str,
        admin_url: str = "",
        ready_path: str = "/readyz",
    ) -> ProcessPlan:
        program, *arguments = host.command(command)
        return ProcessPlan(
            name=name,
            role=role,
            script=program,
            url=url,
            admin_url=admin_url,
            environment=variables,
            arguments=tuple(arguments),
            ready_path=ready_path,
            foreign=True,
        )
