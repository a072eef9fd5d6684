"""Composition root of `pointsman-ingress`: wires its parts and runs them in one or several processes."""

import asyncio
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
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
from pointsman.contracts.cache_salts import PROBE_GROUP, CacheSalts
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import Clock, KeyValueStore, Link
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.health import SHUTDOWN_PART, AsgiApp, HealthBoard, HttpServer, health_server
from pointsman.runtime.http_protocol import HttpLimits
from pointsman.runtime.line_writer import LineWriter, Output
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.memory import freeze_started, map_large_blocks
from pointsman.runtime.open_files import clients_max, raised_open_files
from pointsman.runtime.processes import Address, serve_in_processes, share_metrics
from pointsman.runtime.public_secret import note_public_secret
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import STOP_SECONDS_MAX, Supervisor, run
from pointsman.runtime.tenant_policies import FollowedPolicies
from pointsman.runtime.tracing import Tracer, open_tracer
from pointsman_ingress.access_log import AccessLog
from pointsman_ingress.app import IngressApps, ingress_app
from pointsman_ingress.endpoints import BodyRules
from pointsman_ingress.engine.client import EngineClient, open_session
from pointsman_ingress.engine.session import DirectSession
from pointsman_ingress.http.api_keys import ApiKeys
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.call import BodyBudget, RequestIds
from pointsman_ingress.http.issuer_keys import IssuerKeys, is_trustworthy
from pointsman_ingress.http.oidc import TokenVerifier
from pointsman_ingress.key_probe import KeyProber
from pointsman_ingress.metrics import forget_departed
from pointsman_ingress.openapi import openapi_document
from pointsman_ingress.overlap import PATH as OVERLAP_PATH
from pointsman_ingress.overlap import OverlapEndpoint
from pointsman_ingress.placement.fleet_view import FleetView
from pointsman_ingress.placement.hold_queue import HoldQueue
from pointsman_ingress.placement.in_flight import InFlightRequests, send_heartbeats
from pointsman_ingress.placement.pools import Pool, Pools, PoolsBoard
from pointsman_ingress.placement.retry_budget import RetryBudget
from pointsman_ingress.placement.scheduler_client import SchedulerClient, SchedulerLiveness
from pointsman_ingress.prompt.block_keys import BlockKeys
from pointsman_ingress.prompt.body_fields import FieldRules
from pointsman_ingress.prompt.remote_media import MediaRules
from pointsman_ingress.prompt.tokenization import PromptTokenizer
from pointsman_ingress.service import Gateway
from pointsman_ingress.settings import IngressSettings
from pointsman_ingress.work_threads import WorkThreads

log = structlog.get_logger()

BUILTIN_TOKENIZER = "builtin"
ADMIN_OPTIONS = "--admin-host and --admin-port"
LISTENING_WALL_SECONDS: WallSeconds = WallSeconds(1.0)  # heartbeat to the parent process
FLUSH_WALL_SECONDS: WallSeconds = WallSeconds(1.0)


@command(IngressSettings, name="pointsman-ingress", table="ingress")
def main(settings: IngressSettings) -> None:
    """HTTP front end, compatible with OpenAI's API and Anthropic's Messages: asks the scheduler where a request goes,
    forwards it to that engine and streams the answer back.

    \b
    Example:
      pointsman-ingress --nats nats://127.0.0.1:4222 --port 8080 --tokenizer /models/qwen2.5-7b
    """
    if settings.processes > 1:
        share_metrics()
    start_logs(settings)
    raised_open_files()
    map_large_blocks()
    if settings.processes == 1:
        run(lambda supervisor: serve(settings, supervisor))
    else:
        serve_in_processes(
            settings.processes,
            addresses=[
                Address(settings.host, settings.port),
                Address(settings.admin_host, settings.admin_port, ADMIN_OPTIONS),
            ],
            serve=partial(_serve_in_child, replace(settings, name=_name(settings))),
        )


