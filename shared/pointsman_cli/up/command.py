"""The command `pointsman up`: checks settings and machine, makes the plan, and runs the session."""

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from pointsman.adapters.owner_only import create_owner_only, is_open_to_others, write_whole
from pointsman.adapters.tcp_ports import LOOPBACK, free_ports, why_taken
from pointsman.contracts.commands import DescribeFleet, FleetDescribed
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import LOCAL_ACTOR, command_subject
from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.ports import (
    CommandRefusedError,
    Commands,
    CommandTimeoutError,
    CommandUnsendableError,
    ForbiddenError,
    LogUnavailableError,
    NoResponderError,
)
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.environment_names import unknown_variables
from pointsman.runtime.settings import PUBLIC_SECRET, SECRET, FleetSettings, command, nats_shown
from pointsman.runtime.settings_file import SETTINGS, read_settings_file
from pointsman_cli.discovery import data_dir_held
from pointsman_cli.event_loop import run_command
from pointsman_cli.options import CONSOLE_PORT
from pointsman_cli.terminal import SeveralLinesError, output_console, say
from pointsman_cli.up.addresses import EngineAddress, refuse
from pointsman_cli.up.plan import SIMULATED_MODEL, FleetPlan, engine_name, ports_needed
from pointsman_cli.up.probe import ENGINE_ANSWER_SECONDS, accepts_connections, model_of
from pointsman_cli.up.process_checks import check_processes
from pointsman_cli.up.processes import processes
from pointsman_cli.up.session import FleetSession, written_to
from pointsman_cli.up.settings import CPU_ENGINES, SIMULATED_ENGINES, UpSettings, checked, further_pools
from pointsman_cli.vllm_cpu import machine, recipe
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome, default_directory

SECRET_FILE = "secret"
CREDENTIALS = "credentials"
ROOM_BYTES_MIN = 16 << 20
SECRET_BYTES = 32


@command(UpSettings, name="up", table="up")
def up_command(settings: UpSettings) -> None:
    """Start a fleet on this machine, each part a process of its own, and run it until Ctrl-C.

    \b
    Simulated engines:
      pointsman up                                   4 engines behind http://127.0.0.1:8080/v1
      pointsman up --instances 4..8 --speed 20       autoscaled, 20 times faster than real time
      pointsman up --split 2+2                       2 prefill engines, 2 decode engines
      pointsman up --ingresses 2 --schedulers 2      replicas, on ports 8080 and 8081
      pointsman up --instances 2 --also coder=2 --lora poet              two models, the first with an adapter
      pointsman up --policy round_robin --port 8081 --data /tmp/rr       a second fleet
      pointsman up --set scheduler.admission=none --set ingress.processes=2

    \b
    Real engines (docs/engines.md):
      pointsman up --engine vllm --instances 2       vLLM's CPU build with a small model, built on first use
      pointsman up --engine 'http://gpu:8000#kv=5557&replay=5558'        an engine that already runs
      pointsman up --instances 2 --also 'big=http://npu:8000#kv=5557&block_tokens=128'
      pointsman up --instances 2 --engine-command
        'env CUDA_VISIBLE_DEVICES={index} vllm serve MODEL --port {port} --kv-events-config {kv_events}'

    Services also read POINTSMAN_* variables and their table ([scheduler], [worker], ...) in the --config file.
    """
    config: Path | None = click.get_current_context().params["config"]
    create_owner_only()
    console = output_console()
    if settings.kind is CPU_ENGINES:
        checked(settings)
        _make_engine(EngineHome(default_directory().resolve()), _engines_max(settings), console)
    sys.exit(run_command(run_fleet(settings, Path(settings.data).resolve(), config and config.resolve(), console)))


