"""Clients of a fleet in containers. They find the ingress by its address in a network of the fleet, so that no proxy of
Docker accepts connections in its place."""

import asyncio
import socket
from collections.abc import Mapping
from typing import ClassVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from typing_extensions import override

from pointsman.primitives import Tokens
from pointsman_cli.bench.load import IDLE_CONNECTION_SECONDS
from pointsman_lab.faults.clients import ANSWER_SECONDS_MAX, Clients
from pointsman_lab.faults.load import SteadyClients
from tests.containers.fleet import ContainerFleet

STREAMS, RATE = 6, 8.0


class ContainerClients(SteadyClients):
    """Some streams of about 3 s and short requests, all of them patient: only what breaks fails."""

    objectives: ClassVar[Mapping[str, str]] = Clients.objectives
    stream_tokens: ClassVar[Tokens] = 120

    def __init__(self, fleet: ContainerFleet, *, seed: int, via: str, url: str = "") -> None:
        super().__init__(fleet.file, url=url, seed=seed, streams=STREAMS, rate=RATE)
        self._containers = fleet
        self._via = via

    @override
    def _session(self) -> aiohttp.ClientSession:
        resolver = ContainerAddresses(self._containers, self._via)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS, resolver=resolver, use_dns_cache=False
        )
        return aiohttp.ClientSession(
            self._url, connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS_MAX)
        )


class ContainerAddresses(AbstractResolver):
    def __init__(self, fleet: ContainerFleet, network: str) -> None:
        self._fleet = fleet
        self._network = network

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = await asyncio.to_thread(self._fleet.address, host, self._network)
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    @override
    async def close(self) -> None:
        pass
