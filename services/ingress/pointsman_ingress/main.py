"""`pointsman-ingress`: the one place where the ingress's parts are chosen and put together."""

import asyncio
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from random import Random, SystemRandom

import aiohttp
import click
import structlog

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tokenizer import Tokenizer, TokenizerLoadError
from pointsman.ports import Clock, Link
from pointsman.primitives import PoolName, Seconds
from pointsman.runtime.health import SHUTDOWN_PART, AsgiApp, HealthBoard, HttpServer
from pointsman.runtime.http_protocol import HttpLimits
from pointsman.runtime.line_writer import LineWriter, Output
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.open_files import clients_max, raised_open_files
from pointsman.runtime.processes import serve_in_processes
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import STOP_SECONDS_MAX, Supervisor, run
from pointsman.runtime.telemetry import configure_logging
from pointsman_ingress.engine.proxy import EngineClient, open_session
from pointsman_ingress.http.access_log import AccessLog
from pointsman_ingress.http.app import ingress_app
from pointsman_ingress.http.call import RequestIds
from pointsman_ingress.http.request_headers import Objectives
from pointsman_ingress.http.tenants import Keyring, KeysFileError
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.heartbeat import Heartbeat
from pointsman_ingress.placement.holding import Hold, HoldBounds
from pointsman_ingress.placement.in_flight import InFlightRequests
from pointsman_ingress.placement.pools import Pool, Pools, PoolsBoard
from pointsman_ingress.placement.rebinding import Rebinding
from pointsman_ingress.placement.retry_budget import RetryBudget
from pointsman_ingress.placement.routing import Router
from pointsman_ingress.placement.scheduler_liveness import SchedulerLiveness
from pointsman_ingress.prompt.keys import Keys
from pointsman_ingress.prompt.probe import Prober
from pointsman_ingress.prompt.tokenization import Tokenizing
from pointsman_ingress.service import BodyRewrites, Bounds, Gateway
from pointsman_ingress.settings import IngressSettings
from pointsman_ingress.timeouts import FirstByteBounds

log = structlog.get_logger()

BUILTIN_TOKENIZER = "builtin"
LISTENS_WALL_SECONDS: Seconds = 1.0
"""How often one of several processes shows its parent that it runs."""
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
    raised_open_files()
    if settings.processes == 1:
        run(lambda supervisor: serve(settings, supervisor))
    else:
        serve_in_processes(
            settings.processes,
            host=settings.host,
            port=settings.port,
            serve=partial(_serve_as_one_of_several, replace(settings, name=_name(settings))),
        )


def _serve_as_one_of_several(
    settings: IngressSettings, number: int, listener: socket.socket, listens: Callable[[], None]
) -> None:
    """A member of the fleet with its own name, which its log lines have too."""
    own = replace(settings, name=f"{settings.name}-{number}")
    structlog.contextvars.bind_contextvars(process=own.name)
    run(lambda supervisor: serve(own, supervisor, listener=listener, listens=listens))


async def serve(
    settings: IngressSettings,
    supervisor: Supervisor,
    *,
    listener: socket.socket | None = None,
    listens: Callable[[], None] = lambda: None,
) -> None:
    """Run an ingress until the supervisor is told to stop. `listener`: as in `HttpServer`. `listens` is called when it does, and each
    second from then on."""
    clock = ScaledClock(settings.speed)
    board = PoolsBoard(pool_names(settings))
    async with AsyncExitStack() as open_links:
        links = {
            pool: await open_links.enter_async_context(
                open_link(
                    replace(settings, pool=pool), clock, board.pools[pool], name=_name(settings), serves_without=True
                )
            )
            for pool in pool_names(settings)
        }
        async with assembled(
            settings, links, clock=clock, board=board, supervisor=supervisor, pool_boards=board.pools
        ) as app:
            server = http_server(app, settings, board, listener=listener)
            supervisor.stop_seconds_max = STOP_SECONDS_MAX + settings.lame_duck_seconds + settings.drain_seconds_max
            supervisor.start(accompany(server, supervisor, clock, listens), name="accompany-http")
            await server.serve_until_cancelled()
        flushed = await asyncio.gather(*(link.log.flush(FLUSH_WALL_SECONDS) for link in links.values()))
        if not all(flushed):
            log.warning("events_unconfirmed", seconds=FLUSH_WALL_SECONDS)
        await supervisor.until_stopped()