def _serve_in_child(
    settings: IngressSettings, number: int, listeners: list[socket.socket], report_listening: Callable[[], None]
) -> None:
    own = replace(settings, name=f"{settings.name}-{number}")
    structlog.contextvars.bind_contextvars(process=own.name)
    run(lambda supervisor: serve(own, supervisor, listeners=listeners, report_listening=report_listening))


async def serve(
    settings: IngressSettings,
    supervisor: Supervisor,
    *,
    listeners: Sequence[socket.socket | None] = (None, None),
    report_listening: Callable[[], None] = lambda: None,
) -> None:
    """`listeners`: of the API and of the admin port."""
    clock = ScaledClock(settings.speed)
    names = pool_names(settings)
    board = PoolsBoard(names)
    tracer = open_tracer("pointsman-ingress", instance=_name(settings), trusted=settings.trusts_clients)
    note_public_secret(settings.secret, settings.host, board)
    async with AsyncExitStack() as stack:
        links: dict[PoolName, Link] = {}
        for pool in names:
            own = replace(settings, pool=pool)
            user = BusUser(BusRole.INGRESS)
            link = open_link(own, clock, board.pools[pool], name=_name(settings), user=user, serves_without=True)
            links[pool] = await stack.enter_async_context(link)
        async with assembled(
            settings, links, clock=clock, board=board, supervisor=supervisor, pool_boards=board.pools, tracer=tracer
        ) as apps:
            freeze_started()
            public, private = listeners
            server = http_server(apps.api, settings, board, listener=public)
            admin = admin_server(settings, board, apps.admin, listener=private)
            supervisor.start(admin.serve(), name="admin-http")
            supervisor.stop_seconds_max = STOP_SECONDS_MAX + settings.lame_duck_seconds + settings.drain_seconds_max
            supervisor.start(
                supervise_server(server, admin, supervisor, clock, report_listening), name="accompany-http"
            )
            await server.serve()
        flushed = await asyncio.gather(*(link.log.flush(FLUSH_WALL_SECONDS) for link in links.values()))
        if not all(flushed):
            log.warning("events_unconfirmed", seconds=FLUSH_WALL_SECONDS)
        if tracer is not None:
            await tracer.close()
        await supervisor.until_stopped()


def http_server(
    app: AsgiApp, settings: IngressSettings, board: HealthBoard, *, listener: socket.socket | None = None
) -> HttpServer:
    connections = clients_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        listener=listener,
        limits=HttpLimits(
            connections=connections,
            connections_per_address=settings.connections_per_address or max(1, connections // 2),
        ),
        lame_duck_seconds=settings.lame_duck_seconds,
        shutdown_seconds=settings.drain_seconds_max,
        keep_alive_seconds=settings.keep_alive_seconds,
        on_lame_duck=lambda: board.missing(SHUTDOWN_PART, "shutting down"),
    )


