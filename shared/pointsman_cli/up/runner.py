"""Starts, watches, restarts and stops the processes of a fleet: ingresses stop first, to finish their streams,
nats-server last. Processes that hang are killed: stopping takes at most `STOP_SECONDS_MAX`."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Set
from enum import Enum
from typing import Any

from pointsman.adapters.backoff import RESTART_WAIT_SECONDS_MAX
from pointsman.adapters.child_process import described_exit
from pointsman.adapters.waiting import wait_at_most
from pointsman.primitives import WallSeconds
from pointsman.runtime.supervision import STOP_SECONDS_MAX as SERVICE_STOP_SECONDS_MAX
from pointsman_cli.up.child import START_ERRORS, ChildProcess

READY_POLL_SECONDS = 0.25

STOP_STAGES: tuple[frozenset[str], ...] = (
    frozenset({"ingress", "scaler", "console"}),
    frozenset({"worker"}),
    frozenset({"scheduler", "rebalancer"}),
    frozenset({"recorder"}),
    frozenset({"nats"}),
)
"""Roles that stop together. Engines stop after their workers, in parallel with later stages."""
STREAMS_SECONDS_MAX = 5.0
STAGE_SECONDS_MAX = SERVICE_STOP_SECONDS_MAX + 2.0
STOP_SECONDS_MAX = STREAMS_SECONDS_MAX + STAGE_SECONDS_MAX * len(STOP_STAGES)
STILL_STOPPING_SECONDS = 3.0


class Condition(Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class FleetStartError(Exception):
    """A process did not become ready. `tail`: end of its log."""

    def __init__(self, message: str, tail: list[str]) -> None:
        super().__init__(message)
        self.tail = tail


class FleetRunner:
    """`changed` is called when a process became ready, died or was restarted; `stop_others` ends processes of
    services."""

    def __init__(
        self,
        children: Iterable[ChildProcess],
        *,
        report: Callable[[str, str], None],
        changed: Callable[[], None],
        stop_others: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.children = list(children)
        self.conditions = {child.name: Condition.STARTING for child in self.children}
        self._report = report
        self._changed = changed
        self._stop_others = stop_others
        self._stopping = asyncio.Event()
        self._stop_requested: list[ChildProcess] = []

    async def start(self, *, seconds_max: float) -> None:
        """Returns when all processes are ready. Raises FleetStartError, and what `ChildProcess.start` raises."""
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

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as keepers:
            for child in self.children:
                keepers.create_task(self._keep(child))

    async def stop(self) -> None:
        """Stop everything in order, within STOP_SECONDS_MAX or the bound of `stop_others`."""
        self._stopping.set()
        reporting = asyncio.ensure_future(self._report_overdue())
        try:
            async with asyncio.TaskGroup() as beside:
                for roles in STOP_STAGES:
                    stopping = [self._stop_together(self._of(roles))]
                    if "ingress" in roles:
                        beside.create_task(self._cut_streams(self._of({"ingress"})))
                    if "worker" in roles and self._stop_others is not None:
                        stopping.append(self._stop_others())
                    await asyncio.gather(*stopping)
                    if "worker" in roles:
                        beside.create_task(self._stop_together(self._of({"engine"})))
        finally:
            reporting.cancel()

    def kill(self) -> None:
        self._stopping.set()
        for child in self.children:
            child.kill()

    async def _until_ready(self, child: ChildProcess) -> None:
        code = await self._settled(child)
        if code is not None:
            message = f"{child.name} {described_exit(code)} before it was ready; its log is {child.log_file}"
            raise FleetStartError(message, child.log_tail())

    async def _while_none_dies(self) -> None:
        """Raises FleetStartError when a ready process exits during the start."""
        while True:
            for child in self.children:
                if self.conditions[child.name] is Condition.READY and (code := child.exit_code) is not None:
                    message = (
                        f"{child.name} {described_exit(code)} while others were starting; its log is {child.log_file}"
                    )
                    raise FleetStartError(message, child.log_tail())
            await asyncio.sleep(READY_POLL_SECONDS)

    async def _settled(self, child: ChildProcess) -> int | None:
        while not await child.is_ready():
            if (code := child.exit_code) is not None:
                return code
            await asyncio.sleep(READY_POLL_SECONDS)
        self._became(child, Condition.READY)
        return None

    def _overdue(self, seconds: float) -> FleetStartError:
        late = [child for child in self.children if self.conditions[child.name] is not Condition.READY]
        reasons = (f"{c.name} ({c.waiting_for or 'does not answer'})" for c in late)
        message = f"not ready after {seconds:g} s: {', '.join(reasons)}; the first one's log is {late[0].log_file}; if the machine is only slow, wait longer with --start-seconds-max"
        return FleetStartError(message, late[0].log_tail())

    async def _keep(self, child: ChildProcess) -> None:
        while True:
            code = await child.exited()
            if self._stopping.is_set():
                return
            self._became(child, Condition.DEAD)
            if code == 0:
                self._report(f"✓ {child.name} (pid {child.pid}) ended in order, with exit code 0", "yellow")
            else:
                self._report(
                    f"✗ {child.name} (pid {child.pid}) {described_exit(code)}; its log is {child.log_file}", "red"
                )
            if not await self._started_again(child):
                return

    async def _started_again(self, child: ChildProcess) -> bool:
        while True:
            wait = child.restart_wait()
            if wait >= RESTART_WAIT_SECONDS_MAX:
                self._report(f"✗ {child.name} keeps dying: it is started again every {wait:g} s", "red")
            await wait_at_most(self._stopping, WallSeconds(wait))
            if self._stopping.is_set():
                return False
            try:
                await child.start()
            except START_ERRORS as error:
                self._report(f"✗ {child.name} could not be started again: {error}", "red")
                continue
            self._became(child, Condition.STARTING)
            self._report(f"↻ {child.name} was started again as pid {child.pid}, {wait:g} s later", "yellow")
            await self._settled(child)
            return True

    def _became(self, child: ChildProcess, condition: Condition) -> None:
        self.conditions[child.name] = condition
        self._changed()

    def _of(self, roles: Set[str]) -> list[ChildProcess]:
        return [child for child in self.children if child.role in roles]

    async def _report_overdue(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(STILL_STOPPING_SECONDS)
            late = [child.name for child in self._stop_requested if child.exit_code is None]
            waited_for = ", ".join(late) or "what the scaler started"
            self._report(f"still stopping after {time.monotonic() - started:.0f} s: {waited_for} (Ctrl-C kills)", "dim")

    async def _cut_streams(self, ingresses: list[ChildProcess]) -> None:
        deadline = time.monotonic() + STREAMS_SECONDS_MAX
        while any(child.exit_code is None for child in ingresses if child.pid):
            if time.monotonic() > deadline:
                for child in ingresses:
                    child.terminate()
                return
            await asyncio.sleep(READY_POLL_SECONDS)

    async def _stop_together(self, children: list[ChildProcess]) -> None:
        for child in children:
            if self.conditions[child.name] is Condition.READY:
                child.stop()
            else:
                child.terminate()
        self._stop_requested += children
        streams = any(child.role == "ingress" for child in children)
        seconds_max = STAGE_SECONDS_MAX + (STREAMS_SECONDS_MAX if streams else 0.0)
        try:
            async with asyncio.timeout(seconds_max):
                for child in children:
                    if child.pid:
                        await child.exited()
        except TimeoutError:
            late = [child for child in children if child.exit_code is None]
            names = ", ".join(child.name for child in late)
            self._report(f"killed, for not stopping within {seconds_max:g} s: {names}", "yellow")
            for child in late:
                child.kill()
                await child.exited()
