"""A process, restarted several times; it can be killed or paused between any two steps of the event loop."""

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from typing_extensions import override

from pointsman.primitives import Seconds, WallSeconds
from pointsman.runtime.health import AsgiApp, HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman_lab.torture.clocks import SkewedClock
from pointsman_lab.torture.environment import Environment
from pointsman_lab.torture.http import Exchange, Site
from pointsman_lab.torture.link import Link
from pointsman_lab.torture.loop import OWNER, KillableTask

LINK_CLOSE_SECONDS: WallSeconds = WallSeconds(2.0)


class Life(KillableTask):
    """One run of a process: its tasks, its link, its open connections."""

    def __init__(self, link: Link | None) -> None:
        super().__init__()
        self.link = link
        self.board = HealthBoard()
        self.exchanges: dict[Exchange, asyncio.Task[Any] | None] = {}
        self.supervisor: Supervisor | None = None
        self.context = contextvars.Context()
        self.context.run(OWNER.set, self)


class Process(ABC):
    networked = True

    def __init__(self, world: Environment, name: str) -> None:
        self.world = world
        self.name = name
        self.clock = SkewedClock(world.loop, speed=world.plan.speed)
        self.life: Life | None = None
        self.lives = 0
        self.paused = False
        self.wanted = True
        self._suspended_at: Seconds | None = None

    @abstractmethod
    async def serve(self, life: Life, supervisor: Supervisor) -> None:
        """The service's own `main`: runs until the supervisor is stopped."""

    def start(self) -> None:
        assert self.life is None
        self.lives += 1
        link = self.world.link(self.clock, f"{self.name}-{self.lives}") if self.networked else None
        life = self.life = Life(link)
        self.world.lives.append(life)
        self.world.loop.launch(self._live(life), life.context)

    def stop(self, *, for_good: bool = False) -> None:
        """SIGTERM, or with `for_good` SIGINT: a graceful end that takes a while."""
        if self.life is not None and self.life.supervisor is not None:
            self.life.supervisor.for_good = for_good
            self.life.supervisor.stop()

    def kill(self) -> None:
        """SIGKILL. The kernel closes its connections."""
        life, self.life = self.life, None
        if life is None:
            return
        life.stopped = True
        if life.link is not None:
            life.link.kill()
        self.died()
        for exchange in list(life.exchanges):
            exchange.break_off(f"{self.name} died")

    def pause(self) -> None:
        if self.life is not None:
            self.life.stopped = self.paused = True

    def suspend(self) -> None:
        self.pause()
        self._suspended_at = self.world.loop.time()

    def resume(self) -> None:
        self._wake_clock()
        if self.life is not None and self.paused:
            self.paused = False
            self.world.loop.release(self.life)

    def died(self) -> None:
        self.paused = False
        self._wake_clock()

    def _wake_clock(self) -> None:
        if self._suspended_at is not None:
            self.clock.asleep += self.world.loop.time() - self._suspended_at
            self._suspended_at = None

    @property
    def link(self) -> Link:
        assert self.life is not None
        assert self.life.link is not None
        return self.life.link

    async def _live(self, life: Life) -> None:
        try:
            async with Supervisor() as supervisor:
                life.supervisor = supervisor
                await self.serve(life, supervisor)
                if life.link is not None:
                    await life.link.ports.log.flush(LINK_CLOSE_SECONDS)
                    life.link.kill()
        except Exception as error:  # noqa: BLE001 - a service that fails by itself is a finding
            self.world.violation(f"{self.name} failed: {error!r}")
        else:
            self._ended(life)

    def _ended(self, life: Life) -> None:
        if self.life is life:
            self.life = None
            self.died()
        for exchange in list(life.exchanges):
            exchange.break_off(f"{self.name} ended")


class HttpProcess(Process, Site):
    def __init__(self, world: Environment, name: str) -> None:
        super().__init__(world, name)
        self.app: AsgiApp | None = None

    @property
    @override
    def reachable(self) -> bool:
        return True

    @override
    def attend(self, exchange: Exchange, work: Callable[[], Awaitable[None]]) -> None:
        life = self.life
        assert life is not None
        life.exchanges[exchange] = None

        async def attending() -> None:
            life.exchanges[exchange] = asyncio.current_task()
            try:
                await work()
            except asyncio.CancelledError:
                pass  # cut, after its last words
            except Exception as error:  # noqa: BLE001 - an application must answer, not raise
                self.world.violation(f"{self.name} raised at a request: {error!r}")
            life.exchanges.pop(exchange, None)
            exchange.end()

        self.world.loop.launch(attending(), life.context)

    @override
    def died(self) -> None:
        super().died()
        self.app = None
