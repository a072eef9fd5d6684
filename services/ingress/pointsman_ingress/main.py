"""`pointsman-ingress`: the one place where the ingress's parts are chosen and put together."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random, SystemRandom

import aiohttp
import structlog

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tokenizer import Tokenizer
from pointsman.chassis.health import AsgiApp, HealthBoard, HttpServer
from pointsman.chassis.log_link import Link, open_link
from pointsman.chassis.settings import command
from pointsman.chassis.supervision import Supervisor, run
from pointsman.chassis.telemetry import configure_logging
from pointsman.ports import Clock
from pointsman.primitives import PoolName, Seconds
from pointsman_ingress.app import ingress_app
from pointsman_ingress.call import RequestIds
from pointsman_ingress.fleet_view import FleetView
from pointsman_ingress.keys import Keys
from pointsman_ingress.openai_requests import Objectives
from pointsman_ingress.probe import Prober
from pointsman_ingress.proxy import EngineClient, engine_headers, open_session
from pointsman_ingress.routing import Router
from pointsman_ingress.service import Bounds, Gateway
from pointsman_ingress.settings import IngressSettings
from pointsman_ingress.tenants import Keyring
from pointsman_ingress.tokenising import Tokenising

log = structlog.get_logger()

BUILTIN_TOKENIZER = "builtin"
FLUSH_WALL_SECONDS: Seconds = 1.0
"""How long the last events may take to reach the log at shutdown."""


@command(IngressSettings, name="pointsman-ingress", table="ingress")
def main(settings: IngressSettings) -> None:
    """The OpenAI-compatible front door: understands a request, asks the scheduler where it belongs, forwards it to
    that engine and streams the answer back.

    \b
    Example:
      pointsman-ingress --nats nats://127.0.0.1:4222 --port 8080 --tokenizer /models/qwen2.5-7b
    """
    configure_logging(settings.log_level, settings.log_format)
    run(lambda supervisor: serve(settings, supervisor))


async def serve(settings: IngressSettings, supervisor: Supervisor) -> None:
    """Run an ingress until the supervisor is told to stop."""
    clock = ScaledClock(settings.speed)
    board = HealthBoard()
    async with open_link(settings, clock, board, name=_name(settings)) as link:
        async with assembled(settings, link, clock=clock, board=board, supervisor=supervisor) as app:
            server = HttpServer(app, host=settings.host, port=settings.port)
            supervisor.start(_accompany(server, supervisor, clock), name="accompany-http")
            await server.serve_until_cancelled()
        if not await link.log.flush(FLUSH_WALL_SECONDS):
            log.warning("events_unconfirmed", seconds=FLUSH_WALL_SECONDS)
        await supervisor.until_stopped()


@asynccontextmanager
async def assembled(
    settings: IngressSettings,
    link: Link,
    *,
    clock: Clock,
    board: HealthBoard,
    supervisor: Supervisor,
    engine_session: AbstractAsyncContextManager[aiohttp.ClientSession] | None = None,
    chance: Random | None = None,
) -> AsyncIterator[AsgiApp]:
    """The parts put together on a link, as an ASGI application that works while the context is open.

    `engine_session`: the way to the engines, where it is not the network. `chance`: what ids and probes are drawn from.
    Raises KeysFileError, TokenizerLoadError.
    """
    keyring = Keyring(Path(settings.keys_file) if settings.keys_file else None, clock)
    fleet = FleetView(clock, board)
    router = Router(
        commands=link.commands,
        events=link.log,
        fleet=fleet,
        pool=PoolName(settings.pool),
        clock=clock,
        board=board,
        silence_max=settings.silence_max,
    )
    keys = Keys(secret=settings.secret.encode(), block_tokens=settings.block_tokens)
    chance = chance or SystemRandom()
    async with engine_session or open_session(
        connections_max=settings.connections_max, connect_timeout=settings.connect_timeout
    ) as session:
        engines = EngineClient(session, api_key=settings.engine_api_key, forward_authorization=not keyring.required)
        tokenising = Tokenising(
            tokenizer=_tokenizer(settings.tokenizer),
            engine=lambda: fleet.least(router.in_flight.__getitem__, []),
            session=session,
            engine_headers=engine_headers(settings.engine_api_key),
            threads=settings.tokenise_threads,
            clock=clock,
        )
        gateway = Gateway(
            name=_name(settings),
            bounds=_bounds(settings),
            keyring=keyring,
            tokenising=tokenising,
            keys=keys,
            fleet=fleet,
            router=router,
            engines=engines,
            events=link.log,
            clock=clock,
            supervisor=supervisor,
            ids=RequestIds(chance),
        )
        prober = Prober(
            fleet=fleet,
            tokenising=tokenising,
            keys=keys,
            engines=engines,
            events=link.log,
            clock=clock,
            supervisor=supervisor,
            chance=chance,
        )
        supervisor.start(fleet.follow(link.log), name="fleet-view")
        supervisor.start(router.look_out(), name="scheduler-watch")
        supervisor.start(keyring.follow(), name="api-keys")
        if settings.probe:
            supervisor.start(prober.run(), name="probe")
        try:
            yield ingress_app(gateway=gateway, fleet=fleet, keyring=keyring, board=board)
        finally:
            tokenising.close()


async def _accompany(server: HttpServer, supervisor: Supervisor, clock: Clock) -> None:
    """Say where the server listens, and ask it to stop when the process is asked to."""
    while not server.started:
        await clock.sleep_wall(0.01)
    log.info("listening", port=server.bound_port)
    try:
        await supervisor.until_stopped()
    finally:
        server.should_exit = True


def _name(settings: IngressSettings) -> str:
    return settings.name or f"ingress-{os.getpid()}"


def _bounds(settings: IngressSettings) -> Bounds:
    return Bounds(
        body_bytes=settings.body_bytes_max,
        body_wall_seconds=settings.body_timeout,
        request_wall_seconds=settings.request_timeout,
        retries=settings.retries_max,
        objectives=Objectives(settings.slo_ttft, settings.slo_tpot),
    )


def _tokenizer(place: str) -> Tokenizer | None:
    """Raises TokenizerLoadError."""
    if not place:
        return None
    return Tokenizer.builtin() if place == BUILTIN_TOKENIZER else Tokenizer.load(Path(place))
