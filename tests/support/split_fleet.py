"""A fleet with prefill and decode on instances of their own, in one process: scheduler, workers and an ingress over the
in-memory log, in front of engines that are reached over real sockets, simulated here or real ones that run already."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.http_engine import HttpEngine
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint
from pointsman.contracts.commands import DrainInstance
from pointsman.contracts.requests import RequestEvent
from pointsman.ports import EngineTarget
from pointsman.primitives import InstanceId, WallSeconds
from pointsman.runtime.supervision import Supervisor
from pointsman_engine_sim.server import EngineServer, engine_server
from pointsman_engine_sim.settings import EngineSimSettings
from pointsman_ingress.settings import IngressSettings
from pointsman_scheduler.service import SchedulerService
from pointsman_worker.settings import WorkerSettings
from tests.support.api_keys import put_keys
from tests.support.engine_sim import FREE_PORTS
from tests.support.log_reading import life_of
from tests.support.memory_pool import MemoryPool
from tests.support.services import worker_over
from tests.support.waiting import eventually

SPEED = 10.0
CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
JOIN_SECONDS_MAX = 20.0


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine is reached, by HTTP and for its KV events, and what its worker is told beyond that."""

    url: str
    kv: str
    replay: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class SplitFleet:
    """The fleet, from outside."""

    url: str
    pool: MemoryPool
    scheduler: SchedulerService
    http: aiohttp.ClientSession

    async def ask(self, path: str, request: str, body: Mapping[str, Any]) -> tuple[Mapping[str, str], Any]:
        """The headers of an answer, and what it says: JSON, or a stream as text. Objectives are such that all are met."""
        headers = {"x-request-id": request, "x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "10000"}
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers, await (answer.text() if body.get("stream") else answer.json())

    async def drain(self, instance: str) -> None:
        """Nothing new is placed there; it still gives what it holds."""
        command = DrainInstance(instance=InstanceId(instance), reason="test")
        await self.pool.operate(command, action="drain", operator="local")

    async def life_of(self, request: str) -> list[RequestEvent]:
        return life_of(await self.pool.entries(), request)


@asynccontextmanager
async def split_fleet(
    engines: Mapping[str, EnginePlace],
    *,
    speed: float = 1.0,
    block_tokens: int = 64,
    tokenizer: str = "builtin",
    keys: Mapping[str, str] | None = None,
    **ingress: Any,
) -> AsyncIterator[SplitFleet]:
    """A fleet in front of these engines, all of which have joined. `keys`: tenants by API key, which is then required.
    `ingress`: further settings of its ingress."""
    told: dict[str, Any] = {"speed": speed, "block_tokens": block_tokens}
    pool = MemoryPool(clock=ScaledClock(speed), usual={"policy": "min_ttft"} | told)
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(pool.scheduler())
        for name, place in engines.items():
            await start_worker(stack, pool, name, place, told)
        known = scheduler.state.fleet
        await eventually(
            lambda: len(known.instances) == len(engines) and all(i.answered for i in known.instances),
            seconds=JOIN_SECONDS_MAX,
        )
        asking = {"speed": speed, "tokenizer": tokenizer, "require_keys": keys is not None, **ingress}
        await put_keys(pool.broker.access, keys or {}, secret=IngressSettings(**asking).secret)
        url = await stack.enter_async_context(pool.ingress(**asking))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield SplitFleet(url, pool, scheduler, client)


@asynccontextmanager
async def simulated_split_fleet(
    roles: Mapping[str, str],
    *,
    role_switching: bool = False,
    fetches: bool = False,
    speed: float = SPEED,
    **ingress: Any,
) -> AsyncIterator[tuple[SplitFleet, dict[str, EngineServer]]]:
    """The same in front of simulated engines, one for each role; their models can be looked into. `fetches`:
    whether they fetch prefixes from each other."""
    servers: dict[str, EngineServer] = {}
    async with AsyncExitStack() as stack:
        supervisor = await stack.enter_async_context(Supervisor())
        for name in roles:
            settings = EngineSimSettings(
                speed=speed, block_size=64, kv_events_config=FREE_PORTS, kv_transfer_config=CONNECTOR
            )
            servers[name] = await stack.enter_async_context(engine_server(settings, supervisor))
        places = {
            name: EnginePlace(
                server.url,
                server.events_endpoint or "",
                server.replay_endpoint or "",
                {
                    "role": roles[name],
                    "kv_transfer_gb_per_s": 12.5,
                    "role_switching": role_switching,
                    "fetches": fetches,
                },
            )
            for name, server in servers.items()
        }
        yield await stack.enter_async_context(split_fleet(places, speed=speed, **ingress)), servers


async def start_worker(
    stack: AsyncExitStack, pool: MemoryPool, name: str, place: EnginePlace, told: dict[str, Any]
) -> None:
    link = pool.broker.client(pool.clock, name=f"worker {name}")
    engine = await stack.enter_async_context(HttpEngine(place.url))
    target = EngineTarget(instance=InstanceId(name), url=place.url)
    events = KvEventReader(KvEndpoint(place.kv, place.replay))
    settings = WorkerSettings(**told, **place.settings, report_seconds=WallSeconds(0.1))
    service = worker_over(link, pool.clock, engine, target, settings, events)
    beside = await stack.enter_async_context(Supervisor())  # ends before what it asks is closed
    beside.start(service.run(), name=f"worker-{name}")
