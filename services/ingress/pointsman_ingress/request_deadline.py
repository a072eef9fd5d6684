"""How long a request is worth working on: until its client hangs up or its time is over.

ASGI tells of a hang-up only to who asks, so a small task asks for as long as the request lives. Whatever the request
is doing at that moment is interrupted there (by cancelling its task) and then ended in an orderly way.
"""

import asyncio
from types import TracebackType
from typing import Self

from pointsman.contracts.reasons import CancelCause
from pointsman.primitives import Seconds
from pointsman.runtime.health import Receive
from pointsman.runtime.supervision import Supervisor


class RequestDeadline:
    """Watches over the task that enters it. When `interruption` is set, the CancelledError there is its doing."""

    def __init__(self, supervisor: Supervisor, *, wall_seconds: Seconds) -> None:
        self._supervisor = supervisor
        self._wall_seconds = wall_seconds
        self._over = False
        self.interruption: CancelCause | None = None

    def watch(self, receive: Receive) -> None:
        """Look out for a hang-up from here on; the body must have been read."""
        self._supervisor.start(self._wait_for_hang_up(receive), name="hang-up")

    def recovered(self) -> bool:
        """Take the interruption back, so that the task can go on and end the request. False where the task was
        cancelled by somebody else: then it must stop."""
        if self.interruption is None:
            return False
        self._task.uncancel()
        return True

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a request is handled in a task"
        self._task = task
        self._timer = task.get_loop().call_later(self._wall_seconds, self._interrupt, CancelCause.TIMEOUT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        self._timer.cancel()

    async def _wait_for_hang_up(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._interrupt(CancelCause.CLIENT_GONE)

    def _interrupt(self, interruption: CancelCause) -> None:
        if not self._over and self.interruption is None:
            self.interruption = interruption
            self._task.cancel()
