"""A log in one gzip file of JSON lines: a header (perhaps with a checkpoint), the entries as `pointsman tap --json`
prints them, and their count. Without a count the file is truncated; output of `tap` has neither. A stranger may have
made it: what it unpacks to, its lines and its names are bounded."""

import gzip
import io
import os
import secrets
import zlib
from base64 import b64decode, b64encode
from collections.abc import Generator, Iterable, Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import IO, Annotated, NoReturn

import msgspec
from typing_extensions import override

from pointsman.adapters.owner_only import OWNER_ONLY
from pointsman.contracts.codec import PAYLOAD_BYTES_MAX, short_reason
from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman.simulation.replay import BaseState
from pointsman.simulation.replay.folding import recorded_pool_settings
from pointsman.state.state import PoolSettings
from pointsman_cli.history.checkpoint import ExportedCheckpoint, proven
from pointsman_cli.history.entries import SUBJECT_LENGTH_MAX, Header, History, HistoryError

FORMAT = "pointsman-log"
FORMAT_VERSION = 1
COMPRESSION_LEVEL = 6
GZIP_MAGIC = b"\x1f\x8b"
MEBIBYTE = 1024 * 1024
BUFFER_BYTES = MEBIBYTE
LINE_BYTES_MAX = 2 * PAYLOAD_BYTES_MAX
FIRST_LINE_BYTES_MAX = 256 * 1024**2
"""Header with checkpoint, also at most FIRST_LINE_EXPANSION_MAX times the file size."""
FIRST_LINE_EXPANSION_MAX = 16
CHECKPOINT_BYTES_MIN = MEBIBYTE
"""A header with a checkpoint may have this size in a small file, too."""
EXPANSION_MAX = 300
"""Unpacked over packed bytes. Logs have 7 to 10, and more than 50 where requests share long prompts; deflate ends at 1,032."""
UNPACKED_BYTES_MIN = 2 * LINE_BYTES_MAX
"""Small files may unpack to this, whatever their expansion."""
DRAFT_BYTES = 8


