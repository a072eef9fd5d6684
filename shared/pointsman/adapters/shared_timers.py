"""Deadlines of equal length share one timer of the event loop: to set and drop a timer costs as much as to send a message,
and nearly all deadlines are met. In: callbacks. Out: their calls, in order, when they are due."""

import asyncio
from collections.abc import Callable
from itertools import takewhile
from types import TracebackType

from typing_extensions import override

from pointsman.primitives import Seconds

LENGTHS_MAX = 64
"""Kept; further ones share nothing."""


class SharedTimers:
    def __init__(self) -> None:
        self._by_length: dict[Seconds, SharedTimer] = {}

    def of(self, seconds: Seconds) -> "SharedTimer":
        timer = self._by_length.get(seconds)
        if timer is None:
            timer = SharedTimer(seconds)
            if len(self._by_length) < LENGTHS_MAX:
                self._by_length[seconds] = timer
        return timer


class SharedTimer:
    """Of one event loop."""

    def __init__(self, seconds: Seconds) -> None:
        self.length = seconds
        self._due: dict[int, tuple[float, Callable[[], object]]] = {}
        """Loop time and callback; the next one first."""
        self._count = 0
        self._running = False

    def set(self, on_due: Callable[[], object]) -> int:
        """`on_due` must not raise. Returns a number for `cancel`."""
        loop = asyncio.get_running_loop()
        self._count += 1
        self._due[self._count] = loop.time() + self.length, on_due
        if not self._running:
            self._running = True
            loop.call_later(self.length, self._look, loop)
        return self._count

    def cancel(self, number: int) -> None:
        """Of one that is over: no effect."""
        self._due.pop(number, None)

    def limit(self) -> "Limit":
        return Limit(self)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._running = False
        now = loop.time()
        over = [
            (number, on_due) for number, (_, on_due) in takewhile(lambda item: item[1][0] <= now, self._due.items())
        ]
        for number, _ in over:
            del self._due[number]
        if self._due:
            self._running = True
            next_due, _ = next(iter(self._due.values()))
            loop.call_later(next_due - now, self._look, loop)
        for _, on_due in over:
            on_due()


class Interruption:
    """Raises TimeoutError where its context, in a task, is left after `fire`. As `asyncio.timeout` does, which costs several
    times as much."""

    __slots__ = ("_cancelling", "_task", "fired")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        """None outside of its context."""
        self._cancelling = 0
        self.fired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "what is interrupted runs in a task"
        self._task = task
        self._cancelling = task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None, "it was entered"
        if self.fired and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def fire(self) -> None:
        if self._task is not None and not self.fired:
            self.fired = True
            self._task.cancel()


class Limit(Interruption):
    """Fires when it is due."""

    __slots__ = ("_number", "_timer")

    def __init__(self, timer: SharedTimer) -> None:
        super().__init__()
        self._timer = timer

    @override
    def __enter__(self) -> None:
        super().__enter__()
        self._number = self._timer.set(self.fire)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel(self._number)
        super().__exit__(kind, error, traceback)
