"""An event loop on virtual time: when nothing is ready, time jumps to the next timer.

No sockets, threads or signals; work for an executor runs in place. The seed orders what falls due together. A callback belongs to
the process in whose context it was made, so that a process can be killed or paused between any two of its steps.
"""

import asyncio
import heapq
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from random import Random
from types import FrameType
from typing import Any, TypeVar, cast

from typing_extensions import TypeVarTuple, Unpack, override

from pointsman.primitives import Seconds

TIMER_LATENESS_SECONDS_MAX = 0.0005
MOMENT_SECONDS = 1e-6
"""What comes in an order is so far apart at least."""
STEP_CPU_SECONDS_MAX = 1.0
"""Real time of the processor that a step may take, or a little more. The longest, the checkers', takes a fifth of it."""
STEPS_MAX = 400_000
"""More callbacks than any sane run takes, which are up to 100,000: somebody spins."""
STEPS_AT_ONE_MOMENT_MAX = 20_000
"""More callbacks than any sane run takes without that time passes."""
CPU_SECONDS_MAX = 90.0
"""Real time of the processor that a run may take; a common one takes one."""
WATCHED_STEPS = 2_000
"""The last callbacks before the end, of which a report tells who ran them."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class KillableTask:
    """Who can be stopped. `held` are the steps that came due meanwhile."""

    def __init__(self) -> None:
        self.stopped = False
        self.held: deque[asyncio.Handle] = deque()


OWNER: ContextVar[KillableTask | None] = ContextVar("OWNER", default=None)
"""The process that the present code belongs to; None for the simulation itself."""


class _Task(asyncio.Task[T]):
    """A task that lies in a set where its number puts it, and not where its address does."""

    number = 0

    @override
    def __hash__(self) -> int:
        return self.number

    @override
    def __eq__(self, other: object) -> bool:
        return self is other


class StalledError(Exception):
    """Nothing is ready and no timer is set, or nothing comes to an end: the run cannot go on."""


class EndlessStepError(Exception):
    """One step of a service ran for so long that it never would have come to an end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks as asyncio does, in virtual time."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, chance: Random) -> None:
        super().__init__()
        self._chance = chance
        self._now: Seconds = 0.0
        self._outside = Context()
        self._tasks: list[asyncio.Task[Any]] = []
        self.steps = 0
        """Callbacks that were run."""
        self._moment = 0
        """Callbacks that were run before time passed last."""
        self._ran: Counter[str] = Counter()
        """Of the last WATCHED_STEPS, who ran how many."""

    @override
    def time(self) -> Seconds:
        return self._now

    def outside(self, delay: Seconds, act: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """Have the world itself do something in exactly `delay` seconds, whoever is killed meanwhile."""
        return super().call_at(self._now + delay, act, *arguments, context=self._outside)

    def launch(self, work: Coroutine[Any, Any, None], context: Context) -> None:
        """Start a task that belongs to whoever `context` says. It is kept among the unfinished, and not awaited."""
        task = self.create_task(work, context=context.copy())
        assert not task.done()

    def release(self, owner: KillableTask) -> None:
        """Let a stopped process go on where it stood."""
        owner.stopped = False
        self._ready.extend(owner.held)
        owner.held.clear()

    @property
    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Every task that has not ended, those of killed processes included. The loop keeps them all alive: one
        that is collected while it waits would run its `finally` at a moment that no seed chooses."""
        return [task for task in self._tasks if not task.done()]

    @override
    def close(self) -> None:
        """And let go of the tasks: who keeps a clock, as FastAPI's caches do, keeps this loop, too."""
        super().close()
        self._tasks.clear()

    @override
    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task: _Task[T] = _Task.__new__(_Task)
        task.number = len(self._tasks)  # first: asyncio puts it into a set while it is made
        task.__init__(coro, loop=self, name=None if name is None else str(name), context=context)  # type: ignore[misc]
        self._tasks.append(task)
        return task

    @override
    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        late = self._chance.random() * TIMER_LATENESS_SECONDS_MAX
        return super().call_at(when + late, callback, *args, context=context)

    @override
    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Runs it now: threads have an order of their own."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who awaits it
            done.set_exception(error)
        return done

    @override
    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    @contextmanager
    def breaking_endless_steps(self, tell: Callable[[str], None]) -> Iterator[None]:
        """While the context is open, a step that keeps the processor for long is told of and broken off, before it has
        filled the memory. In the main thread only, where signals arrive."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        seen = -1
        looks = 0

        def look(_signal: int, frame: FrameType | None) -> None:
            nonlocal seen, looks
            looks += 1
            if looks * STEP_CPU_SECONDS_MAX > CPU_SECONDS_MAX:
                endless = f"{CPU_SECONDS_MAX:g} s of the processor and no end, at step {self.steps}"
                tell(endless)
                raise EndlessStepError(endless)
            if self.steps == seen:
                where = frame.f_code.co_qualname if frame is not None else "nobody knows where"
                endless = f"a step does not come to an end, in {where}"
                tell(endless)
                raise EndlessStepError(endless)
            seen = self.steps

        before = signal.signal(signal.SIGVTALRM, look)
        signal.setitimer(signal.ITIMER_VIRTUAL, STEP_CPU_SECONDS_MAX, STEP_CPU_SECONDS_MAX)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)

    def _run_once(self) -> None:
        """One turn: what is due joins what is ready, and what is ready now runs. (asyncio's own hook.)"""
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._drop_timer()
        if not ready and not self._stopping:
            if not scheduled:
                stalled = "everybody waits and nothing is due"
                raise StalledError(stalled)
            if scheduled[0].when() > self._now:
                self._now, self._moment = scheduled[0].when(), self.steps
        while scheduled and scheduled[0].when() <= self._now:
            ready.append(self._drop_timer())
        for _ in range(len(ready)):
            self._step(ready.popleft())
        here = self.steps - self._moment
        if self.steps > STEPS_MAX or here > STEPS_AT_ONE_MOMENT_MAX:
            who = ", ".join(f"{count} times {name}" for name, count in self._ran.most_common(3))
            what = f"{here} without that time passes" if here > STEPS_AT_ONE_MOMENT_MAX else "no end"
            endless = f"{self.steps} steps and {what}, at {self._now:.3f}; of the last {WATCHED_STEPS} {who}"
            raise StalledError(endless)

    def _step(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        owner = _context_of(handle).get(OWNER)
        if owner is not None and owner.stopped:
            owner.held.append(handle)
            return
        self.steps += 1
        if min(STEPS_MAX - self.steps, STEPS_AT_ONE_MOMENT_MAX - self.steps + self._moment) < WATCHED_STEPS:
            self._ran[_told(handle)] += 1
        elif self._ran:
            self._ran.clear()
        handle._run()

    def _drop_timer(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False  # type: ignore[attr-defined]
        return handle

    def _write_to_self(self) -> None:
        """Nobody is asleep."""

    def _process_events(self, event_list: object) -> None:
        """There are none."""


def _told(handle: asyncio.Handle) -> str:
    callback = cast(Any, handle)._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        while getattr(coroutine, "cr_await", None) is not None and hasattr(coroutine.cr_await, "cr_code"):
            coroutine = coroutine.cr_await
        return f"the task {owner.get_name()} in {getattr(coroutine, '__qualname__', coroutine)}"
    return str(getattr(callback, "__qualname__", callback))


def _context_of(handle: asyncio.Handle) -> Context:
    context: Context = cast(Any, handle)._context
    return context
