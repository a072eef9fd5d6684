"""The command `pointsman up`: checks what was asked for, starts the fleet, shows it, and stops it on Ctrl-C."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pointsman.adapters.providers.process import kill_all, stop_all
from pointsman.adapters.tcp_ports import LOOPBACK, free_ports, why_taken
from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.primitives import InstanceId
from pointsman.runtime.settings import command
from pointsman_cli.discovery import FleetFile, FleetProcess, announce, data_dir_held
from pointsman_cli.up.child import START_ERRORS, NatsProcess, ServiceProcess
from pointsman_cli.up.display import StartDisplay, print_fleet
from pointsman_cli.up.plan import SIMULATED_MODEL, FleetPlan, ports_needed, processes
from pointsman_cli.up.probe import NoAnswerError, accepts_connections, http_get
from pointsman_cli.up.runner import Condition, FleetRunner, FleetStartError
from pointsman_cli.up.settings import (
    CPU_ENGINES,
    SIMULATED_ENGINES,
    EngineAddress,
    FurtherPool,
    UpSettings,
    checked,
    further_pools,
    scale_bounds,
)
from pointsman_cli.vllm_cpu import machine, recipe
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome, default_directory

ENGINE_ANSWER_SECONDS = 5.0
REFRESH_SECONDS = 0.1
STILL_STARTING_SECONDS = 20.0
"""How often a start that takes long is told of where there is no live display."""
SECRET_FILE = "secret"
ROOM_BYTES_MIN = 16 << 20
"""With less room for log, archive and log files no fleet is started: nothing of it would work for long."""
SECRET_BYTES = 32


@command(UpSettings, name="up", table="up")
def up_command(settings: UpSettings) -> None:
    """Start a whole fleet on this machine, each part a process of its own, and run it until Ctrl-C.

    \b
    Without anything else it simulates the engines, so nothing but Python is needed:
      pointsman up                                   4 simulated engines behind http://127.0.0.1:8080/v1
      pointsman up --engines 8 --speed 20            8 of them, 20 times faster than real time
      pointsman up --ingresses 2 --schedulers 2      two of each; put a load balancer before ports 8080 and 8081
      pointsman up --scale 4..8 --speed 20           from 4 to 8 of them, as many as the load needs
      pointsman up --engines 2 --also coder=2 --lora poet                two models, a pool each; the first has an adapter
      pointsman up --prefill 2 --decode 2            prompts at two of them, answers from two others
      pointsman up --policy round_robin --port 8081 --data /tmp/rr       a second fleet, to compare with

    \b
    With real engines (docs/engines.md):
      pointsman up --engine vllm --engines 2         vLLM's CPU build and a small real model, made on the first use
      pointsman up --engine 'http://gpu:8000#kv=5557&replay=5558'        in front of an engine that runs
      pointsman up --engines 2 --also 'big=http://npu:8000#kv=5557' --also-block-tokens big=128      beside simulated ones
      pointsman up --engines 2 --engine-command
        'env CUDA_VISIBLE_DEVICES={index} vllm serve MODEL --port {port} --kv-events-config {kv_events}'

    Settings of single services come from their tables in the file that --config names ([scheduler], [worker], ...)
    or from their own POINTSMAN_* variables, which are handed through.
    """
    config: Path | None = click.get_current_context().params["config"]
    console = Console(highlight=False)
    if settings.kind is CPU_ENGINES:
        checked(settings)
        _, highest = scale_bounds(settings) or (0, settings.engines)
        _make_engine(_home(settings), highest, console)
    sys.exit(asyncio.run(run_fleet(settings, Path(settings.data).resolve(), config and config.resolve(), console)))


async def run_fleet(settings: UpSettings, data: Path, config: Path | None, console: Console) -> int:
    """Run a fleet in the directory `data` until a signal; returns the exit code. Raises click.ClickException for what cannot be started."""
    engines = checked(settings)
    further = further_pools(settings)
    scale = scale_bounds(settings)
    if scale is not None:
        settings = replace(settings, engines=0)
    if settings.split:
        settings = replace(settings, engines=settings.prefill + settings.decode)
    with data_dir_held(data), _runtime_directory() as runtime:
        _check_ports(settings)
        _check_room(data)
        asked = _ingress_ports(settings)
        found = free_ports(ports_needed(settings, len(engines), further) + 1 + settings.ingresses)
        nats_port, *ports = [port for port in found if port not in asked]
        ingress_ports = asked or ports[-settings.ingresses :]
        settings = replace(settings, port=ingress_ports[0])
        plan = FleetPlan(
            settings=settings,
            data=data,
            nats=settings.nats or f"nats://{LOOPBACK}:{nats_port}",
            nats_port=nats_port,
            model=await _model(settings, engines),
            secret=_secret(settings, data / SECRET_FILE),
            config=config,
            runtime=runtime,
            ports=tuple(ports),
            ingress_ports=tuple(ingress_ports),
            engines=tuple(engines),
            scale=scale,
            home=_home(settings) if settings.kind is CPU_ENGINES else None,
            engine_threads=max(1, (os.cpu_count() or 1) // max(1, scale[1] if scale else settings.engines)),
            further=tuple(further),
        )
        await _check_models(further)
        await _check_nats(settings)
        return await _Session(plan, console).run()


class _Session:
    """One run of the fleet, from its first process to its last."""

    def __init__(self, plan: FleetPlan, console: Console) -> None:
        logs = plan.data / "logs"
        with _written_to(plan.data):
            logs.mkdir(exist_ok=True)
        self._plan = plan
        self._console = console
        self._started_at = time.time()
        self._stop = asyncio.Event()
        nats = [] if plan.settings.nats else [_own_nats(plan)]
        services = [ServiceProcess(process, logs) for process in processes(plan)]
        self._runner = FleetRunner(
            [*nats, *services], tell=self._tell, changed=self._announce, stop_others=self._stop_instances
        )
        self._running = False
        self._killing: asyncio.Future[None] | None = None
        """Set from the second Ctrl-C on."""
        self._model = plan.model

    async def run(self) -> int:
        """Start, keep and stop; 1 when the fleet could not be started."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        try:
            if await self._unless_stopped(self._start()):
                await self._unless_stopped(self._keep())
        except (FleetStartError, *START_ERRORS) as error:
            self._tell(f"the fleet could not be started: {error}", "red")
            if isinstance(error, FleetStartError):
                for line in error.tail:
                    self._tell(f"  | {line}", "dim")
            return 1
        else:
            return 0
        finally:
            self._running = False
            await self._runner.stop()
            if self._killing is not None:
                await self._killing
            self._tell("stopped", "")

    async def _start(self) -> None:
        with self._start_display() as live:
            ticking = asyncio.ensure_future(self._tick(live))
            try:
                await self._runner.start(seconds_max=self._plan.start_seconds_max)
            finally:
                ticking.cancel()
        self._model = self._model or await self._served_by_ours()
        self._running = True
        self._announce()
        print_fleet(self._console, self._fleet_file(), time.time() - self._started_at)

    async def _keep(self) -> None:
        telling = asyncio.ensure_future(self._tell_what_is_known())
        try:
            await self._runner.keep(restart=self._plan.settings.restart)
            await self._stop.wait()
        finally:
            telling.cancel()

    async def _tell_what_is_known(self) -> None:
        """Of simulated engines all is known; the module that asks about others costs time to import."""
        fleet = self._fleet_file()
        urls = {process.name: process.url for process in fleet.of_role("engine")}
        asked = []
        for plan in self._plan.pools:
            if real := plan.real_engines():  # what a scaler starts later is in pointsman fleet
                from pointsman_cli.up.cache_visibility import tell_what_is_known

                engines = {InstanceId(name): urls[name] for name in real}
                settings = fleet.settings(plan.settings.pool)
                asked.append(tell_what_is_known(settings, engines, self._started_at, self._tell))
        await asyncio.gather(*asked)

    async def _served_by_ours(self) -> str:
        """What an engine serves that was started with a command line of somebody else's; unknown while none runs."""
        urls = [child.url for child in self._runner.children if child.role == "engine"]
        return await _model_of(EngineAddress(urls[0])) if urls else ""

    async def _tick(self, live: Live | None) -> None:
        """Keep the display alive; elsewhere say now and then what is waited for."""
        while live is not None:
            live.refresh()
            await asyncio.sleep(REFRESH_SECONDS)
        while True:
            await asyncio.sleep(STILL_STARTING_SECONDS)
            elapsed = time.time() - self._started_at
            late = [
                child for child in self._runner.children if self._runner.conditions[child.name] is not Condition.READY
            ]
            engines = [child for child in late if child.role == "engine"] or late
            waiting = "; ".join(f"{child.name}: {child.waiting_for or 'does not answer yet'}" for child in engines)
            self._tell(f"still starting after {elapsed:.0f} s: {waiting}", "")

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work, or leave it when asked to stop; whether it was done. Raises what the work raises."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _stop_instances(self) -> None:
        """End what the scaler started; it outlives the scaler, but not the fleet."""
        if self._plan.scale is not None:
            await stop_all(self._plan.instances)

    async def _kill(self) -> None:
        self._runner.kill()
        if self._plan.scale is not None:
            await kill_all(self._plan.instances)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first one stops; then only Ctrl-C kills: a terminal that closes says SIGHUP twice, from the kernel and the shell."""
        if not self._stop.is_set():
            self._stop.set()
            self._tell("stopping (Ctrl-C again kills) ...", "dim")
        elif number == signal.SIGINT and self._killing is None:
            self._tell("killing what is left", "yellow")
            self._killing = asyncio.ensure_future(self._kill())

    def _start_display(self) -> contextlib.AbstractContextManager[Live | None]:
        """A live display on a terminal, a single line elsewhere. No thread refreshes it: see child._die_with_parent."""
        if self._console.is_terminal:
            return Live(StartDisplay(self._runner), console=self._console, auto_refresh=False, transient=True)
        self._tell(f"starting the fleet: {len(self._runner.children)} processes", "")
        return contextlib.nullcontext()

    def _tell(self, line: str, style: str) -> None:
        """Nothing comes of it where the terminal is closed: what is done does not depend on who reads of it."""
        with contextlib.suppress(OSError, SystemExit):  # the latter is what rich makes of a broken pipe
            self._console.print(Text(line, style=style), soft_wrap=True)

    def _announce(self) -> None:
        if self._running:
            try:
                announce(self._fleet_file())
            except OSError as error:
                self._tell(f"other commands will need --nats or --data: {error}", "yellow")

    def _fleet_file(self) -> FleetFile:
        plan, settings = self._plan, self._plan.settings
        own = [
            FleetProcess(name=child.name, role=child.role, pid=child.pid, url=child.url)
            for child in self._runner.children
        ]
        running = [FleetProcess(name="nats", role="nats", pid=0, url=plan.nats)] if settings.nats else []
        running += [
            FleetProcess(name=name, role="engine", pid=0, url=engine.url)
            for of_pool in plan.pools
            for name, engine in zip(of_pool.engine_names(), of_pool.engines, strict=False)
        ]
        return FleetFile(
            nats=plan.nats,
            ingress=plan.ingress_url,
            pool=settings.pool,
            model=self._model,
            policy=settings.policy or _policy_in(plan.config),
            speed=settings.speed,
            slo_ttft=plan.slo_ttft,
            block_tokens=plan.block_tokens,
            secret_file=str(plan.data / SECRET_FILE),
            data=str(plan.data),
            pid=os.getpid(),
            started_at=self._started_at,
            processes=[*running, *own],
            further={further.pool: further.model for further in plan.further},
            further_block_tokens={other.settings.pool: other.block_tokens for other in plan.pools[1:]},
        )


@contextlib.contextmanager
def _runtime_directory() -> Iterator[Path]:
    """A private directory for sockets; short, as the path of a Unix socket has at most 107 bytes."""
    directory = tempfile.mkdtemp(prefix="pointsman-")
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _check_ports(settings: UpSettings) -> None:
    if reason := why_taken(0, settings.host):
        message = f"nobody can listen on {settings.host} here ({reason}); see --host"
        raise click.ClickException(message)
    for port in _ingress_ports(settings):
        if reason := why_taken(port, settings.host):
            message = f"port {port} on {settings.host} cannot be had: {reason}; choose another one with --port"
            raise click.ClickException(message)


def _ingress_ports(settings: UpSettings) -> list[int]:
    """As asked for; empty where any will do."""
    return list(range(settings.port, settings.port + settings.ingresses)) if settings.port else []


def _check_room(data: Path) -> None:
    free = shutil.disk_usage(data).free
    if free < ROOM_BYTES_MIN:
        message = f"{free >> 10:,} KiB are free where {data} lies, of {ROOM_BYTES_MIN >> 10:,} that a fleet needs at least; make "
        message += "room there, or name another directory with --data DIR"
        raise click.ClickException(message)


def _own_nats(plan: FleetPlan) -> NatsProcess:
    return NatsProcess(port=plan.nats_port, store=plan.data / "nats", sync_interval=plan.settings.sync_interval)


async def _check_nats(settings: UpSettings) -> None:
    urls = settings.nats.split(",") if settings.nats else []
    if urls and not any([await accepts_connections(url, timeout=ENGINE_ANSWER_SECONDS) for url in urls]):
        message = f"no nats-server answers at {settings.nats}; start it, or leave --nats away to have one started"
        raise click.ClickException(message)


async def _model(settings: UpSettings, engines: list[EngineAddress]) -> str:
    """The model that the fleet serves: as asked for, or what the engines say; empty where they are yet to be started by
    somebody else's command line. Every engine that runs must answer."""
    served = [await _model_of(engine) for engine in engines]
    if settings.model or not served:
        unasked = {SIMULATED_ENGINES: SIMULATED_MODEL, CPU_ENGINES: SERVED_MODEL}
        return settings.model or unasked.get(settings.kind, "")
    if len(set(served)) > 1:
        message = f"the engines serve different models ({', '.join(sorted(set(served)))}); a pool has one: see --model"
        raise click.ClickException(message)
    return served[0]


