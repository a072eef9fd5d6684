"""What engines deliver from their caches, compared with what their events say.

In come cached tokens of finished requests; out come prefixes that count as held for a while where events are not relied
on (`ReportedHits`), and a verdict on events that deliveries contradict twice within a minute (`Contradictions`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.primitives import BlockKey, InstanceId, Seconds, Sequence

DELIVERED_KEYS_MAX = 65_536
"""Of one instance; the oldest are forgotten first."""
REMOVALS_REMEMBERED_MAX = 16_384
"""Of one instance. A request placed before the oldest proves nothing."""
SUSPICIONS_MAX = 16
"""Unsettled contradictions of one instance; further ones are ignored."""
SETTLING_WALL_SECONDS = 3.0
"""How long an event that explains a contradiction may take: a lost batch is requested after two seconds of silence."""
CONTRADICTIONS_MAX = 2
"""Within CONTRADICTIONS_WALL_SECONDS: the events are wrong. One alone may be a race."""
CONTRADICTIONS_WALL_SECONDS = 60.0


class ReportedHits:
    """Delivered blocks of each instance, until they expire or are removed."""

    def __init__(self) -> None:
        self._until: dict[InstanceId, dict[BlockKey, Seconds]] = {}
        """Expiry of each block, the earliest first."""

    def learn(self, instance: InstanceId, keys: list[BlockKey], until: Seconds) -> None:
        """These leading blocks count as held until then."""
        if not keys:
            return
        known = self._until.setdefault(instance, {})
        for key in keys:
            known.pop(key, None)
            known[key] = until
        while len(known) > DELIVERED_KEYS_MAX:
            del known[next(iter(known))]

    def remove(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        known = self._until.get(instance)
        if known is not None:
            for key in keys:
                known.pop(key, None)

    def drop(self, instance: InstanceId) -> None:
        self._until.pop(instance, None)

    def settle(self, now: Seconds) -> None:
        """Forget what has expired."""
        for instance, known in list(self._until.items()):
            while known and known[next(iter(known))] <= now:
                del known[next(iter(known))]
            if not known:
                del self._until[instance]

    def keys(self, instance: InstanceId) -> frozenset[BlockKey]:
        return frozenset(self._until.get(instance, ()))

    def extend_hits(self, keys: list[BlockKey], hits: dict[InstanceId, int]) -> None:
        """Raise `hits` (leading blocks by instance) to what was delivered."""
        for instance, known in self._until.items():
            depth = hits.get(instance, 0)
            while depth < len(keys) and keys[depth] in known:
                depth += 1
            if depth:
                hits[instance] = depth


@dataclass(slots=True)
class _Suspicion:
    """A delivery that contradicts the index about `key`."""

    key: BlockKey
    held: bool
    """What the index says."""
    reason: str
    since: Seconds | None = None
    """First report after it, by the worker's clock."""


class Contradictions:
    """Deliveries that events do not explain. Times are wall seconds."""

    def __init__(self) -> None:
        self._removed: dict[InstanceId, dict[BlockKey, Sequence]] = {}
        """Recently removed blocks with their log entry, the oldest first."""
        self._known_from: dict[InstanceId, Sequence] = {}
        """Removals up to this log entry are forgotten."""
        self._open: dict[InstanceId, list[_Suspicion]] = {}
        self._found: dict[InstanceId, list[Seconds]] = {}

    def begin(self, instance: InstanceId, sequence: Sequence) -> None:
        """The holdings were replaced at this log entry; nothing before it counts."""
        self.drop(instance)
        self._known_from[instance] = sequence

    def drop(self, instance: InstanceId) -> None:
        for kept in (self._removed, self._known_from, self._open, self._found):
            kept.pop(instance, None)

    def removed(self, instance: InstanceId, keys: list[BlockKey], sequence: Sequence) -> None:
        """Blocks removed at this log entry: contradictions about them are explained."""
        known = self._removed.setdefault(instance, {})
        for key in keys:
            known.pop(key, None)
            known[key] = sequence
        while len(known) > REMOVALS_REMEMBERED_MAX:
            self._known_from[instance] = known.pop(next(iter(known)))
        if instance in self._open:
            gone = set(keys)
            self._open[instance] = [suspicion for suspicion in self._open[instance] if suspicion.key not in gone]

    def explained(self, instance: InstanceId, key: BlockKey, as_of: Sequence) -> bool:
        """Whether the block was, or may have been, removed since this log entry."""
        return max(self._known_from.get(instance, 0), self._removed.get(instance, {}).get(key, 0)) > as_of

    def suspect(self, instance: InstanceId, key: BlockKey, as_of: Sequence, reason: str, *, held: bool) -> None:
        """A request placed as of log entry `as_of` contradicts the index about `key`."""
        suspicions = self._open.setdefault(instance, [])
        if len(suspicions) < SUSPICIONS_MAX and not self.explained(instance, key, as_of):
            suspicions.append(_Suspicion(key, held, reason))

    def settle(self, instance: InstanceId, at: Seconds, holds: Callable[[BlockKey], bool]) -> str:
        """Called when a report agrees with the index. Returns how the engine contradicted its events, or nothing."""
        waiting = []
        found = self._found.setdefault(instance, [])
        reason = ""
        for suspicion in self._open.pop(instance, ()):
            if suspicion.since is None:
                suspicion.since = at
            if at - suspicion.since < SETTLING_WALL_SECONDS:
                waiting.append(suspicion)
            elif holds(suspicion.key) == suspicion.held:
                found.append(at)
                reason = suspicion.reason
        if waiting:
            self._open[instance] = waiting
        found[:] = [when for when in found if at - when < CONTRADICTIONS_WALL_SECONDS]
        return reason if len(found) >= CONTRADICTIONS_MAX else ""
