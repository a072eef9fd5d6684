"""An ingress over HTTP: real server, real sockets, with engines and a scheduler around it that do as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
import msgspec

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.fleet import InstanceLeft
from pointsman.contracts.requests import RequestEvent
from pointsman.ports import EventLog
from pointsman.primitives import Epoch, InstanceId, PoolName, WallSeconds
from pointsman.runtime.health import HealthBoard, HttpServer
from pointsman.runtime.line_writer import Output
from pointsman.runtime.supervision import Supervisor
from pointsman.runtime.tracing import Tracer
from pointsman_ingress.assembly import assembled
from pointsman_ingress.key_probe import KEYS_PART
from pointsman_ingress.servers import admin_server, http_server, tls_context
from pointsman_ingress.settings import IngressSettings
from pointsman_lab.memory.log import MemoryBroker
from tests.support.api_keys import put_keys
from tests.support.events import BLOCK, joined, reported
from tests.support.fake_engine import FakeEngine, running_engine
from tests.support.fake_scheduler import FakeScheduler
from tests.support.log_reading import events_in
from tests.support.services import ingress_settings
from tests.support.waiting import eventually

POOL = PoolName("default")
ONE, TWO = InstanceId("engine-1"), InstanceId("engine-2")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TOKENS = {"model": "m", "prompt": list(range(200)), "max_tokens": 3}
STREAM = {**TOKENS, "stream": True, "stream_options": {"include_usage": True}}


@dataclass
class IngressBench:
    """An ingress with two engines and a scheduler around it."""

    url: str
    log: EventLog
    broker: MemoryBroker
    scheduler: FakeScheduler
    one: FakeEngine
    two: FakeEngine
    client: aiohttp.ClientSession
    board: HealthBoard
    server: HttpServer
    admin: HttpServer
    moves: int = 1

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin.bound_port}"

    async def grants(self, urls: dict[InstanceId, str]) -> None:
        """From now on the scheduler grants these instances, which have joined again there."""
        self.moves += 1
        now = ScaledClock().now()
        for instance, url in urls.items():
            await self.log.append(joined(instance, epoch=self.moves, at=now, url=url, max_model_len=1000))
        self.scheduler.engines = urls

    def post(self, path: str, body: Any, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | {k.replace("_", "-").lower(): v for k, v in headers.items()}
        return self.client.post(self.url + path, data=BytesIO(data), headers=sent)

    async def events(self) -> list[RequestEvent]:
        """What the ingress wrote about requests."""
        await self.log.flush(WallSeconds(1.0))
        return [event for event in await events_in(self.log) if isinstance(event, RequestEvent)]


async def open_world(
    stack: AsyncExitStack,
    settings: IngressSettings,
    *,
    block_tokens: int = BLOCK,
    max_model_len: int = 1000,
    engines_join: bool = True,
    log_answers: bool = True,
    access_log_out: Output | None = None,
    keys: Mapping[str, str] | None = None,
    tracer: Tracer | None = None,
) -> IngressBench:
    """Without engines that join or a log that answers, the ingress is there and knows nothing."""
    clock = ScaledClock(settings.speed)
    broker = MemoryBroker(POOL)
    link, rest = broker.client(clock, name="ingress-1"), broker.client(clock, name="everybody-else")
    log = rest.log
    await put_keys(broker.access, keys or {}, secret=settings.secret)
    one = await stack.enter_async_context(running_engine())
    two = await stack.enter_async_context(running_engine())
    scheduler = FakeScheduler(rest.commands, POOL, {ONE: one.url, TWO: two.url})
    await stack.enter_async_context(scheduler)
    if engines_join:
        for instance, engine in ((ONE, one), (TWO, two)):
            told = joined(
                instance, at=clock.now(), url=engine.url, max_model_len=max_model_len, block_tokens=block_tokens
            )
            await log.append(told)
    if not log_answers:
        broker.disconnect()
    supervisor = await stack.enter_async_context(Supervisor())
    board = HealthBoard()
    apps = await stack.enter_async_context(
        assembled(
            settings,
            {POOL: link},
            clock=clock,
            board=board,
            supervisor=supervisor,
            access_log_out=access_log_out,
            tracer=tracer,
        )
    )
    tls = tls_context(settings, board, supervisor, clock)
    server = http_server(apps.api, settings, board, tls=tls)
    admin = admin_server(settings, board, apps.admin)
    for each in (server, admin):
        stack.push_async_callback(_stop, each, asyncio.create_task(each.serve()))
    await eventually(
        lambda: (
            server.started and admin.started and (set(board.lacks) <= {KEYS_PART} or not (engines_join and log_answers))
        )
    )
    client = await stack.enter_async_context(aiohttp.ClientSession())
    url = f"{'https' if tls else 'http'}://127.0.0.1:{server.bound_port}"
    return IngressBench(url, log, broker, scheduler, one, two, client, board, server, admin)


async def _stop(server: HttpServer, serving: "asyncio.Task[None]") -> None:
    server.should_exit = True
    await serving


@asynccontextmanager
async def world_with(
    *,
    block_tokens: int = BLOCK,
    max_model_len: int = 1000,
    engines_join: bool = True,
    log_answers: bool = True,
    keys: Mapping[str, str] | None = None,
    tracer: Tracer | None = None,
    **settings: Any,
) -> AsyncIterator[IngressBench]:
    """`keys`: tenants by API key, which is then required."""
    async with AsyncExitStack() as stack:
        told = ingress_settings(**{"require_keys": keys is not None, **settings})
        yield await open_world(
            stack,
            told,
            block_tokens=block_tokens,
            max_model_len=max_model_len,
            engines_join=engines_join,
            log_answers=log_answers,
            keys=keys,
            tracer=tracer,
        )


async def eventually_listed(world: IngressBench, model: str) -> None:
    """Wait until the ingress has read in the log that there is such a model."""

    async def is_listed() -> bool:
        async with world.client.get(f"{world.url}/v1/models/{model}") as answer:
            return answer.status == 200

    await eventually(is_listed)


async def drop(world: IngressBench, instance: InstanceId, *, stays: InstanceId) -> None:
    """One of two instances leaves, and the ingress has read so."""
    await world.log.append(InstanceLeft(at=0.0, instance=instance, epoch=Epoch(1), reason="the test says so"))
    report = reported(stays, 0, [], at=ScaledClock().now())
    await world.log.append(msgspec.structs.replace(report, adapters=["read-up-to-here"]))
    await eventually_listed(world, "read-up-to-here")