def http_server(
    app: AsgiApp, settings: IngressSettings, board: HealthBoard, *, listener: socket.socket | None = None
) -> HttpServer:
    """What carries the ingress's application; `board` says when it shuts down."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        listener=listener,
        limits=HttpLimits(connections=clients_max(open_files)),
        lame_duck_seconds=settings.lame_duck_seconds,
        shutdown_seconds=settings.drain_seconds_max,
        keep_alive_seconds=settings.keep_alive_seconds,
        on_lame_duck=lambda: board.missing(SHUTDOWN_PART, "shutting down"),
    )


@asynccontextmanager
async def assembled(
    settings: IngressSettings,
    links: Mapping[PoolName, Link],
    *,
    clock: Clock,
    board: HealthBoard,
    supervisor: Supervisor,
    engine_session: AbstractAsyncContextManager[aiohttp.ClientSession] | None = None,
    chance: Random | None = None,
    pool_boards: Mapping[PoolName, HealthBoard] | None = None,
    access_log_out: Output | None = None,
) -> AsyncIterator[AsgiApp]:
    """The parts put together, as an ASGI application that works while the context is open.

    `links`: to each pool that is served. `engine_session`: the way to the engines, where it is not the network. `chance`: what ids and probes are drawn from.
    `pool_boards`: where single pools say what they wait for, if that is not on `board`.
    `access_log_out`: where the access log goes, if not to standard output.
    Raises click.ClickException where the keys file or a tokenizer cannot be read.
    """
    keyring = _keyring(settings, clock)
    chance = chance or SystemRandom()
    async with engine_session or open_session() as session:
        engines = EngineClient(
            session,
            api_key=settings.engine_api_key,
            forward_authorization=not keyring.required,
            chunk_wall_seconds=settings.chunk_timeout_seconds,
        )
        with ExitStack() as closing:
            hold = Hold(HoldBounds(settings.hold_seconds), clock)
            served = [
                _pool(
                    settings,
                    name,
                    link,
                    engines=engines,
                    clock=clock,
                    board=(pool_boards or {}).get(name, board),
                    hold=hold,
                )
                for name, link in links.items()
            ]
            for pool in served:
                closing.callback(pool.tokenising.close)
            pools = Pools(served, hold)
            lines = closing.enter_context(_access_lines(access_log_out)) if settings.access_log else None
            gateway = Gateway(
                name=_name(settings),
                bounds=Bounds(
                    body_bytes=settings.body_bytes_max,
                    request_wall_seconds=settings.request_timeout_seconds,
                    hold_wall_seconds=settings.hold_seconds,
                    retries=settings.retries_max,
                    first_byte=FirstByteBounds(settings.first_byte_factor, settings.first_byte_seconds_min),
                ),
                objectives=Objectives(settings.slo_ttft_seconds, settings.slo_tpot_seconds),
                additions=BodyRewrites(stream_usage=settings.stream_usage, client_name=settings.forward_tenant),
                keyring=keyring,
                pools=pools,
                engines=engines,
                clock=clock,
                supervisor=supervisor,
                ids=RequestIds(chance),
                access_log=AccessLog(lines, clock) if lines else None,
            )
            supervisor.start(keyring.follow(), name="api-keys")
            for pool in served:
                _attend(pool, settings, engines=engines, clock=clock, supervisor=supervisor, chance=chance)
            yield ingress_app(gateway=gateway, pools=pools, keyring=keyring, board=board)


def _access_lines(out: Output | None) -> LineWriter:
    """To standard output, if to nowhere else."""
    return LineWriter(out or FileIO(sys.stdout.fileno(), "w", closefd=False))


def pool_names(settings: IngressSettings) -> list[PoolName]:
    """The pools to serve."""
    return [PoolName(name) for name in dict.fromkeys(settings.pools or (settings.pool,))]


def _pool(
    settings: IngressSettings,
    name: PoolName,
    link: Link,
    *,
    engines: EngineClient,
    clock: Clock,
    board: HealthBoard,
    hold: Hold,
) -> Pool:
    """Raises click.ClickException."""
    fleet = FleetView(clock, board)
    under_way = InFlightRequests(fleet=fleet, events=link.log, clock=clock)
    silence = SchedulerLiveness(
        commands=link.commands, pool=name, clock=clock, board=board, silence_max=settings.scheduler_timeout_seconds
    )
    rebinding = Rebinding()
    router = Router(
        commands=link.commands, fleet=fleet, under_way=under_way, silence=silence, pool=name, clock=clock, hold=hold
    )
    tokenising = Tokenizing(
        tokenizer=_tokenizer(_tokenizer_places(settings).get(name, settings.tokenizer)),
        engine=under_way.least_busy,
        failed=under_way.failed,
        engines=engines,
        clock=clock,
    )
    return Pool(
        name=name,
        fleet=fleet,
        silence=silence,
        under_way=under_way,
        router=router,
        rebinding=rebinding,
        heartbeat=Heartbeat(
            commands=link.commands,
            pool=name,
            clock=clock,
            under_way=under_way,
            rebinding=rebinding,
            newest_term=lambda: router.newest_term,
        ),
        tokenising=tokenising,
        keys=Keys(secret=settings.secret.encode(), block_tokens=lambda: fleet.block_tokens),
        events=link.log,
        retry_budget=RetryBudget(settings.retry_budget),
    )


def _attend(
    pool: Pool,
    settings: IngressSettings,
    *,
    engines: EngineClient,
    clock: Clock,
    supervisor: Supervisor,
    chance: Random,
) -> None:
    """Start what goes on beside the requests of a pool."""
    supervisor.start(pool.fleet.follow(pool.events), name=f"fleet-view-{pool.name}")
    supervisor.start(pool.silence.look_out(), name=f"scheduler-watch-{pool.name}")
    supervisor.start(pool.heartbeat.beat(), name=f"heartbeat-{pool.name}")
    if settings.probe:
        prober = Prober(
            fleet=pool.fleet,
            tokenising=pool.tokenising,
            keys=pool.keys,
            engines=engines,
            events=pool.events,
            clock=clock,
            supervisor=supervisor,
            chance=chance,
        )
        supervisor.start(prober.run(), name=f"probe-{pool.name}")


async def accompany(server: HttpServer, supervisor: Supervisor, clock: Clock, listens: Callable[[], None]) -> None:
    """Say where the server listens, and ask it to stop when the process is asked to; at once where a background task fails."""
    while not server.started:
        await clock.sleep_wall(0.01)
    log.info("listening", port=server.bound_port)
    supervisor.start(_say_again_and_again(listens, clock), name="say-listening")
    try:
        await supervisor.until_stopped()
        log.info("shutting_down")
        if supervisor.for_good:
            server.lame_duck_seconds = 0.0
        server.should_exit = True
        await supervisor.until_hurried()
    finally:  # `until_stopped` raises what a background task has failed with
        server.should_exit = True
        server.hurry()


async def _say_again_and_again(listens: Callable[[], None], clock: Clock) -> None:
    while True:
        listens()
        await clock.sleep_wall(LISTENS_WALL_SECONDS)


def _name(settings: IngressSettings) -> str:
    return settings.name or f"ingress-{os.getpid()}"


def _tokenizer_places(settings: IngressSettings) -> dict[str, str]:
    """Where the tokenizers of single pools are. Raises click.BadParameter."""
    places = {}
    for told in settings.pool_tokenizer:
        pool, equals, place = told.partition("=")
        if not equals or pool not in pool_names(settings):
            msg = f"'{told}' is not POOL=DIRECTORY with one of the pools {', '.join(pool_names(settings))}"
            raise click.BadParameter(msg, param_hint="--pool-tokenizer")
        places[pool] = place
    return places


def _tokenizer(place: str) -> Tokenizer | None:
    """Raises click.ClickException."""
    if not place:
        return None
    try:
        return Tokenizer.builtin() if place == BUILTIN_TOKENIZER else Tokenizer.load(Path(place))
    except TokenizerLoadError as error:
        raise click.ClickException(str(error)) from error


def _keyring(settings: IngressSettings, clock: Clock) -> Keyring:
    """Raises click.ClickException."""
    try:
        return Keyring(Path(settings.keys_file) if settings.keys_file else None, clock)
    except KeysFileError as error:
        raise click.ClickException(str(error)) from error
