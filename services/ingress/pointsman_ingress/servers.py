"""The two HTTP servers of an ingress: the API's and the admin port's. In: their applications. Out: both listen until the
process stops; the API's first lets its clients go."""

import resource
import socket
import ssl
from collections.abc import Callable, Mapping

import structlog

from pointsman.ports import Clock
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import SHUTDOWN_PART, AsgiApp, HealthBoard, HttpServer, health_server
from pointsman.runtime.http_protocol import HttpLimits
from pointsman.runtime.open_files import clients_max
from pointsman.runtime.supervision import Supervisor
from pointsman_ingress.http.errors import ApiError, errors_at
from pointsman_ingress.openapi import openapi_document
from pointsman_ingress.settings import IngressSettings

log = structlog.get_logger()

ADMIN_OPTIONS = "--admin-host and --admin-port"
CONNECTIONS_FEW = 500
TLS_WEIGHT = 4
"""Connections without TLS that take as much memory as one with: it keeps 2.4 times the largest read, up to 0.6 MB."""
LISTENING_WALL_SECONDS: WallSeconds = WallSeconds(1.0)  # heartbeat to the parent process


def http_server(
    app: AsgiApp,
    settings: IngressSettings,
    board: HealthBoard,
    *,
    listener: socket.socket | None = None,
    tls: ssl.SSLContext | None = None,
) -> HttpServer:
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = max(1, clients_max(open_files) // (1 if tls is None else TLS_WEIGHT))
    if connections < CONNECTIONS_FEW:
        please = "raise the hard limit of open files (ulimit -Hn)"
        log.warning("few_connections", connections=connections, open_files=open_files, please=please)
    return HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        listener=listener,
        tls=tls,
        limits=HttpLimits(
            connections=connections,
            connections_per_address=settings.connections_per_address or max(1, connections // 2),
        ),
        lame_duck_seconds=settings.lame_duck_seconds,
        shutdown_seconds=settings.drain_seconds_max,
        keep_alive_seconds=settings.keep_alive_seconds,
        on_lame_duck=lambda: board.missing(SHUTDOWN_PART, "shutting down"),
        refusal_body=lambda url, refused: errors_at(url).body(
            ApiError(refused.status, refused.reason, refused.message)
        ),
    )


def tls_context(
    settings: IngressSettings, board: HealthBoard, supervisor: Supervisor, clock: Clock
) -> ssl.SSLContext | None:
    """Of the API's port, with its certificate kept fresh. Raises click.ClickException if the files cannot be used."""
    if not settings.tls_certificate:
        return None
    from pointsman_ingress.http.certificate import ServerCertificate  # takes 0.1 s of a start

    certificate = ServerCertificate(settings.tls_certificate, settings.tls_key)
    supervisor.start(certificate.keep_fresh(clock, board), name="certificate")
    return certificate.context


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
            report_listening()  # at once: only who has reported is killed when it hangs
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
        await clock.sleep_wall(LISTENING_WALL_SECONDS)
        report_listening()
