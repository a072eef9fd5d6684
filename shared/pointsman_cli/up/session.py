"""One run of `pointsman up`: starts the planned processes, announces the fleet, and stops it on a signal."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pointsman.adapters.log_files import cut_if_large
from pointsman.adapters.providers.process import kill_all, stop_all
from pointsman.primitives import InstanceId
from pointsman.runtime.settings import nats_shown
from pointsman_cli.discovery import FleetFile, FleetProcess, announce
from pointsman_cli.formatting import plural
from pointsman_cli.up.child import START_ERRORS, ChildProcess, NatsProcess, ServiceProcess
from pointsman_cli.up.display import StartDisplay, print_fleet
from pointsman_cli.up.plan import FleetPlan
from pointsman_cli.up.probe import model_of
from pointsman_cli.up.processes import processes
from pointsman_cli.up.runner import Condition, FleetRunner, FleetStartError

REFRESH_SECONDS = 0.1
LOGS_DIRECTORY = "logs"
LOGS_CHECK_SECONDS = 5.0
STILL_STARTING_SECONDS = 20.0


class FleetSession:
    def __init__(self, plan: FleetPlan, console: Console) -> None:
        logs = plan.data / LOGS_DIRECTORY
        with written_to(plan.data):
            logs.mkdir(exist_ok=True)
        self._plan = plan
        self._console = console
        self._started_at = time.time()
        self._stop = asyncio.Event()
        children: list[ChildProcess] = [ServiceProcess(process, logs) for process in processes(plan)]
        if not plan.settings.nats:
            nats = NatsProcess(
                port=plan.nats_port,
                store=plan.data / "nats",
                sync_interval=plan.settings.sync_interval,
                accounts=plan.credentials.configuration() if plan.credentials else "",
            )
            children.insert(0, nats)
        self._runner = FleetRunner(
            children, report=self._report, changed=self._announce, stop_others=self._stop_instances
        )
        self._running = False
        self._killing: asyncio.Future[None] | None = None
        self._model = plan.model

    async def run(self) -> int:
        """Returns the exit code: 1 if the fleet did not start."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        try:
            if await self._unless_stopped(self._start()):
                await self._unless_stopped(self._keep())
        except (FleetStartError, *START_ERRORS) as error:
            self._report(f"the fleet could not be started: {error}", "red")
            if isinstance(error, FleetStartError):
                for line in error.tail:
                    self._report(f"  | {line}", "dim")
            return 1
        else:
            return 0
        finally:
            self._running = False
            await self._runner.stop()
            if self._killing is not None:
                await self._killing
            self._report_losses()
            self._report("stopped", "")

    def _report_losses(self) -> None:
        lost = {child.name: count for child in self._runner.children if (count := child.writes_lost_at_stop())}
        if lost:
            names = ", ".join(f"{name} {count:,}" for name, count in lost.items())
            self._report(
                f"{plural(sum(lost.values()), 'write')} that the log had not confirmed are lost ({names}); was its disk full? "
                "Their requests were answered, but 'usage' and 'replay' miss them",
                "red",
            )

    async def _start(self) -> None:
        with self._start_display() as live:
            ticking = asyncio.ensure_future(self._tick(live))
            try:
                await self._runner.start(seconds_max=self._plan.start_seconds_max)
            finally:
                ticking.cancel()
        self._model = self._model or await self._model_of_ours()
        self._running = True
        self._announce()
        seconds = time.time() - self._started_at
        print_fleet(self._console, self._fleet_file(), seconds, requires_keys=self._plan.settings.requires_keys)

    async def _keep(self) -> None:
        beside = [
            asyncio.ensure_future(self._report_visibility()),
            asyncio.ensure_future(bound_logs(self._plan.data / LOGS_DIRECTORY)),
        ]
        try:
            await self._runner.keep()
            await self._stop.wait()
        finally:
            for task in beside:
                task.cancel()

    async def _report_visibility(self) -> None:
        fleet = self._fleet_file()
        urls = {process.name: process.url for process in fleet.of_role("engine")}
        reports = []
        for plan in self._plan.pools:
            if real := plan.real_engines():  # what a scaler starts later is in pointsman fleet
                from pointsman_cli.up.cache_visibility import report_cache_visibility

                engines = {InstanceId(name): urls[name] for name in real}
                settings = fleet.settings(plan.settings.pool)
                reports.append(report_cache_visibility(settings, engines, self._started_at, self._report))
        await asyncio.gather(*reports)

    async def _model_of_ours(self) -> str:
        engine = next((child for child in self._runner.children if child.role == "engine"), None)
        return await model_of(engine.url, self._plan.settings.engine_keys.of(engine.name)) if engine else ""

    async def _tick(self, live: Live | None) -> None:
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
            self._report(f"still starting after {elapsed:.0f} s: {waiting}", "")

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work ended before a signal cancelled it. Raises what the work raises."""
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
        if self._plan.settings.scaled:
            await stop_all(self._plan.instances)

    async def _kill(self) -> None:
        self._runner.kill()
        if self._plan.settings.scaled:
            await kill_all(self._plan.instances)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal stops. After that only Ctrl-C kills, since a closing terminal sends SIGHUP twice."""
        if not self._stop.is_set():
            self._stop.set()
            self._report("stopping (Ctrl-C again kills) ...", "dim")
        elif number == signal.SIGINT and self._killing is None:
            self._report("killing what is left", "yellow")
            self._killing = asyncio.ensure_future(self._kill())

    def _start_display(self) -> contextlib.AbstractContextManager[Live | None]:
        if self._console.is_terminal:
            return Live(StartDisplay(self._runner), console=self._console, auto_refresh=False, transient=True)
        self._report(f"starting the fleet: {len(self._runner.children)} processes", "")
        return contextlib.nullcontext()

    def _report(self, line: str, style: str) -> None:
        with contextlib.suppress(OSError, SystemExit):  # SystemExit is rich's answer to a broken pipe
            self._console.print(Text(line, style=style), soft_wrap=True)

    def _announce(self) -> None:
        if self._running:
            try:
                announce(self._fleet_file())
            except OSError as error:
                self._report(f"other commands will need --from: {error}", "yellow")

    def _fleet_file(self) -> FleetFile:
        plan, settings = self._plan, self._plan.settings
        own = [
            FleetProcess(name=child.name, role=child.role, pid=child.pid, url=child.url, admin_url=child.admin_url)
            for child in self._runner.children
        ]
        running = [FleetProcess(name="nats", role="nats", pid=0, url=nats_shown(plan.nats))] if settings.nats else []
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
            policy=settings.policy or plan.config_policy,
            speed=settings.speed,
            slo_ttft=plan.slo_ttft,
            block_tokens=plan.block_tokens,
            secret_file=str(plan.secret_file),
            credentials=str(plan.credentials.directory) if plan.credentials else "",
            tls=plan.settings.tls_files,
            data=str(plan.data),
            pid=os.getpid(),
            started_at=self._started_at,
            processes=[*running, *own],
            further={further.pool: further.model for further in plan.further},
            further_block_tokens={other.settings.pool: other.block_tokens for other in plan.pools[1:]},
        )


async def bound_logs(directory: Path) -> None:
    """Runs without end. A supervisor of the scaler's bounds the log files of its instance."""
    while True:
        _cut_large_logs(directory)
        await asyncio.sleep(LOGS_CHECK_SECONDS)


def _cut_large_logs(directory: Path) -> None:
    for file in directory.glob("*.log"):
        with contextlib.suppress(OSError):
            cut_if_large(file)


@contextlib.contextmanager
def written_to(data: Path) -> Iterator[None]:
    """Raises click.ClickException if the data directory cannot be written to."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"cannot write to {data}: {error.strerror or error}; make room there, or name another with --data DIR"
        ) from error
