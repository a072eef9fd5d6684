"""What happens to hosts and network: *partition* cuts a host off and heals it; *gone* cuts it off and kills all its
processes, so that no peer is told, and brings the host back; *loss* raises the share of lost packets; *calm* is an
interval to compare with."""

import asyncio
import time
from collections.abc import Sequence

import msgspec
from typing_extensions import override

from pointsman.ports import Link
from pointsman_lab.faults.bad_engines import EngineWatch
from pointsman_lab.faults.balancer import Balancer
from pointsman_lab.faults.injector import Injection, Injector
from pointsman_lab.faults.schedule import Fault, FaultError
from pointsman_lab.hosts.fleet import HostFleet
from pointsman_lab.hosts.namespaces import Host, Hosts

HOSTS = ("host-1", "host-2", "host-3")
CLIENTS = "clients"
LEADER, LOG, NETWORK = "leader", "log", "network"
"""Targets: the host of the leading scheduler; that of the log's leading nats-server."""
TARGETS = {"partition": (*HOSTS, LEADER, LOG), "gone": (*HOSTS, LEADER, LOG), "loss": (NETWORK,), "calm": (NETWORK,)}
LASTS_SECONDS = {"partition": 8.0, "gone": 10.0, "loss": 20.0, "calm": 20.0}
DEFAULT_FAULTS = (
    "calm:network",
    "partition:host-3",
    "partition:leader",
    "gone:leader",
    "partition:log",
    "loss:network",
)
HIGH_LOSS = 0.05


def host_faults(names: Sequence[str]) -> list[Fault]:
    """Raises FaultError."""
    faults = []
    for name in names:
        action, _, target = name.partition(":")
        if target not in TARGETS.get(action, ()):
            known = "; ".join(f"{one}:{{{','.join(targets)}}}" for one, targets in TARGETS.items())
            raise FaultError(f"there is no fault {name!r}; there are {known}")
        faults.append(Fault(action, (target,), 0.0, LASTS_SECONDS[action]))
    return faults


class HostInjector(Injector):
    def __init__(
        self, fleet: HostFleet, hosts: Hosts, link: Link, *, seed: int, watch: EngineWatch, balancer: Balancer
    ) -> None:
        super().__init__(fleet, link, seed=seed, watch=watch, balancer=balancer)
        self._host_fleet = fleet
        self._hosts = hosts

    @override
    async def _strike(self, fault: Fault) -> None:
        host = await self._host(fault.targets[0])
        processes = [] if host is None else self._host_fleet.processes[host.name]
        at = time.monotonic()
        injection = Injection(
            fault=fault.name if host is None else f"{fault.action}:{host.name}",
            victim=", ".join(process.name for process in processes) or NETWORK,
            pids=[process.pid for process in processes],
            at=at,
            began=at - self._started,
            lasted=fault.lasts,
        )
        self.injections.append(injection)
        gone = await self._carried_out(fault, host)
        await self._until_well(injection, gone=gone)
        injection.ended = time.monotonic()

    async def _carried_out(self, fault: Fault, host: Host | None) -> set[int]:
        """The pids that it ended."""
        if host is None:
            return await self._changed_loss(fault)
        gone = set[int]()
        self._hosts.cut(host)
        try:
            if fault.action == "gone":
                gone = set(self._host_fleet.kill_host(host.name))
            await asyncio.sleep(fault.lasts)
        finally:
            self._hosts.heal(host)
            self._host_fleet.return_host(host.name)
        return gone

    async def _changed_loss(self, fault: Fault) -> set[int]:
        usual = self._hosts.conditions
        if fault.action == "loss":
            self._hosts.change(msgspec.structs.replace(usual, loss=HIGH_LOSS))
        try:
            await asyncio.sleep(fault.lasts)
        finally:
            self._hosts.change(usual)
        return set()

    async def _host(self, target: str) -> Host | None:
        if target == NETWORK:
            return None
        if target == LEADER:
            name, _ = await self._victim(LEADER, struck=(), in_turn=False)
            target = self._host_fleet.host_of(name)
        elif target == LOG:
            target = self._host_fleet.host_of(await self._host_fleet.nats_victim(self._link))
        return self._hosts.named(target)
