"""Tells engine restarts from other repeated joins, which are followed by a snapshot of the cache."""

from pointsman.contracts.cache import CacheEvent, CacheSnapshot
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceJoined
from pointsman.primitives import InstanceId


class Restarts:
    def __init__(self) -> None:
        self._open: dict[InstanceId, InstanceJoined] = {}

    def take(self, event: LogEvent, *, was_there: bool) -> InstanceJoined | None:
        """The join of a restarted engine, if this event proves it."""
        match event:
            case InstanceJoined():
                earlier = self._open.pop(event.instance, None)
                if was_there:
                    self._open[event.instance] = event
                return earlier
            case CacheEvent():
                joined = self._open.pop(event.instance, None)
                return None if isinstance(event, CacheSnapshot) else joined
            case _:
                return None

    def open(self) -> list[InstanceJoined]:
        return list(self._open.values())
