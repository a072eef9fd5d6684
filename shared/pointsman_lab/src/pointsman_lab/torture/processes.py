"""A process, restarted several times; it can be killed or paused between any two steps of the event loop."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from typing_extensions import override

from pointsman.primitives import EngineSeconds, WallSeconds
from pointsman.runtime.health import AsgiApp, HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman_lab.torture.clocks import SkewedClock, lasting_skew
from pointsman_lab.torture.environment import Environment
from pointsman_lab.torture.http import Exchange, Site
from pointsman_lab.torture.link import Link
from pointsman_lab.torture.loop import OWNER, KillableTask

LINK_CLOSE_SECONDS: WallSeconds = WallSeconds(2.0)


class ProcessRun(KillableTask):
    """One run of a process: its tasks, its link, its open connections."""

    def __init__(self, link: Link | None) -> None:
        super().__init__()
        self.link = link
        self.board = HealthBoard()
        self.exchanges: dict[Exchange, asyncio.Task[Any] | None] = {}
        self.supervisor: Supervisor | None = None
        self.context = contextvars.Context()
        self.context.run(OWNER.set, self)


class Process:
    networked = True
    date_may_be_wrong = True
    """All the time; faults set any date for a while."""

    def __init__(self, environment: Environment, name: str) -> None:
        self.environment = environment
        self.name = name
        self.clock = SkewedClock(environment.loop, speed=environment.plan.speed)
        self.clock.skew = self.lasting_skew
        self.run: ProcessRun | None = None
        self.runs = 0
        self.paused = False
        self.wanted = True
        self._suspended_at: EngineSeconds | None = None

    @property
    def lasting_skew(self) -> EngineSeconds:
        return lasting_skew(self.environment.plan.seed, self.name) if self.date_may_be_wrong else 0.0

    async def serve(self, run: ProcessRun, supervisor: Supervisor) -> None:
        """The service's own `main`: runs until the supervisor is stopped."""
        self.launch(run, supervisor)
        try:
            await supervisor.until_stopped()
        finally:
            await self.shut_down(supervisor)

    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        """Starts the service's tasks. Not used where `serve` is overridden."""
        raise NotImplementedError

    async def shut_down(self, supervisor: Supervisor) -> None:
        """Sends the service's last messages."""

    def start(self) -> None:
        assert self.run is None
        self.runs += 1
        name, older = f"{self.name}-{self.runs}", self._is_older()
        link = self.environment.link(self.clock, name, older=older) if self.networked else None
        run = self.run = ProcessRun(link)
        self.environment.runs.append(run)
        self.environment.loop.launch(self._run(run), run.context)

    def _is_older(self) -> bool:
        match self.environment.plan.releases:
            case "":
                return False
            case "forward":
                return self.runs == 1
            case "back":
                return self.runs > 1
            case "mixed":
                return self.environment.chance("releases").random() < 0.5

    def stop(self, *, for_good: bool = False) -> None:
        """SIGTERM, or with `for_good` SIGINT: a graceful end that takes a while."""
        if self.run is not None and self.run.supervisor is not None:
            self.run.supervisor.for_good = for_good
            self.run.supervisor.stop()

    def kill(self) -> None:
        """SIGKILL. The kernel closes its connections."""
        run, self.run = self.run, None
        if run is None:
            return
        run.stopped = True
        if run.link is not None:
            run.link.kill()
        self.died()
        for exchange in list(run.exchanges):
            exchange.break_off(f"{self.name} died")

    def pause(self) -> None:
        if self.run is not None:
            self.run.stopped = self.paused = True

    def suspend(self) -> None:
        self.pause()
        self._suspended_at = self.environment.loop.time()

    def resume(self) -> None:
        self._wake_clock()
        if self.run is not None and self.paused:
            self.paused = False
            self.environment.loop.release(self.run)

    def died(self) -> None:
        self.paused = False
        self._wake_clock()

    def _wake_clock(self) -> None:
        if self._suspended_at is not None:
            self.clock.asleep += self.environment.loop.time() - self._suspended_at
            self._suspended_at = None

    @property
    def link(self) -> Link:
        assert self.run is not None
        assert self.run.link is not None
        return self.run.link

    async def _run(self, run: ProcessRun) -> None:
        try:
            async with Supervisor() as supervisor:
                run.supervisor = supervisor
                await self.serve(run, supervisor)
                if run.link is not None:
                    await run.link.ports.log.flush(LINK_CLOSE_SECONDS)
                    run.link.kill()
        except Exception as error:  # noqa: BLE001 - a service that fails by itself is a finding
            self.environment.violation(f"{self.name} failed: {error!r}")
        else:
            self._ended(run)

    def _ended(self, run: ProcessRun) -> None:
        if self.run is run:
            self.run = None
            self.died()
        for exchange in list(run.exchanges):
            exchange.break_off(f"{self.name} ended")


class HttpProcess(Process, Site):
    def __init__(self, environment: Environment, name: str) -> None:
        super().__init__(environment, name)
        self.app: AsgiApp | None = None

    @property
    @override
    def reachable(self) -> bool:
        return True

    @override
    def attend(self, exchange: Exchange, work: Callable[[], Awaitable[None]]) -> None:
        run = self.run
        assert run is not None
        run.exchanges[exchange] = None

        async def attending() -> None:
            run.exchanges[exchange] = asyncio.current_task()
            try:
                await work()
            except asyncio.CancelledError:
                pass  # cut, after its last words
            except Exception as error:  # noqa: BLE001 - an application must answer, not raise
                self.environment.violation(f"{self.name} raised at a request: {error!r}")
            run.exchanges.pop(exchange, None)
            exchange.end()

        self.environment.loop.launch(attending(), run.context)

    @override
    def died(self) -> None:
        super().died()
        self.app = None
