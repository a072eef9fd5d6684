"""Writes lines to standard output from a thread, so that a slow reader does not block the process. Beyond
PENDING_BYTES_MAX lines are dropped and counted. Writes are whole lines within a pipe's atomic size, so processes may
share a pipe."""

import asyncio
import contextlib
import select
import threading
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import structlog

from pointsman.primitives import WallSeconds

log = structlog.get_logger()

FLUSH_WALL_SECONDS: WallSeconds = WallSeconds(0.2)
CLOSE_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
PIECE_BYTES_MAX = select.PIPE_BUF
PENDING_BYTES_MAX = 4 * 1024 * 1024


class Output(Protocol):
    def write(self, data: bytes, /) -> int | None: ...


class LineWriter:
    """Use as a context manager in a running loop's thread."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._loop = asyncio.get_running_loop()
        self._batches: SimpleQueue[list[bytes]] = SimpleQueue()
        self._ended = threading.Event()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False
        self._failing = False

    def write(self, line: bytes) -> bool:
        if self._pending_bytes + len(line) > PENDING_BYTES_MAX:
            return False
        self._pending.append(line)
        self._pending_bytes += len(line) + 1
        self._flush_soon()
        return True

    def __enter__(self) -> Self:
        # A daemon: the interpreter would wait for a blocked thread.
        threading.Thread(target=self._work, name="lines", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Flush; gives up on a reader that does not read."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pending:
            self._batches.put(self._take_pending())
        self._batches.put([])
        self._ended.wait(float(CLOSE_WALL_SECONDS))

    def _flush_soon(self) -> None:
        if self._timer is None and not self._writing:
            self._timer = self._loop.call_later(float(FLUSH_WALL_SECONDS), self._flush)

    def _flush(self) -> None:
        self._timer = None
        self._writing = True
        self._batches.put(self._take_pending())

    def _written(self, error: OSError | None) -> None:
        self._writing = False
        if error is not None and not self._failing:
            log.warning("lines_not_written", reason=str(error))
        self._failing = error is not None
        if self._pending:
            self._flush_soon()

    def _take_pending(self) -> list[bytes]:
        pieces: list[bytes] = []
        piece, size = list[bytes](), 0
        for line in self._pending:
            if piece and size + len(line) >= PIECE_BYTES_MAX:
                pieces.append(b"".join(piece))
                piece, size = [], 0
            piece += (line, b"\n")
            size += len(line) + 1
        self._pending, self._pending_bytes = [], 0
        return [*pieces, b"".join(piece)]

    def _work(self) -> None:
        while pieces := self._batches.get():
            failed = None
            try:
                self._write_all(pieces)
            except OSError as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._written, failed)
        self._ended.set()

    def _write_all(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            rest = piece
            while rest:
                rest = rest[self._out.write(rest) or 0 :]
