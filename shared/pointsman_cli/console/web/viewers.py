"""Pages that change while somebody looks. Every page that has viewers is rendered once a second, and all its viewers get the
same bytes: what changed. A viewer that does not keep up is let go; its browser comes back and gets the whole page."""

import asyncio
from collections.abc import AsyncIterator, Callable

from pointsman.ports import Clock
from pointsman.primitives import WallSeconds
from pointsman.runtime.containment import contained
from pointsman_cli.console.pages.live import Parts, patch

VIEWERS_MAX = 64
PAGES_MAX = 32
FRAMES_BEHIND_MAX = 8
FRAME_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
QUIET_FRAMES = 15
"""Then a comment, so that a proxy does not end the stream."""
GOING_ON = b": still here\n\n"


class TooManyViewersError(Exception): ...


class Viewers:
    def __init__(self, parts_of: Callable[[str], Parts], clock: Clock) -> None:
        """`parts_of`: of a page, by its path and query."""
        self._parts_of = parts_of
        self._clock = clock
        self._shown: dict[str, Parts] = {}
        self._queues: dict[str, set[asyncio.Queue[bytes | None]]] = {}
        self.frames = 0

    @property
    def count(self) -> int:
        return sum(map(len, self._queues.values()))

    def check_room(self, page: str) -> None:
        """Raises TooManyViewersError."""
        if self.count >= VIEWERS_MAX or (page not in self._queues and len(self._queues) >= PAGES_MAX):
            raise TooManyViewersError

    async def stream(self, page: str) -> AsyncIterator[bytes]:
        """Raises TooManyViewersError."""
        self.check_room(page)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(FRAMES_BEHIND_MAX)
        self._queues.setdefault(page, set()).add(queue)
        try:
            if page not in self._shown:
                self._shown[page] = self._parts_of(page)
            yield _event(patch(None, self._shown[page]))
            while (frame := await queue.get()) is not None:
                yield frame
        finally:
            watching = self._queues.get(page, set())
            watching.discard(queue)
            if not watching:
                self._queues.pop(page, None)
                self._shown.pop(page, None)

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._clock.sleep_wall(FRAME_WALL_SECONDS)
            self.frames += 1
            for page in list(self._queues):
                with contained("console_page"):
                    self._send(page)
                await asyncio.sleep(0)

    def close(self) -> None:
        """Ends all streams, so that the server can stop."""
        for queues in self._queues.values():
            for queue in queues:
                _let_go(queue)

    def _send(self, page: str) -> None:
        after = self._parts_of(page)
        changes = patch(self._shown.get(page), after)
        self._shown[page] = after
        frame = _event(changes) if changes is not None else GOING_ON if self.frames % QUIET_FRAMES == 0 else None
        if frame is None:
            return
        for queue in list(self._queues.get(page, ())):
            try:
                queue.put_nowait(frame)
            except asyncio.QueueFull:
                _let_go(queue)


def _let_go(queue: asyncio.Queue[bytes | None]) -> None:
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)


def _event(changes: bytes | None) -> bytes:
    return b"data: " + (changes or b"{}") + b"\n\n"
