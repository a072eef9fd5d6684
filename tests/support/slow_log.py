"""A log that its leader read late."""

from msgspec.structs import replace

from pointsman.contracts.codec import encode
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds


def read_late(
    entries: list[LogEntry], begin: EngineSeconds, end: EngineSeconds, delay: EngineSeconds
) -> list[LogEntry]:
    """What the leader decided from `begin` to `end` rests on what it had read `delay` seconds before."""
    known: list[tuple[EngineSeconds, int]] = []
    changed = []
    for entry in entries:
        event = entry.event
        assert event is not None
        if event.stamp is not None and begin <= event.at < end:
            as_of = max(sequence for at, sequence in known if at <= event.at - delay)
            event = replace(event, stamp=replace(event.stamp, as_of=as_of))
        known.append((event.at, entry.sequence))
        changed.append(LogEntry(entry.sequence, entry.subject, encode(event), event))
    return changed
