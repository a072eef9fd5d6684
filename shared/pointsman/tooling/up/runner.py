"""Starts the processes of a fleet, watches them, and stops them in an order that loses nothing.

Nothing is restarted silently: each death is told with its exit code and log file, and so is each new start. While
stopping, the ingress goes first so that what it streams can finish, and the nats-server last so that everybody
can write their last words; all of it within `STOP_SECONDS_MAX`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Set
from enum import Enum

from pointsman.tooling.up.child import START_ERRORS, ChildProcess, described_exit

READY_POLL_SECONDS = 0.1

STOP_STAGES: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"ingress", "scaler"}), 1.4),
    (frozenset({"worker"}), 1.0),
    (frozenset({"scheduler", "rebalancer"}), 1.0),
    (frozenset({"recorder"}), 0.8),
    (frozenset({"nats"}), 0.5),
)
"""Which roles stop together, and after how many seconds what is left of them is killed."""

ENGINE_STOP_SECONDS = 2.3
"""Engines have nothing more to say once their workers are gone: they stop beside all that comes after. A real one has
processes of its own to end."""

STOP_SECONDS_MAX = 5.0


class Condition(Enum):
    """How a process is, as `up` shows it."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class FleetStartError(Exception):
    """A process did not become ready; the message says which and why, `tail` is the end of its log."""

    def __init__(self, message: str, tail: list[str]) -> None:
        super().__init__(message)
        self.tail = tail


class FleetRunner:
    """The processes of one fleet. `tell` is called with every line that people must see, and its colour;
    `changed` when a process became ready, died or was started again."""

    def __init__(
        self,
        children: Iterable[ChildProcess],
        *,
        tell: Callable[[str, str], None],
        changed: Callable[[], None],
        stop_others: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`stop_others`: ends what the fleet's processes have started themselves; done together with the workers."""
        self.children = list(children)
        self.conditions = {child.name: Condition.STARTING for child in self.children}
        self._tell = tell
        self._changed = changed
        self._stop_others = stop_others
        self._stopping = asyncio.Event()

    async def start(self, *, seconds_max: float) -> None:
        """Start every process and wait until all are ready. Raises FleetStartError, and what `start` of one raises."""
        for child in self.children:
            await child.start()
        try:
            async with asyncio.timeout(seconds_max), asyncio.TaskGroup() as waiting:
                watching = waiting.create_task(self._while_none_dies())
                await asyncio.wait([waiting.create_task(self._until_ready(child)) for child in self.children])
                watching.cancel()
        except TimeoutError:
            raise self._overdue(seconds_max) from None
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def keep(self, *, restart: bool) -> None:
        """Watch every process for as long as the fleet runs; with `restart`, start what died again, within a bound."""
        async with asyncio.TaskGroup() as keepers:
            for child in self.children:
                keepers.create_task(self._keep(child, restart=restart))

    async def stop(self) -> None:
        """Stop everything within STOP_SECONDS_MAX; what does not listen is killed, and named."""
        self._stopping.set()
        async with asyncio.TaskGroup() as beside:
            for roles, seconds in STOP_STAGES:
                stopping = [self._stop_together(self._of(roles), seconds)]
                if "worker" in roles and self._stop_others is not None:
                    stopping.append(self._stop_what_they_started(seconds))
                await asyncio.gather(*stopping)
                if "worker" in roles:
                    beside.create_task(self._stop_together(self._of({"engine"}), ENGINE_STOP_SECONDS))

    def kill(self) -> None:
        """End everything now."""
        self._stopping.set()
        for child in self.children:
            child.kill()

    async def _until_ready(self, child: ChildProcess) -> None:
        code = await self._settled(child)
        if code is not None:
            message = f"{child.name} {described_exit(code)} before it was ready; its log is {child.log_file}"
            raise FleetStartError(message, child.log_tail())

    async def _while_none_dies(self) -> None:
        """Some are ready minutes before the last is; nobody should wait for that when one of them is dead."""
        while True:
            for child in self.children:
                if self.conditions[child.name] is Condition.READY and (code := child.exit_code) is not None:
                    message = (
                        f"{child.name} {described_exit(code)} while others were starting; its log is {child.log_file}"
                    )
                    raise FleetStartError(message, child.log_tail())
            await asyncio.sleep(READY_POLL_SECONDS)

    async def _settled(self, child: ChildProcess) -> int | None:
        """Wait until the process is ready (None) or has ended (its exit code)."""
        while not await child.is_ready():
            if (code := child.exit_code) is not None:
                return code
            await asyncio.sleep(READY_POLL_SECONDS)
        self._became(child, Condition.READY)
        return None

    def _overdue(self, seconds: float) -> FleetStartError:
        late = [child for child in self.children if self.conditions[child.name] is not Condition.READY]
        reasons = (f"{c.name} ({c.waiting_for or 'does not answer'})" for c in late)
        message = f"not ready after {seconds:g} s: {', '.join(reasons)}; the first one's log is {late[0].log_file}"
        return FleetStartError(message, late[0].log_tail())

    async def _keep(self, child: ChildProcess, *, restart: bool) -> None:
        while True:
            code = await child.exited()
            if self._stopping.is_set():
                return
            self._became(child, Condition.DEAD)
            self._tell(f"✗ {child.name} (pid {child.pid}) {described_exit(code)}; its log is {child.log_file}", "red")
            if not restart:
                self._tell(f"✗ {child.name} stays down: --no-restart", "red")
                return
            if not await self._started_again(child):
                return

    async def _started_again(self, child: ChildProcess) -> bool:
        """Start it again after a wait, as often as it may; whether it runs."""
        while (wait := child.restart_wait()) is not None:
            await asyncio.sleep(wait)
            if self._stopping.is_set():
                return False
            try:
                await child.start()
            except START_ERRORS as error:
                self._tell(f"✗ {child.name} could not be started again: {error}", "red")
                continue
            self._became(child, Condition.STARTING)
            self._tell(f"↻ {child.name} was started again as pid {child.pid}, {wait:g} s later", "yellow")
            await self._settled(child)
            return True
        self._tell(f"✗ {child.name} stays down: it died too often in a minute", "red")
        return False

    def _became(self, child: ChildProcess, condition: Condition) -> None:
        self.conditions[child.name] = condition
        self._changed()

    def _of(self, roles: Set[str]) -> list[ChildProcess]:
        return [child for child in self.children if child.role in roles]

    async def _stop_what_they_started(self, seconds: float) -> None:
        """What is left after that ends by itself, when it sees that the fleet is gone."""
        assert self._stop_others is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop_others()

    async def _stop_together(self, children: list[ChildProcess], seconds: float) -> None:
        for child in children:
            child.terminate()
        try:
            async with asyncio.timeout(seconds):
                for child in children:
                    if child.pid:
                        await child.exited()
        except TimeoutError:
            late = [child for child in children if child.exit_code is None]
            self._tell(f"killed, for not stopping in time: {', '.join(child.name for child in late)}", "yellow")
            for child in late:
                child.kill()
                await child.exited()
