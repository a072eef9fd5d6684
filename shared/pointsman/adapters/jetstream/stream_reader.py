"""What the readers of a stream share: `consumer.Reader` for services, `direct_reader.DirectReader` for people."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from pointsman.adapters.jetstream.connection import Connection
from pointsman.adapters.jetstream.stream import Stream
from pointsman.adapters.log_listener import LogListener
from pointsman.ports import LogEntry, LogReset
from pointsman.primitives import Sequence


class StreamReader(ABC):
    def __init__(
        self, connection: Connection, stream: Stream, listener: LogListener, at_end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._listener = listener
        self._at_end = at_end

    async def next(self) -> LogEntry | LogReset:
        while True:
            found = await self._step()
            if isinstance(found, LogReset):
                self._listener.reset(found.reason)
            if found is not None:
                return found

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _step(self) -> LogEntry | LogReset | None:
        """Read or wait once; None if nothing came of it."""

    def _entry(self, sequence: Sequence, subject: str, payload: bytes) -> LogEntry:
        entry = self._stream.entry(sequence, subject, payload)
        if entry.event is None:
            self._listener.undecodable(entry.subject, entry.problem)
        return entry
