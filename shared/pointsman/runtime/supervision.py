"""Runs a service: event loop, signals, logging. A failure of any task ends the process, and so does an event loop that
stands still."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, ParamSpec, Self

import click
import structlog

from pointsman.runtime.memory import freeze_started

log = structlog.get_logger()

STOP_SECONDS_MAX = 10.0
"""Then the process is killed, also one that ends because of a failure; usually 0.2 to 3 s. An ingress has longer
after its first signal."""
SAME_SIGNAL_SECONDS = 0.5
HUNG_SECONDS = 60
"""Beyond any turn of the loop, also of a process that gets a tenth of a core. Where no liveness probe acts, nothing else
restarts a process that hangs."""
THREADS_SECONDS_MAX = 1.0
"""For calls that still run in threads once everything else has ended."""
LAST_WORDS_SECONDS = 1.0
"""The reader of the log may be what the process waits for."""
KILLED_EXIT_CODE = 128 + signal.SIGKILL
"""Of a process that gives up. It sends itself no SIGKILL: the first process of a container does not get it."""

P = ParamSpec("P")


class TaskCancelledError(Exception):
    """A task ended as cancelled, and nobody had stopped it."""


class EventLoopHungError(Exception):
    """Has the stack of the thread that runs the event loop."""


class Supervisor:
    """Leaving its context cancels and awaits all tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.signalled_at = 0.0
        self.for_good = False
        """SIGINT: the process will not be restarted."""
        self.stop_seconds_max = STOP_SECONDS_MAX
        self._failure: BaseException | None = None
        self._leaving = False

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """An exception of `work` is raised by `until_stopped`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def stop(self) -> None:
        self._stop.set()

    def hurry(self) -> None:
        self._stop.set()
        self._hurry.set()

    @property
    def stopped_in_order(self) -> bool:
        return self.stopping and self._failure is None

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def until_hurried(self) -> None:
        """Returns after a second signal or a failure: stop waiting for anything."""
        await self._hurry.wait()

    async def until_stopped(self) -> None:
        """Wait for a signal or `stop`; raises the first failure of a task."""
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leaving = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure: BaseException | None = None
        if not task.cancelled():
            failure = task.exception()
        elif not self._leaving:
            failure = TaskCancelledError(f"task {task.get_name()} was cancelled")
        if failure is not None and self._failure is None:
            if not isinstance(failure, click.ClickException):
                log.error("task_failed", task=task.get_name(), exc_info=failure)
            self._failure = failure
            self.hurry()


def run(main: Callable[[Supervisor], Awaitable[None]]) -> None:
    """Run until SIGINT, SIGTERM or failure (exit code 1). Raises click.ClickException for wrong settings."""
    with _Ending() as ending, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(ending.supervised(main))
            code = 0
        except KeyboardInterrupt:
            code = 130
        except click.ClickException as error:
            ending.leave_threads(error.exit_code, error)
            raise
        except Exception as error:
            log.exception("service_failed", reason=str(error) or type(error).__name__)
            code = 1
        ending.leave_threads(code)
    if code:
        sys.exit(code)


class _Ending:
    """Ends a process by its signals, and in time. Threads count, as the event loop may hang."""

    def __init__(self) -> None:
        self._supervisor = Supervisor()
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()

    async def supervised(self, main: Callable[[Supervisor], Awaitable[None]]) -> None:
        freeze_started()
        async with self._supervisor as supervisor:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._on_signal, number)
            supervisor.start(self._once_hurried(), name="end-once-hurried")
            try:
                with _ended_if_hung(loop):
                    await main(supervisor)
            finally:
                self._kill_after(STOP_SECONDS_MAX)

    def leave_threads(self, code: int, error: click.ClickException | None = None) -> None:
        """Bounds the event loop's wait, as it closes, for calls in threads and for names that are looked up: all else has
        ended. `error`: shown where it cannot be raised any more."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        self._after(THREADS_SECONDS_MAX, _leave, code, error)

    async def _once_hurried(self) -> None:
        await self._supervisor.until_hurried()
        self._kill_after(STOP_SECONDS_MAX)

    def _on_signal(self, number: signal.Signals) -> None:
        """SIGINT stops for good; a second signal at once. Within SAME_SIGNAL_SECONDS it is the same one, sent by systemd
        and a parent."""
        log.debug("signal_received", signal=number.name)
        supervisor, now = self._supervisor, asyncio.get_running_loop().time()
        if supervisor.stopping and now - supervisor.signalled_at < SAME_SIGNAL_SECONDS:
            return
        supervisor.signalled_at = now
        if supervisor.stopping:
            supervisor.hurry()
            return
        supervisor.for_good = number == signal.SIGINT
        supervisor.stop()
        self._kill_after(supervisor.stop_seconds_max)

    def _kill_after(self, seconds: float) -> None:
        self._after(seconds, _give_up, seconds)

    def _after(self, seconds: float, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        timer = threading.Timer(seconds, call, args, kwargs)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)


def _leave(code: int, error: click.ClickException | None) -> None:
    if error is not None:
        error.show()
    os._exit(code)


def _give_up(seconds: float) -> None:
    log.error("shutdown_timeout", seconds=seconds)
    os._exit(KILLED_EXIT_CODE)


@contextmanager
def _ended_if_hung(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Counts seconds that a thread of this process has run, no clock: after a pause of the process or the machine both go
    on."""
    ended = threading.Event()
    seconds = 0

    def beat() -> None:
        nonlocal seconds
        seconds = 0
        if not ended.is_set():
            loop.call_later(1, beat)

    def watch() -> None:
        nonlocal seconds
        while not ended.wait(1):
            seconds += 1
            if seconds > HUNG_SECONDS:
                last_words = threading.Thread(target=_log_stack, args=[threading.main_thread().ident], daemon=True)
                last_words.start()
                last_words.join(LAST_WORDS_SECONDS)
                os._exit(KILLED_EXIT_CODE)

    beat()
    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _log_stack(thread: int) -> None:
    frame, stack = sys._current_frames().get(thread), None  # noqa: SLF001 - public but for its name
    while frame is not None:
        stack, frame = TracebackType(stack, frame, frame.f_lasti, frame.f_lineno), frame.f_back
    log.error("event_loop_hung", seconds=HUNG_SECONDS, exc_info=EventLoopHungError().with_traceback(stack))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
