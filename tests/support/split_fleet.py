"""A fleet with prefill and decode on instances of their own, in one process: scheduler, workers and an ingress over the
in-memory log, in front of engines that are reached over real sockets, simulated here or real ones that run already."""

import asyncio
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
from pointsman.contracts.subjects import admin_subject
from pointsman.ports import EngineTarget, LogEntry
from pointsman.primitives import InstanceId, PoolName, WallSeconds
from pointsman.runtime.health import HealthBoard, HttpServer
from pointsman.runtime.supervision import Supervisor
from pointsman_engine_sim.server import EngineServer, engine_server
from pointsman_engine_sim.settings import EngineSimSettings
from pointsman_ingress.assembly import assembled
from pointsman_ingress.settings import IngressSettings
from pointsman_lab.memory.log import MemoryBroker
from pointsman_scheduler.service import SchedulerService
from pointsman_worker.settings import WorkerSettings
from tests.support.api_keys import put_keys
from tests.support.engine_sim import FREE_PORTS
from tests.support.log_reading import life_of, whole_log
from tests.support.scheduling import running_scheduler, worker_over
from tests.support.waiting import eventually

POOL = PoolName("default")
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
    broker: MemoryBroker
    clock: ScaledClock
    scheduler: SchedulerService
    client: aiohttp.ClientSession

    async def ask(self, path: str, request: str, body: Mapping[str, Any]) -> tuple[Mapping[str, str], Any]:
        """The headers of an answer, and what it says: JSON, or a stream as text. Objectives are such that all are met."""
        headers = {"x-request-id": request, "x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "10000"}
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers, await (answer.text() if body.get("stream") else answer.json())

    async def entries(self) -> list[LogEntry]:
        """Everything in the log."""
        return await whole_log(self.broker.client(self.clock, name="reader").log)

    async def drain(self, instance: str) -> None:
        """Nothing new is placed there; it still gives what it holds."""
        link = self.broker.client(self.clock, name="operator")
        command = DrainInstance(instance=InstanceId(instance), reason="test")
        await link.commands.request(admin_subject(POOL, "drain", "local"), command, timeout=WallSeconds(2.0))

    async def life_of(self, request: str) -> list[RequestEvent]:
        return life_of(await self.entries(), request)


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
    clock, broker = ScaledClock(speed), MemoryBroker(POOL)
    told: dict[str, Any] = {"speed": speed, "block_tokens": block_tokens}
    async with AsyncExitStack() as stack:
        scheduler = await start_scheduler(stack, broker, clock, told)
        for name, place in engines.items():
            await start_worker(stack, broker, clock, name, place, told)
        known = scheduler.state.fleet
        await eventually(
            lambda: len(known.instances) == len(engines) and all(i.answered for i in known.instances),
            seconds=JOIN_SECONDS_MAX,
        )
        url = await start_ingress(stack, {POOL: broker}, clock, keys=keys, speed=speed, tokenizer=tokenizer, **ingress)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield SplitFleet(url, broker, clock, scheduler, client)


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


async def start_scheduler(
    stack: AsyncExitStack, broker: MemoryBroker, clock: ScaledClock, told: dict[str, Any]
) -> SchedulerService:
    link = broker.client(clock, name="s")
    return await stack.enter_async_context(running_scheduler(link, clock, **{"policy": "min_ttft"} | told))


async def start_worker(
    stack: AsyncExitStack,
    broker: MemoryBroker,
    clock: ScaledClock,
    name: str,
    place: EnginePlace,
    told: dict[str, Any],
) -> None:
    link = broker.client(clock, name=f"worker {name}")
    engine = await stack.enter_async_context(HttpEngine(place.url))
    target = EngineTarget(instance=InstanceId(name), url=place.url)
    events = KvEventReader(KvEndpoint(place.kv, place.replay))
    settings = WorkerSettings(**told, **place.settings, report_seconds=WallSeconds(0.1))
    service = worker_over(link, clock, engine, target, settings, events)
    beside = await stack.enter_async_context(Supervisor())  # ends before what it asks is closed
    beside.start(service.run(), name=f"worker-{name}")


async def start_ingress(
    stack: AsyncExitStack,
    brokers: Mapping[PoolName, MemoryBroker],
    clock: ScaledClock,
    *,
    keys: Mapping[str, str] | None = None,
    **told: Any,
) -> str:
    """Its URL, once every pool is ready."""
    own = await stack.enter_async_context(Supervisor())
    settings = IngressSettings(**{"name": "ingress-1", "probe": False, "require_keys": keys is not None, **told})
    await put_keys(next(iter(brokers.values())).access, keys or {}, secret=settings.secret)
    boards = {pool: HealthBoard() for pool in brokers}
    links = {pool: broker.client(clock, name="ingress-1") for pool, broker in brokers.items()}
    apps = await stack.enter_async_context(
        assembled(settings, links, clock=clock, board=HealthBoard(), supervisor=own, pool_boards=boards)
    )
    server = HttpServer(apps.api, host="127.0.0.1", port=0, shutdown_seconds=1)
    serving = asyncio.create_task(server.serve())

    async def stop() -> None:
        server.should_exit = True
        await serving

    stack.push_async_callback(stop)
    await eventually(lambda: server.started and all(board.whole for board in boards.values()))
    return f"http://127.0.0.1:{server.bound_port}"