def admin_server(
    settings: IngressSettings,
    board: HealthBoard,
    apps: Mapping[str, AsgiApp],
    *,
    listener: socket.socket | None = None,
) -> HttpServer:
    """A server of its own: neither a flood of clients nor the shutdown of the API's takes it away."""
    description = openapi_document()
    return health_server(
        board,
        settings.admin_host,
        settings.admin_port,
        listener=listener,
        options=ADMIN_OPTIONS,
        documents={"/openapi.json": lambda: description},
        apps=apps,
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
    executor: Executor | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[IngressApps]:
    """`links`: one per pool. `engine_session`: replaces HTTP to engines. `chance`: source of ids and probes.
    `executor`: replaces the threads for large bodies. Raises click.ClickException if a tokenizer is unreadable or a
    setting of credentials makes no sense."""
    access = next(iter(links.values())).access
    authentication = _authentication(settings, access, clock=clock, board=board, supervisor=supervisor)
    chance = chance or SystemRandom()
    policies = FollowedPolicies(access)  # one store for all pools
    trusted = settings.trusts_clients
    salts = None
    if not trusted:
        salts = CacheSalts(settings.secret.encode(), lambda tenant: policies.of(tenant).cache_group)
    hold = HoldQueue(settings.hold_seconds, clock)
    async with engine_session or open_session(traced=tracer is not None) as session:
        urls = EngineUrls.of(settings.engine_urls)
        engines = EngineClient(
            session,
            urls,
            api_key=settings.engine_api_key,
            forward_authorization=trusted,
            chunk_timeout_seconds=settings.chunk_timeout_seconds,
            direct=DirectSession(session) if engine_session is None and tracer is None else None,
        )
        with ExitStack() as stack:
            served = []
            work = WorkThreads(executor=executor)
            stack.callback(work.close)
            for name, link in links.items():
                pool_board = (pool_boards or {}).get(name, board)
                pool = _pool(
                    settings,
                    name,
                    link,
                    engines,
                    urls,
                    clock=clock,
                    board=pool_board,
                    hold=hold,
                    supervisor=supervisor,
                    work=work,
                )
                if settings.probe:
                    prober = KeyProber(
                        pool,
                        engines=engines,
                        clock=clock,
                        supervisor=supervisor,
                        chance=chance,
                        salt=salts.salt(PROBE_GROUP, "") if salts else "",
                    )
                    supervisor.start(prober.run(), name=f"probe-{name}")
                served.append(pool)
            pools = Pools(served, hold)
            access_log = None
            if settings.access_log:
                out = access_log_out or FileIO(sys.stdout.fileno(), "w", closefd=False)
                access_log = AccessLog(stack.enter_context(LineWriter(out)), clock)
            bodies = BodyBudget.of_process(settings.processes, settings.body_bytes_max)
            gateway = Gateway(
                replace(settings, name=_name(settings)),
                authentication=authentication,
                pools=pools,
                engines=engines,
                clock=clock,
                supervisor=supervisor,
                ids=RequestIds(chance),
                access_log=access_log,
                rules=BodyRules(
                    FieldRules(trusted=trusted, allowed=settings.allow_field),
                    MediaRules(
                        trusted=trusted,
                        hosts=settings.media_hosts,
                        allowed=settings.allow_field,
                    ),
                ),
                salts=salts,
                policies=policies,
                work=work,
                tracer=tracer,
                bodies=bodies,
            )
            supervisor.start(policies.follow(), name="tenant-policies")
            overlap = OverlapEndpoint(
                authentication=authentication,
                pools=pools,
                commands={name: link.commands for name, link in links.items()},
                salts=salts,
                work=work,
                clock=clock,
                ids=RequestIds(chance),
                bodies=bodies,
            )
            api = ingress_app(gateway=gateway, pools=pools, authentication=authentication)
            yield IngressApps(api, {OVERLAP_PATH: overlap.serve})


def _authentication(
    settings: IngressSettings, access: KeyValueStore, *, clock: Clock, board: HealthBoard, supervisor: Supervisor
) -> Authentication:
    """Starts what follows keys and issuer. Raises click.ClickException."""
    keys = tokens = None
    if settings.require_keys:
        keys = ApiKeys(settings.secret, clock, board)
        supervisor.start(keys.follow(access), name="api-keys")
    if settings.oidc_issuer:
        if not settings.oidc_audience:
            needed = "--oidc-issuer needs --oidc-audience: tokens for other services must not be accepted here"
            raise click.UsageError(needed)
        for url in filter(None, (settings.oidc_issuer, settings.oidc_jwks_url)):
            if not is_trustworthy(url):
                untrusted = f"{url} must be an https URL: whoever answers there decides who is admitted"
                raise click.UsageError(untrusted)
        issuer_keys = IssuerKeys(
            settings.oidc_issuer, settings.oidc_jwks_url, clock, board, serves_without=settings.require_keys
        )
        tokens = TokenVerifier(
            issuer_keys,
            clock,
            issuer=settings.oidc_issuer,
            audience=settings.oidc_audience,
            tenant_claim=settings.oidc_tenant_claim,
        )
        supervisor.start(issuer_keys.follow(), name="oidc-keys")
    return Authentication(keys, tokens)


def _pool(
    settings: IngressSettings,
    name: PoolName,
    link: Link,
    engines: EngineClient,
    urls: EngineUrls,
    *,
    clock: Clock,
    board: HealthBoard,
    hold: HoldQueue,
    supervisor: Supervisor,
    work: WorkThreads,
) -> Pool:
    """Starts the pool's background tasks. Raises click.ClickException."""
    fleet = FleetView(clock, board, urls)
    in_flight = InFlightRequests(fleet=fleet, events=link.log, clock=clock)
    liveness = SchedulerLiveness(
        commands=link.commands,
        pool=name,
        clock=clock,
        board=board,
        timeout_seconds=settings.scheduler_timeout_seconds,
    )
    scheduler = SchedulerClient(
        commands=link.commands,
        fleet=fleet,
        in_flight=in_flight,
        liveness=liveness,
        pool=name,
        clock=clock,
        hold=hold,
    )
    pool = Pool(
        name=name,
        fleet=fleet,
        in_flight=in_flight,
        scheduler=scheduler,
        tokenizer=PromptTokenizer(
            tokenizer=_tokenizer(_pool_tokenizers(settings).get(name, settings.tokenizer)),
            engine=in_flight.least_busy,
            engines=engines,
            clock=clock,
            failed=in_flight.failed,
            work=work,
        ),
        block_keys=BlockKeys(secret=settings.secret.encode(), block_tokens=lambda: fleet.block_tokens),
        events=link.log,
        retry_budget=RetryBudget(settings.retry_budget, name),
    )
    supervisor.start(fleet.follow(link.log), name=f"fleet-view-{name}")
    supervisor.start(liveness.watch(), name=f"scheduler-watch-{name}")
    others = (in_flight.forget_departed, pool.tokenizer.forget_departed)
    supervisor.start(forget_departed(fleet, name, clock, others), name=f"metrics-{name}")
    heartbeats = send_heartbeats(in_flight, link.commands, name, clock, lambda: scheduler.newest_term)
    supervisor.start(heartbeats, name=f"heartbeat-{name}")
    return pool


async def supervise_server(
    server: HttpServer,
    admin: HttpServer,
    supervisor: Supervisor,
    clock: Clock,
    report_listening: Callable[[], None],
) -> None:
    try:
        while not (supervisor.stopping or (server.started and admin.started)):
            await clock.sleep_wall(WallSeconds(0.01))
        if not supervisor.stopping:
            log.info("listening", port=server.bound_port, admin_port=admin.bound_port)
            supervisor.start(_repeat(report_listening, clock), name="report-listening")
        await supervisor.until_stopped()
        log.info("shutting_down")
        if supervisor.for_good:
            server.lame_duck_seconds = 0.0
        server.should_exit = True
        await supervisor.until_hurried()
    finally:  # `until_stopped` raises background failures
        server.should_exit = True
        server.hurry()


async def _repeat(report_listening: Callable[[], None], clock: Clock) -> None:
    while True:
        report_listening()
        await clock.sleep_wall(LISTENING_WALL_SECONDS)


def pool_names(settings: IngressSettings) -> list[PoolName]:
    return [PoolName(name) for name in dict.fromkeys(settings.pools or (settings.pool,))]


def _name(settings: IngressSettings) -> str:
    return settings.name or f"ingress-{os.getpid()}"


def _pool_tokenizers(settings: IngressSettings) -> dict[str, str]:
    directories = {}
    for given in settings.pool_tokenizer:
        pool, equals, directory = given.partition("=")
        if not equals or pool not in pool_names(settings):
            msg = f"'{given}' is not POOL=DIRECTORY with one of the pools {', '.join(pool_names(settings))}"
            raise click.BadParameter(msg, param_hint="--pool-tokenizer")
        directories[pool] = directory
    return directories


def _tokenizer(directory: str) -> Tokenizer | None:
    """Raises click.ClickException."""
    if not directory:
        return None
    try:
        return Tokenizer.builtin() if directory == BUILTIN_TOKENIZER else Tokenizer.load(Path(directory))
    except TokenizerLoadError as error:
        raise click.ClickException(str(error)) from error