async def run_fleet(settings: UpSettings, data: Path, config: Path | None, console: Console) -> int:
    """Run until a signal; returns the exit code. Raises click.ClickException."""
    engines = checked(settings)
    further = further_pools(settings)
    with data_dir_held(data), _runtime_directory() as runtime:
        if is_open_to_others(data):
            say(console, f"others may list {data}: give the fleet a directory of its own with --data DIR", "yellow")
        _check_ports(settings)
        _check_room(data)
        fixed = _ingress_ports(settings)
        found = free_ports(ports_needed(settings, len(engines), further) + 1 + settings.ingresses)
        nats_port, *ports = [port for port in found if port not in fixed]
        ingress_ports = fixed or ports[-settings.ingresses :]
        console_port = _console_port(settings)
        settings = replace(settings, port=ingress_ports[0])
        plan = FleetPlan(
            settings=settings,
            data=data,
            nats=settings.nats or f"nats://{LOOPBACK}:{nats_port}",
            nats_port=nats_port,
            model=await _model(settings, engines),
            secret=_secret(settings, data / SECRET_FILE),
            secret_file=data / SECRET_FILE,
            config_policy=_policy_in(config),
            config=config,
            runtime=runtime,
            ports=tuple(ports),
            ingress_ports=tuple(ingress_ports),
            console_port=console_port,
            engines=tuple(engines),
            home=EngineHome(default_directory().resolve()) if settings.kind is CPU_ENGINES else None,
            engine_threads=max(1, (os.cpu_count() or 1) // _engines_max(settings)),
            further=tuple(further),
        )
        _say_ignored(console, check_processes(plan, processes(plan)))
        await _check_models(plan)
        await _check_nats(settings)
        if plan.console_port:
            _make_token(plan.console_token)
        plan = replace(plan, credentials=_credentials(plan))
        await check_pools(plan)
        return await FleetSession(plan, console).run()


@contextlib.contextmanager
def _runtime_directory() -> Iterator[Path]:
    directory = tempfile.mkdtemp(prefix="pointsman-")
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _say_ignored(console: Console, decided: list[str]) -> None:
    """`decided`: variables whose settings `up` decides."""
    if decided:
        say(console, f"not followed, pointsman up decides them itself: {', '.join(decided)}", "yellow")
    if unknown := unknown_variables(os.environ):
        say(console, f"no process has a setting: {', '.join(unknown)}", "yellow")


def _check_ports(settings: UpSettings) -> None:
    if reason := why_taken(0, settings.host):
        raise click.ClickException(f"cannot listen on {settings.host} here ({reason}); see --host")
    for port in _ingress_ports(settings):
        if reason := why_taken(port, settings.host):
            raise click.ClickException(
                f"port {port} on {settings.host} cannot be had: {reason}; choose another one with --port"
            )


def _ingress_ports(settings: UpSettings) -> list[int]:
    return list(range(settings.port, settings.port + settings.ingresses)) if settings.port else []


def _console_port(settings: UpSettings) -> int:
    """0 without a console. Raises click.ClickException if the wanted port is taken."""
    wanted = settings.console_port
    if not settings.console:
        return 0
    if wanted and (reason := why_taken(wanted, LOOPBACK)):
        raise click.ClickException(
            f"port {wanted} cannot be had for the console: {reason}; choose another one with --console-port"
        )
    usual = CONSOLE_PORT if wanted is None and settings.port else 0
    return wanted or (usual if usual and not why_taken(usual, LOOPBACK) else free_ports(1)[0])


def _check_room(data: Path) -> None:
    free = shutil.disk_usage(data).free
    if free < ROOM_BYTES_MIN:
        message = f"{free >> 10:,} KiB are free where {data} lies, of {ROOM_BYTES_MIN >> 10:,} that a fleet needs at least; make "
        message += "room there, or name another directory with --data DIR"
        raise click.ClickException(message)


async def _check_nats(settings: UpSettings) -> None:
    if settings.nats and not any(
        [await accepts_connections(url, timeout=ENGINE_ANSWER_SECONDS) for url in settings.nats.split(",")]
    ):
        raise click.ClickException(
            f"no nats-server answers at {nats_shown(settings.nats)}; start it, or leave --nats away to have one started"
        )


async def check_pools(plan: FleetPlan) -> None:
    """Two fleets in one pool would take each other's names. Raises click.ClickException."""
    if not plan.settings.nats:
        return
    from pointsman_cli.command_client import connected_link  # large

    for of_pool in plan.pools:
        pool, tls = of_pool.settings.pool, plan.settings.tls_files
        settings = FleetSettings(
            nats=plan.nats,
            nats_credentials=str(plan.credentials.file(BusUser(BusRole.READER))) if plan.credentials else "",
            nats_ca=tls["nats_ca"],
            nats_certificate=tls["nats_certificate"],
            nats_key=tls["nats_key"],
            pool=pool,
        )
        async with connected_link(settings, name="up", advice="see --nats-credentials and --nats-ca") as link:
            if found := await _leader_of(link.commands, PoolName(pool)):
                message = f"the pool '{pool}' on {settings.nats_shown} is in use: {found}. Give this fleet its own with --pool, "
                message += "or stop that scheduler if an earlier run left it over"
                raise click.ClickException(message)


async def _leader_of(commands: Commands, pool: PoolName) -> str:
    """Empty if there is none. Raises click.ClickException."""
    try:
        answer = await commands.request(
            command_subject(pool, "fleet"), DescribeFleet(), timeout=WallSeconds(ENGINE_ANSWER_SECONDS)
        )
    except (ForbiddenError, CommandUnsendableError, LogUnavailableError) as error:
        raise click.ClickException(f"whether the pool '{pool}' is in use is not known: {error}") from error
    except (CommandRefusedError, CommandTimeoutError) as error:
        return f"its scheduler says: {error}"
    except NoResponderError:
        return ""
    return f"{answer.scheduler} leads it" if isinstance(answer, FleetDescribed) else "it has a scheduler"


async def _model(settings: UpSettings, engines: list[EngineAddress]) -> str:
    """The model by --model or the engines, which must all answer; empty if a command starts them."""
    keys = settings.engine_keys
    served = [await model_of(engine.url, keys.of(engine_name(number))) for number, engine in enumerate(engines, 1)]
    if settings.model or not served:
        unasked = {SIMULATED_ENGINES: SIMULATED_MODEL, CPU_ENGINES: SERVED_MODEL}
        return settings.model or unasked.get(settings.kind, "")
    if len(set(served)) > 1:
        raise click.ClickException(
            f"the engines serve different models ({', '.join(sorted(set(served)))}); a pool has one: see --model"
        )
    return served[0]


async def _check_models(plan: FleetPlan) -> None:
    keys = plan.settings.engine_keys
    for pool in plan.pools[1:]:
        for name, engine in zip(pool.engine_names(), pool.engines, strict=False):  # none of simulated ones
            if (served := await model_of(engine.url, keys.of(name))) != pool.model:
                raise click.ClickException(f"the engine {engine.url} serves {served}, not {pool.model}: see --also")


def _engines_max(settings: UpSettings) -> int:
    return settings.bounds[1] if settings.scaled else settings.engines


def _make_engine(home: EngineHome, engines: int, console: Console) -> None:
    try:
        machine.check_can_run(engines)
        recipe.make(home, report=lambda line: console.print(Text(line, style="dim"), soft_wrap=True))
    except (machine.UnsuitableMachineError, recipe.MakingError) as error:
        raise SeveralLinesError(str(error)) from error


def _secret(settings: UpSettings, file: Path) -> str:
    """As given, or created once per data directory, readable by its owner only. Raises click.BadParameter for the
    public one, and click.ClickException for a file that holds none: with another, no API key is valid any more."""
    if settings.secret == PUBLIC_SECRET:
        refuse("--secret", "is the default of services, which everybody knows; leave it away to have one made")
    if settings.secret is None and file.exists():
        try:
            return SECRET.convert(file.read_text(), None, None)
        except (click.BadParameter, OSError, UnicodeDecodeError) as error:
            reason = error.message if isinstance(error, click.BadParameter) else error
            raise click.ClickException(f"{file} holds no secret ({reason}); restore it from the backup") from error
    secret = settings.secret or secrets.token_urlsafe(SECRET_BYTES)
    with written_to(file.parent):
        write_whole(file, f"{secret}\n".encode(), synced=True)
    return secret


def _make_token(file: Path) -> None:
    """Stays as it is once made."""
    with written_to(file.parent):
        if not file.exists():
            write_whole(file, f"{secrets.token_urlsafe(SECRET_BYTES)}\n".encode())


def _credentials(plan: FleetPlan) -> Credentials | None:
    """Users of our own nats-server, or those that were given for another. None: it has no users. Raises
    click.ClickException."""
    if plan.settings.nats is None:
        credentials = Credentials(plan.data / CREDENTIALS)
        pools = [PoolName(of_pool.settings.pool) for of_pool in plan.pools]
        try:
            with written_to(plan.data):
                credentials.make(pools, workers=plan.workers(), operators=[LOCAL_ACTOR])
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        return credentials
    if not plan.settings.nats_credentials:
        return None
    credentials = Credentials(Path(plan.settings.nats_credentials).resolve())
    known = set(credentials.users())
    if missing := [user for user in plan.workers() if user not in known]:
        options = " ".join(f"--worker {user.pool}/{user.name}" for user in missing)
        raise click.ClickException(
            f"{credentials.directory} lacks workers; run: pointsman credentials {options}, and reload nats-server"
        )
    return credentials


def _policy_in(config: Path | None) -> str:
    found = read_settings_file(config, "scheduler", SETTINGS).merged if config else {}
    return str(found.get("policy", DEFAULT_ROUTING))
