"""Lines for standard output, written beside the event loop: who reads them slowly, or not at all, holds up nobody.

Lines are gathered for FLUSH_WALL_SECONDS and written together by a thread. What was gathered last is lost where a process
dies; what a reader does not take is bounded by PENDING_BYTES_MAX, and left out beyond it.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO, Self

import structlog

from pointsman.primitives import Seconds

log = structlog.get_logger()

FLUSH_WALL_SECONDS: Seconds = 0.2
CLOSE_WALL_SECONDS: Seconds = 1.0
"""How long the last lines may take."""

PENDING_BYTES_MAX = 4 * 1024 * 1024


class LineWriter:
    """Use as a context manager, within a running loop; its methods are for that loop's thread."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lines")
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False

    def write(self, line: bytes) -> bool:
        """Take a line, without its end. False where it is left out."""
        if self._pending_bytes + len(line) > PENDING_BYTES_MAX:
            return False
        self._pending.append(line)
        self._pending_bytes += len(line) + 1
        if self._timer is None and not self._writing:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_WALL_SECONDS, self._flush)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what is left. Waits for it, but not for a reader that does not read."""
        if self._timer is not None:
            self._timer.cancel()
        last = threading.Event()
        data = self._take()
        if data:
            self._thread.submit(self._put, data)
        self._thread.submit(last.set)
        last.wait(CLOSE_WALL_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _flush(self) -> None:
        self._timer = None
        self._writing = True
        written = asyncio.get_running_loop().run_in_executor(self._thread, self._put, self._take())
        written.add_done_callback(self._written)

    def _written(self, written: "asyncio.Future[None]") -> None:
        self._writing = False
        if written.cancelled():
            return
        if error := written.exception():
            log.warning("lines_not_written", reason=str(error))
        if self._pending and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_WALL_SECONDS, self._flush)

    def _take(self) -> bytes:
        data = b"".join(line + b"\n" for line in self._pending)
        self._pending, self._pending_bytes = [], 0
        return data

    def _put(self, data: bytes) -> None:
        self._out.write(data)
        self._out.flush()
