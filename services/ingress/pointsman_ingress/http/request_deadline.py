"""Cancels a request's task on disconnect or timeout. Our server reports disconnects by a callback; for others a task
reads `receive`."""

import asyncio
from functools import partial
from typing import Self

from pointsman.adapters.shared_timers import SharedTimer
from pointsman.contracts.reasons import CancelCause
from pointsman.runtime.health import Receive, Scope
from pointsman.runtime.http_protocol import WHEN_GONE
from pointsman.runtime.supervision import Supervisor


class RequestDeadline:
    """`cause`: CLIENT_GONE or TIMEOUT if the task was cancelled from here."""

    def __init__(self, supervisor: Supervisor, timer: SharedTimer) -> None:
        self._supervisor = supervisor
        self._timer = timer
        self._finished = False
        self.cause: CancelCause | None = None

    def watch(self, scope: Scope, receive: Receive) -> None:
        """Call after reading the body."""
        when_gone = scope.get(WHEN_GONE)
        if when_gone is not None:
            when_gone(partial(self._interrupt, CancelCause.CLIENT_GONE))
            return
        self._supervisor.start(self._wait_for_disconnect(receive), name="hang-up")

    def uncancel(self) -> CancelCause | None:
        """Undo a cancellation from here. Returns None if the task was cancelled elsewhere."""
        if self.cause is not None:
            self._task.uncancel()
        return self.cause

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a request is handled in a task"
        self._task = task
        self._number = self._timer.set(partial(self._interrupt, CancelCause.TIMEOUT))
        return self

    def __exit__(self, *_: object) -> None:
        self._finished = True
        self._timer.cancel(self._number)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._interrupt(CancelCause.CLIENT_GONE)

    def _interrupt(self, cause: CancelCause) -> None:
        if not self._finished and self.cause is None:
            self.cause = cause
            self._task.cancel()