class _First(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: str
    version: int
    header: Header
    checkpoint: ExportedCheckpoint | None = None


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sequence: Sequence
    subject: Annotated[str, msgspec.Meta(max_length=SUBJECT_LENGTH_MAX)]
    event: msgspec.Raw = msgspec.Raw(b"")
    payload: str = ""
    problem: str = ""


class _Last(msgspec.Struct, frozen=True, kw_only=True):
    entries: int
    last: Sequence


UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
_encoder = msgspec.json.Encoder()
_lines = msgspec.json.Decoder(_Line)


class BundleHistory(History):
    """A file written by `pointsman export` or `pointsman tap --json`. Raises HistoryError."""

    def __init__(self, file: Path, *, origin: str = "") -> None:
        self._file = file
        self.origin = origin or f"the file {file}"
        with self._opened() as stream:
            line = next(self._lines_of(stream), b"")
        first = _first_line(line, self.origin)
        self._bare = isinstance(first, _Line)
        self._checkpoint = None if isinstance(first, _Line) else first.checkpoint
        bytes_max = max(CHECKPOINT_BYTES_MIN, FIRST_LINE_EXPANSION_MAX * self._size())
        if self._checkpoint is not None and len(line) > bytes_max:
            self._refuse(f"has a checkpoint of more than {bytes_max / MEBIBYTE:,.0f} MiB")
        self.header = Header(first=first.sequence) if isinstance(first, _Line) else first.header

    @override
    @cached_property
    def known(self) -> BaseState | None:
        return None if self._checkpoint is None else proven(self, self._checkpoint)

    @override
    @cached_property
    def settings(self) -> PoolSettings:
        named = self.header.pool_settings
        try:
            return recorded_pool_settings(named) if named else super().settings
        except ValueError as error:
            raise HistoryError(
                f"{self.origin} names settings of its pool that cannot be: {short_reason(error)}"
            ) from error

    @override
    @cached_property
    def guesses_settings(self) -> bool:
        return not self.header.pool_settings and super().guesses_settings

    @override
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        with self._opened() as stream:
            if not self._bare:
                next(self._lines_of(stream))
            yield from self._read(stream, start)

    def _read(self, stream: IO[bytes], start: Sequence) -> Iterator[LogEntry]:
        decode = _lines.decode
        count = 0
        for line in self._lines_of(stream):
            try:
                read = decode(line)
                payload = bytes(read.event) or b64decode(read.payload, validate=True)
            except UNREADABLE as error:
                if not self._bare and self._is_count(line, count):
                    return
                raise HistoryError(
                    f"{self.origin}, line {count + 2 - self._bare}, is no log entry: {short_reason(error)}"
                ) from error
            count += 1
            if read.sequence >= start:
                yield LogEntry.read(read.sequence, read.subject, payload)
        if not self._bare:
            raise HistoryError(
                f"{self.origin} ends after {count} entries without saying so: it was cut off; export it again"
            )

    def _is_count(self, line: bytes, count: int) -> bool:
        try:
            last = msgspec.json.decode(line, type=_Last)
        except UNREADABLE:
            return False
        if last.entries != count:
            raise HistoryError(
                f"{self.origin} has {count} entries, but its count is {last.entries}: it is damaged; export it again"
            )
        return True

    def _lines_of(self, stream: IO[bytes]) -> Iterator[bytes]:
        size = self._size()
        bytes_max = min(FIRST_LINE_BYTES_MAX, max(LINE_BYTES_MAX, FIRST_LINE_EXPANSION_MAX * size))
        left = max(UNPACKED_BYTES_MIN, EXPANSION_MAX * size)
        try:
            while line := stream.readline(bytes_max + 1):
                if len(line) > bytes_max:
                    self._refuse(f"has a line of more than {bytes_max / MEBIBYTE:,.0f} MiB")
                left -= len(line)
                if left < 0:
                    self._refuse(f"unpacks to more than {EXPANSION_MAX} times its {size / MEBIBYTE:,.1f} MiB")
                yield line
                bytes_max = LINE_BYTES_MAX
        except (OSError, EOFError, zlib.error) as error:
            raise HistoryError(
                f"{self.origin} cannot be read to its end ({error}): it was cut off or damaged"
            ) from error

    def _refuse(self, how: str) -> NoReturn:
        raise HistoryError(f"{self.origin} {how}: it is not a log of ours")

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except OSError:
            return 0

    def _opened(self) -> IO[bytes]:
        try:
            with self._file.open("rb") as file:
                packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            return io.BufferedReader(gzip.open(self._file), BUFFER_BYTES) if packed else self._file.open("rb")
        except OSError as error:
            raise HistoryError(f"{self.origin} cannot be opened: {error.strerror}") from error


def write_bundle(
    file: Path, header: Header, entries: Iterable[LogEntry], checkpoint: ExportedCheckpoint | None = None
) -> int:
    """Write atomically; returns the number of entries. Raises OSError, HistoryError."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(DRAFT_BYTES)}.part")
    try:
        created = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, OWNER_ONLY)
        with os.fdopen(created, "wb") as owned:
            count = stream_bundle(owned, header, entries, checkpoint)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return count


def stream_bundle(
    stream: IO[bytes], header: Header, entries: Iterable[LogEntry], checkpoint: ExportedCheckpoint | None = None
) -> int:
    """Returns the number of entries. Raises OSError, HistoryError; what is written by then counts as truncated."""
    header = msgspec.structs.replace(header, pointsman=version("pointsman"))
    first = _First(format=FORMAT, version=FORMAT_VERSION, header=header, checkpoint=checkpoint)
    with gzip.GzipFile("", "wb", compresslevel=COMPRESSION_LEVEL, fileobj=stream) as packed:
        sink = io.BufferedWriter(packed, BUFFER_BYTES)
        count = _write(sink, first, entries)
        sink.flush()
    return count


def _write(sink: IO[bytes], first: _First, entries: Iterable[LogEntry]) -> int:
    sink.write(_encoder.encode(first) + b"\n")
    count, last = 0, 0
    for entry in entries:
        sink.write(_encoder.encode(_line(entry)) + b"\n")
        count, last = count + 1, entry.sequence
    sink.write(_encoder.encode(_Last(entries=count, last=last)) + b"\n")
    return count


def _line(entry: LogEntry) -> _Line:
    payload = entry.payload
    if entry.event is not None and b"\n" not in payload:
        return _Line(sequence=entry.sequence, subject=entry.subject, event=msgspec.Raw(payload))
    packed = b64encode(payload).decode()
    return _Line(sequence=entry.sequence, subject=entry.subject, payload=packed, problem=entry.problem)


def _first_line(line: bytes, origin: str) -> _First | _Line:
    """The header, or the first entry of a file without one. Raises HistoryError."""
    try:
        first = msgspec.json.decode(line, type=_First)
    except UNREADABLE:
        try:
            return _lines.decode(line)
        except UNREADABLE as error:
            raise HistoryError(
                f"{origin} is no log: neither an SQLite archive, nor what `pointsman export` writes, nor the JSON lines"
                " of `pointsman tap --since 1 --until now --json`"
            ) from error
    if first.format != FORMAT or first.version != FORMAT_VERSION:
        raise HistoryError(
            f"{origin} has format {first.format} {first.version}; this version reads {FORMAT} {FORMAT_VERSION}"
        )
    return first
