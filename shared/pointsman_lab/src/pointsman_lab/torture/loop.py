"""An event loop on virtual time: when no callback is ready, time jumps to the next timer. No sockets, threads or
signals; executor work runs in place. The seed orders callbacks that are due together. A callback belongs to the process
of its context, so that a process can be killed or paused between any two steps."""

import asyncio
import heapq
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import Context, ContextVar
from random import Random
from types import FrameType
from typing import Any, TypeVar, cast

from typing_extensions import ParamSpec, TypeVarTuple, Unpack, override

from pointsman.primitives import EngineSeconds

TIMER_LATENESS_SECONDS_MAX = 0.0005
MOMENT_SECONDS = 1e-6
STEP_CPU_SECONDS_MAX = 5.0
STEPS_MAX = 400_000
STEPS_AT_ONE_MOMENT_MAX = 20_000
CPU_SECONDS_MAX = 90.0
WATCHED_STEPS = 2_000
P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class KillableTask:
    """`held`: steps that came due while stopped."""

    def __init__(self) -> None:
        self.stopped = False
        self.held: deque[asyncio.Handle] = deque()


OWNER: ContextVar[KillableTask | None] = ContextVar("OWNER", default=None)
"""The process of the current code; None for the simulation itself."""


class _Task(asyncio.Task[T]):
    """Hashes by number, not by address: sets of tasks iterate in a repeatable order."""

    number = 0

    @override
    def __hash__(self) -> int:
        return self.number

    @override
    def __eq__(self, other: object) -> bool:
        return self is other


class StalledError(Exception):
    """No callback is ready and no timer is set, or the run does not end."""


class EndlessStepError(Exception):
    """One step of a service does not return."""


class InPlace(Executor):
    """Does the work at once, where it is submitted: threads are not repeatable."""

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who awaits it
            done.set_exception(error)
        return done


class VirtualLoop(asyncio.BaseEventLoop):
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, chance: Random) -> None:
        super().__init__()
        self._chance = chance
        self._now: EngineSeconds = 0.0
        self._outside = Context()
        self._tasks: list[asyncio.Task[Any]] = []
        self.steps = 0
        self._steps_max = STEPS_MAX
        self._moment = 0
        self._ran: Counter[str] = Counter()

    @override
    def time(self) -> EngineSeconds:
        return self._now

    def outside(self, delay: EngineSeconds, act: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """Runs `act` outside of all processes in exactly `delay` seconds."""
        return super().call_at(self._now + delay, act, *arguments, context=self._outside)

    def allow_more(self) -> None:
        """As many steps again, for the end of a run that stalled."""
        self._steps_max = self.steps + STEPS_MAX
        self._moment = self.steps

    def launch(self, work: Coroutine[Any, Any, None], context: Context) -> None:
        """Starts a task of the process of `context`. It is not awaited."""
        task = self.create_task(work, context=context.copy())
        assert not task.done()

    def release(self, owner: KillableTask) -> None:
        owner.stopped = False
        self._ready.extend(owner.held)
        owner.held.clear()

    @property
    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Keeps all tasks alive, those of killed processes included: a collected task would run its `finally` at a
        moment that no seed chooses."""
        return [task for task in self._tasks if not task.done()]

    @override
    def close(self) -> None:
        """Also releases the tasks: FastAPI's caches keep this loop alive."""
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
        """Runs it in place: threads are not repeatable."""
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
    def breaking_endless_steps(self, report: Callable[[str], None]) -> Iterator[None]:
        """Reports and aborts a step that exceeds its CPU time. In the main thread only, where signals arrive."""
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
                report(endless)
                raise EndlessStepError(endless)
            if self.steps == seen:
                where = frame.f_code.co_qualname if frame is not None else "an unknown place"
                endless = f"a step does not come to an end, in {where}"
                report(endless)
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
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._drop_timer()
        if not ready and not self._stopping:
            if not scheduled:
                raise StalledError("all tasks wait and nothing is due")
            if scheduled[0].when() > self._now:
                self._now, self._moment = scheduled[0].when(), self.steps
        while scheduled and scheduled[0].when() <= self._now:
            ready.append(self._drop_timer())
        for _ in range(len(ready)):
            self._step(ready.popleft())
        here = self.steps - self._moment
        if self.steps > self._steps_max or here > STEPS_AT_ONE_MOMENT_MAX:
            who = ", ".join(f"{count} times {name}" for name, count in self._ran.most_common(3))
            what = f"{here} without that time passes" if here > STEPS_AT_ONE_MOMENT_MAX else "no end"
            raise StalledError(f"{self.steps} steps and {what}, at {self._now:.3f}; of the last {WATCHED_STEPS} {who}")

    def _step(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:
            return
        owner = _context_of(handle).get(OWNER)
        if owner is not None and owner.stopped:
            owner.held.append(handle)
            return
        self.steps += 1
        if min(self._steps_max - self.steps, STEPS_AT_ONE_MOMENT_MAX - self.steps + self._moment) < WATCHED_STEPS:
            self._ran[_description(handle)] += 1
        elif self._ran:
            self._ran.clear()
        handle._run()

    def _drop_timer(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False  # type: ignore[attr-defined]
        return handle

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: object) -> None:
        pass


def _description(handle: asyncio.Handle) -> str:
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
