"""Instances that began anew, and those that only tell their story again.

A worker joins once more, under a new epoch, when retention has dropped its joining from the log, and says at once what
its engine holds: the engine stands as it stood. So of a joining the next cache event decides what it was; a snapshot
comes first only where there is a story to be told again.
"""

from pointsman.contracts.cache import CacheEvent, CacheSnapshot
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceJoined
from pointsman.primitives import InstanceId


class Restarts:
    """Shown a log's events in order, it says which engines started anew, as soon as that is known."""

    def __init__(self) -> None:
        self._open: dict[InstanceId, InstanceJoined] = {}

    def take(self, event: LogEvent, *, was_there: bool) -> InstanceJoined | None:
        """The joining of an engine that did start anew, where this event proves it. `was_there`: the event's instance was
        in the fleet before."""
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
        """Those of which the log says nothing more: they hold nothing, as an engine that started anew."""
        return list(self._open.values())
