"""Which repeated joins are engine restarts.

A worker also joins again, under a new epoch, when retention dropped its first join; it then sends a snapshot of its
engine's cache at once. So the next cache event decides: a snapshot means no restart.
"""

from pointsman.contracts.cache import CacheEvent, CacheSnapshot
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceJoined
from pointsman.primitives import InstanceId


class Restarts:
    """Takes a log's events in order and returns restarts as soon as they are certain."""

    def __init__(self) -> None:
        self._open: dict[InstanceId, InstanceJoined] = {}

    def take(self, event: LogEvent, *, was_there: bool) -> InstanceJoined | None:
        """The join of a restarted engine, if this event proves it. `was_there`: the instance was in the fleet before."""
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
        """Joins without a later cache event: empty caches, so restarts."""
        return list(self._open.values())
