"""Every task has an owner that awaits it; a failure in the background ends the process cleanly.

`run` is the outermost call of every service: event loop, signals, logging. `Supervisor` owns the tasks.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import click
import structlog

log = structlog.get_logger()

STOP_SECONDS_MAX = 10.0
"""Longest shutdown after SIGTERM; then the process is killed. Usually 0.2 to 3 s. An ingress has longer."""


SAME_SIGNAL_SECONDS = 0.5


class Supervisor:
    """Owns background tasks. Leaving its context cancels and awaits them all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.signalled_at = 0.0
        """When the newest signal came, by the event loop's clock."""
        self.for_good = False
        """Whether SIGINT asked for shutdown: the process will not come back."""
        self.stop_seconds_max = STOP_SECONDS_MAX
        """How long the process may take to shut down after a signal before it is killed."""
        self._failure: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run `work` until it ends. When it raises, `until_stopped` raises the same."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def stop(self) -> None:
        """Ask for shutdown: `until_stopped` returns."""
        self._stop.set()

    def hurry(self) -> None:
        """Ask for shutdown at once: `until_hurried` returns, too."""
        self._stop.set()
        self._hurry.set()

    @property
    def stopped_in_order(self) -> bool:
        """Whether shutdown was asked for, and no task has failed."""
        return self.stopping and self._failure is None

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def until_hurried(self) -> None:
        """Wait until a shutdown may wait for nothing any more: after a second signal, or a failure."""
        await self._hurry.wait()

    async def until_stopped(self) -> None:
        """Wait for a signal, `stop`, or the first failure of a task, which is raised."""
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        failure = task.exception()
        if failure is not None and self._failure is None:
            if not isinstance(failure, click.ClickException):
                log.error("task_failed", task=task.get_name(), exc_info=failure)
            self._failure = failure
            self.hurry()


def run(main: Callable[[Supervisor], Awaitable[None]]) -> None:
    """Run a service until SIGINT, SIGTERM or failure (exit code 1). Raises click.ClickException for wrong settings."""
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_supervised(main))
    except KeyboardInterrupt:
        sys.exit(130)
    except click.ClickException:
        raise
    except Exception as error:
        log.exception("service_failed", reason=str(error) or type(error).__name__)
        sys.exit(1)


async def _supervised(main: Callable[[Supervisor], Awaitable[None]]) -> None:
    async with Supervisor() as supervisor:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _on_signal, supervisor, number)
        await main(supervisor)


def _on_signal(supervisor: Supervisor, number: signal.Signals) -> None:
    """The first signal stops in order, SIGINT for good; a second stops at once. Within SAME_SIGNAL_SECONDS it is the same signal,
    sent by systemd and by a parent."""
    log.debug("signal_received", signal=number.name)
    now, seconds = asyncio.get_running_loop().time(), supervisor.stop_seconds_max
    if supervisor.stopping and now - supervisor.signalled_at < SAME_SIGNAL_SECONDS:
        return
    supervisor.signalled_at = now
    if supervisor.stopping:
        supervisor.hurry()
        seconds = STOP_SECONDS_MAX
    else:
        supervisor.for_good = number == signal.SIGINT
    supervisor.stop()
    asyncio.get_running_loop().call_later(seconds, _give_up, seconds)


def _give_up(seconds: float) -> None:
    log.error("shutdown_timeout", seconds=seconds)
    signal.raise_signal(signal.SIGKILL)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
