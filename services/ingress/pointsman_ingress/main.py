"""Composition root of `pointsman-ingress`: connects to its pools and serves, in one or several processes."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import structlog

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tcp_ports import is_loopback
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import Link
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.memory import freeze_started, map_large_blocks
from pointsman.runtime.open_files import raised_open_files
from pointsman.runtime.processes import Address, serve_in_processes, share_metrics
from pointsman.runtime.public_secret import note_public_secret
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import STOP_SECONDS_MAX, Supervisor, run
from pointsman.runtime.tracer_opening import open_tracer
from pointsman_ingress.assembly import assembled
from pointsman_ingress.placement.pools import PoolsBoard
from pointsman_ingress.servers import ADMIN_OPTIONS, admin_server, http_server, supervise_server, tls_context
from pointsman_ingress.settings import IngressSettings

log = structlog.get_logger()

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
            serve=partial(_serve_in_child, replace(settings, name=settings.process_name)),
        )


def _serve_in_child(
    settings: IngressSettings, number: int, listeners: list[socket.socket], report_listening: Callable[[], None]
) -> None:
    own = replace(settings, name=f"{settings.name}-{number}")
    structlog.contextvars.bind_contextvars(process=own.name)
    run(lambda supervisor: serve(own, supervisor, listeners=listeners, report_listening=report_listening))


def note_open_api(settings: IngressSettings) -> None:
    if settings.trusts_clients and not is_loopback(settings.host):
        log.warning("open_api", note=f"everybody who reaches {settings.host} may use the engines: see --require-keys")


async def serve(
    settings: IngressSettings,
    supervisor: Supervisor,
    *,
    listeners: Sequence[socket.socket | None] = (None, None),
    report_listening: Callable[[], None] = lambda: None,
) -> None:
    """`listeners`: of the API and of the admin port."""
    clock = ScaledClock(settings.speed)
    names = settings.pool_names
    board = PoolsBoard(names)
    tracer = open_tracer("pointsman-ingress", instance=settings.process_name, trusted=settings.trusts_clients)
    note_public_secret(settings.secret, settings.host, board)
    note_open_api(settings)
    tls = tls_context(settings, board, supervisor, clock)
    async with AsyncExitStack() as stack:
        links: dict[PoolName, Link] = {}
        for pool in names:
            own = replace(settings, pool=pool)
            user = BusUser(BusRole.INGRESS)
            link = open_link(own, clock, board.pools[pool], name=settings.process_name, user=user, serves_without=True)
            links[pool] = await stack.enter_async_context(link)
        async with assembled(
            settings, links, clock=clock, board=board, supervisor=supervisor, pool_boards=board.pools, tracer=tracer
        ) as apps:
            freeze_started()
            public, private = listeners
            server = http_server(apps.api, settings, board, listener=public, tls=tls)
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