async def _check_models(further: list[FurtherPool]) -> None:
    """Every running engine must serve the model that it was named for."""
    for pool in further:
        for engine in pool.addresses:
            if (served := await _model_of(engine)) != pool.model:
                message = f"the engine {engine.url} serves {served}, not {pool.model}: see --also"
                raise click.ClickException(message)


async def _model_of(engine: EngineAddress) -> str:
    try:
        status, body = await http_get(f"{engine.url}/v1/models", timeout=ENGINE_ANSWER_SECONDS)
        if status == HTTPStatus.OK:
            return str(json.loads(body)["data"][0]["id"])
        problem = f"/v1/models answers {status}"
    except NoAnswerError as error:
        problem = str(error)
    except (ValueError, LookupError, TypeError):
        problem = "/v1/models names no model"
    message = f"the engine {engine.url} is of no use: {problem}"
    raise click.ClickException(message)


def _home(settings: UpSettings) -> EngineHome:
    return EngineHome(Path(settings.vllm_dir).resolve() if settings.vllm_dir else default_directory())


def _make_engine(home: EngineHome, engines: int, console: Console) -> None:
    """Have vLLM's CPU build in its place, which takes minutes the first time. Raises click.ClickException, also where so
    many engines do not fit this machine."""
    try:
        machine.check_can_run(engines)
        recipe.make(home, tell=lambda line: console.print(Text(line, style="dim"), soft_wrap=True))
    except (machine.UnsuitableMachineError, recipe.MakingError) as error:
        raise click.ClickException(str(error)) from error


def _secret(settings: UpSettings, file: Path) -> str:
    """The deployment's secret: as given, or made once for each data directory; kept in a file only the owner reads."""
    if settings.secret is None and file.exists():
        return file.read_text().strip()
    secret = settings.secret or secrets.token_urlsafe(SECRET_BYTES)
    with _written_to(file.parent):
        file.touch(mode=0o600)
        file.chmod(0o600)
        file.write_text(secret + "\n")
    return secret


@contextlib.contextmanager
def _written_to(data: Path) -> Iterator[None]:
    """Raises click.ClickException where the data directory takes nothing, for instance because its disk is full."""
    try:
        yield
    except OSError as error:
        message = f"cannot write to {data}: {error.strerror or error}; make room there, or name another with --data DIR"
        raise click.ClickException(message) from error


def _policy_in(config: Path | None) -> str:
    """The policy that the scheduler takes from its own table, else its default."""
    table = tomllib.loads(config.read_text()).get("scheduler", {}) if config else {}
    return str(table.get("policy", DEFAULT_ROUTING))
