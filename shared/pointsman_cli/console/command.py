"""`pointsman console`: chooses the log, the credentials and the port, and runs the console until Ctrl-C."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tcp_ports import in_url
from pointsman.analysis.shadow import RECORDED_WINDOWS_MAX, SHADOWS_MAX, Shadow
from pointsman.bounds import PORT
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import valid_operator
from pointsman.runtime.environment_names import warn_of_variables
from pointsman.runtime.health import HealthBoard, HttpServer
from pointsman.runtime.http_protocol import HttpLimits
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.number_types import Whole
from pointsman.runtime.settings import (
    ENVIRONMENT_PREFIX,
    TEXT,
    BlockSettings,
    DeploymentSettings,
    FleetSettings,
    LogSettings,
    config_option,
    environment,
    options,
)
from pointsman.runtime.structured_logs import configure_logging
from pointsman.runtime.supervision import Supervisor, run
from pointsman.runtime.telemetry import show_process
from pointsman.state.state import PoolSettings
from pointsman_cli.command_client import person
from pointsman_cli.console.jobs.jobs import Jobs
from pointsman_cli.console.jobs.shadow_work import shadow_of, simulate
from pointsman_cli.console.log.following import LiveLog
from pointsman_cli.console.log.recorded import RecordedLog
from pointsman_cli.console.log.source import LogSource
from pointsman_cli.console.page_views import PageViews
from pointsman_cli.console.web.actions import Actions
from pointsman_cli.console.web.security import Guard
from pointsman_cli.console.web.site import Site
from pointsman_cli.console.web.viewers import Viewers
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.history.entries import History
from pointsman_cli.history.sources import STANDARD_INPUT, is_live, open_history
from pointsman_cli.history.time_options import Moment, moment_in
from pointsman_cli.options import CONSOLE_PORT, CONTEXT, until_option
from pointsman_cli.terminal import print_line

FILE = click.Path(path_type=Path, dir_okay=False)
F = TypeVar("F", bound=Callable[..., Any])
HTTP_LIMITS = HttpLimits(connections=256, connections_per_address=128)
"""Behind a proxy everybody has one address: it has room for all live pages, and as much for the rest."""
SHUTDOWN_SECONDS = 2.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
STARTED_POLL_SECONDS = 0.02
TOKEN_LENGTH_MIN = 16


def _option(name: str, **attributes: Any) -> Callable[[F], F]:
    """Also read from the environment, as options of services."""
    variable = ENVIRONMENT_PREFIX + name.replace("-", "_").upper()
    return click.option(
        f"--{name}", envvar=variable, show_envvar=True, show_default="default" in attributes, **attributes
    )


@click.command("console", context_settings=CONTEXT)
@click.argument("record", metavar="[FILE]", required=False)
@click.option(
    "--from", "place", metavar="WHERE", help="Fleet or log, as of the other commands. Default: the fleet running here."
)
@until_option
@_option("host", type=TEXT, default="127.0.0.1", help="Address to listen on.")
@_option("port", type=Whole(PORT), default=CONSOLE_PORT, help="Port to listen on; 0 takes a free one.")
@_option("allow-host", metavar="NAME", multiple=True, help="Host name under which browsers reach it. Repeatable.")
@_option(
    "admin-token-file",
    type=FILE,
    metavar="FILE",
    help="Who shows the token in this file may drain, undrain and scale. Without it the console only reads.",
)
@_option(
    "reader-token-file", type=FILE, metavar="FILE", help="Reading needs the token in this file too, or the admin's."
)
@_option(
    "operator-credentials",
    type=FILE,
    metavar="FILE",
    help="NATS user of the operator as whom the console acts. Default: that of the fleet of this machine.",
)
@_option(
    "shadow",
    metavar="POLICY[:KEY=VALUE,...]",
    multiple=True,
    help="Policy that decides every request too, without acting. Keys: its settings, order, admission. Repeatable, up to "
    f"{SHADOWS_MAX}.",
)
@click.pass_context
def console_command(
    context: click.Context,
    /,
    *,
    record: str | None,
    place: str | None,
    until: str | None,
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    admin_token_file: Path | None,
    reader_token_file: Path | None,
    operator_credentials: Path | None,
    shadow: tuple[str, ...],
    log_level: str,
    log_format: str,
    config: Path | None,  # noqa: ARG001 - it has given its defaults
    **fleet: Any,
) -> None:
    """Serve a web page with everything that a log tells: fleet, requests, findings, scaling, tenants, hit rates.

    \b
      pointsman console                       of the fleet running here, on http://127.0.0.1:8090
      pointsman console incident.pmlog        of an exported bundle, for a postmortem
      pointsman console --from nats://10.0.0.5:4222 --port 8091

    It follows the log by itself and asks the scheduler for nothing. Reading needs no password on this machine.
    """
    if record and place:
        raise click.UsageError(f"{record} or --from {place}: choose one log")
    place = record or place
    if place == STANDARD_INPUT:
        raise click.UsageError("the console reads a log more than once: name a file")
    configure_logging(log_level, log_format)
    warn_of_variables()
    guard = Guard(
        time.monotonic,
        hosts=frozenset(allow_host) | {host},
        admin_token=_token(admin_token_file),
        reader_token=_token(reader_token_file),
    )
    if not (guard.reader_token or host in LOOPBACK):
        print_line(f"everybody who reaches {host} may read: see --reader-token-file", error=True)
    serving = partial(_serve, host=host, port=port, guard=guard, shadows=shadow_of(shadow))
    pool = fleet["pool"] if _is_given(context, "pool") else None
    if place is None and _is_given(context, "nats"):
        settings, place = FleetSettings(**fleet), fleet["nats"]
    elif is_live(place):
        settings = fleet_settings(place, pool)
    else:
        jobs = Jobs(place, pool, recorded=True, wall=time.monotonic, until=until)
        with open_history(place, pool) as history:
            configure_logging(log_level, log_format)  # again: reading a file told errors only
            moment = moment_in(history, until)
            run(lambda supervisor: _serve_record(supervisor, history, moment, partial(serving, jobs)))
        return
    if until is not None:
        raise click.UsageError(
            "the log of a running fleet goes on: --until is for a recorded one, such as a bundle or an archive"
        )
    jobs = Jobs(place, pool, recorded=False, wall=time.monotonic, environment=_environment(settings))
    acting = _acting(place, settings, operator_credentials) if guard.admin_token else None
    run(lambda supervisor: _serve_live(supervisor, settings, acting, partial(serving, jobs)))


console_command.params.append(config_option("console"))
for _deployed in (*options(LogSettings), *options(DeploymentSettings), *options(BlockSettings)):
    _deployed.hidden = _deployed.name != "pool"  # those of a service, in a deployment's environment or file
    if _deployed.name == "log_level":
        _deployed.default = "warning"  # beside a person's shell
    console_command.params.append(_deployed)


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _environment(settings: FleetSettings) -> dict[str, str]:
    """For the processes that work things out: they open the same log."""
    return environment({one.name: getattr(settings, one.name) for one in fields(settings) if one.name != "secret"})


Serving = Callable[[Supervisor, LogSource, Actions, HealthBoard], Awaitable[None]]


async def _serve_live(
    supervisor: Supervisor, settings: FleetSettings, acting: FleetSettings | None, serving: Serving
) -> None:
    clock, board = ScaledClock(settings.speed), HealthBoard(pool=settings.pool)
    user = person(settings)
    async with open_link(settings, clock, board, name="console", user=user, serves_without=True) as link:
        source = LiveLog(
            link,
            clock=clock,
            board=board,
            pool=PoolName(settings.pool),
            settings=PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed),
            origin=f"the log of pool '{settings.pool}' at {settings.nats_shown}",
        )
        await serving(supervisor, source, Actions(acting), board)


async def _serve_record(supervisor: Supervisor, history: History, until: Moment, serving: Serving) -> None:
    board = HealthBoard(pool=history.header.pool)
    await serving(supervisor, RecordedLog(history, board=board, until=until), Actions(None), board)


async def _serve(
    jobs: Jobs,
    supervisor: Supervisor,
    source: LogSource,
    actions: Actions,
    board: HealthBoard,
    *,
    host: str,
    port: int,
    guard: Guard,
    shadows: Callable[..., Shadow] | None,
) -> None:
    if shadows is not None and isinstance(source, RecordedLog):
        source.shadow_of = partial(shadows, waiting_max=RECORDED_WINDOWS_MAX)
    else:
        source.shadow_of = shadows
    show_process()
    clock = ScaledClock()
    site = Site(PageViews(source, actions, jobs), guard, board, lambda parts: Viewers(parts, clock))
    server = HttpServer(
        site.app(),
        host=host,
        port=port,
        limits=HTTP_LIMITS,
        on_lame_duck=site.viewers.close,
        shutdown_seconds=SHUTDOWN_SECONDS,
    )
    supervisor.start(server.serve(), name="http")
    supervisor.start(source.run(), name="log")
    supervisor.start(site.viewers.run(), name="viewers")
    if shadows is not None:
        supervisor.start(simulate(lambda: source.shadow, clock), name="shadow")
    supervisor.start(_announce(server, host, source.origin), name="announce")
    try:
        await supervisor.until_stopped()
    finally:
        server.should_exit = True
        site.viewers.close()
        await jobs.close()


async def _announce(server: HttpServer, host: str, origin: str) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(STARTED_POLL_SECONDS)
    print_line(f"console on http://{in_url(host)}:{server.bound_port}, of {origin}")


def _acting(place: str | None, settings: FleetSettings, credentials: Path | None) -> FleetSettings | None:
    """None: it has no credentials of an operator."""
    if credentials is not None:
        return replace(settings, nats_credentials=str(credentials))
    if place is None or "://" not in place:
        return fleet_settings(place, settings.pool, acts=True)
    return settings if valid_operator(settings.actor) else None


def _token(file: Path | None) -> str:
    """Raises click.BadParameter."""
    if file is None:
        return ""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"cannot read {file}: {error}") from error
    if len(token) < TOKEN_LENGTH_MIN:
        raise click.BadParameter(f"{file} holds no token of at least {TOKEN_LENGTH_MIN} characters")
    return token
