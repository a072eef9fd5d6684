"""Compares the cached tokens that engines report for finished requests with their cache events. Returns prefixes that
count as held while events are not relied on (`ReportedHits`), and reports events that deliveries contradict twice
within a minute (`Contradictions`)."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from pointsman.contracts.block_keys import KEY_BYTES, find_packed, pack_keys, unpack_keys
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, Sequence

DELIVERED_KEYS_MAX = 65_536
REMOVALS_REMEMBERED_MAX = 16_384
"""Per instance. Requests placed before the oldest are not compared."""
FORGOTTEN_AT = 3
"""Times as many, repeats included, before any is forgotten: to look for repeats at each removal takes longer."""
SUSPICIONS_MAX = 16
SETTLING_WALL_SECONDS = 3.0
"""Time for an event that explains a contradiction: a lost batch is requested after two seconds."""
CONTRADICTIONS_MAX = 2
"""Within CONTRADICTIONS_WALL_SECONDS; one alone may be a race."""
CONTRADICTIONS_WALL_SECONDS = 60.0


def forget_oldest(known: dict[BlockKey, EngineSeconds], kept_max: int) -> None:
    """One pass over a dict's start, which keeps the places of deleted keys: a pass for each key would be quadratic."""
    for key in list(islice(known, max(0, len(known) - kept_max))):
        del known[key]


def forget_until(known: dict[BlockKey, EngineSeconds], now: EngineSeconds) -> None:
    """`known`: keys with their ends, the earliest first."""
    for key in list(takewhile(lambda key: known[key] <= now, known)):
        del known[key]


class ReportedHits:
    def __init__(self) -> None:
        self._until: dict[InstanceId, dict[BlockKey, EngineSeconds]] = {}

    def learn(self, instance: InstanceId, keys: list[BlockKey], until: EngineSeconds) -> None:
        if not keys:
            return
        known = self._until.setdefault(instance, {})
        for key in keys:
            known.pop(key, None)
            known[key] = until
        forget_oldest(known, DELIVERED_KEYS_MAX)

    def remove(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        known = self._until.get(instance)
        if known is not None:
            for key in keys:
                known.pop(key, None)

    def drop(self, instance: InstanceId) -> None:
        self._until.pop(instance, None)

    def settle(self, now: EngineSeconds) -> None:
        for instance, known in list(self._until.items()):
            forget_until(known, now)
            if not known:
                del self._until[instance]

    def keys(self, instance: InstanceId) -> frozenset[BlockKey]:
        return frozenset(self._until.get(instance, ()))

    def extend_hits(self, keys: list[BlockKey], hits: dict[InstanceId, int]) -> None:
        """Raise `hits` (leading blocks by instance) to the delivered blocks."""
        for instance, known in self._until.items():
            depth = hits.get(instance, 0)
            while depth < len(keys) and keys[depth] in known:
                depth += 1
            if depth:
                hits[instance] = depth


@dataclass(slots=True)
class _Suspicion:
    key: BlockKey
    held: bool
    reason: str
    since: EngineSeconds | None = None
    """First report after it, worker's clock."""


class Removals:
    """The newest blocks that an instance removed since log entry `known_from`, more than REMOVALS_REMEMBERED_MAX of them. An
    event is remembered as it came: most are never asked about."""

    def __init__(self, known_from: Sequence = 0) -> None:
        self.known_from = known_from
        self._sequences: deque[Sequence] = deque()
        self._keys: deque[bytes] = deque()
        """Packed; now and then rid of repeats."""
        self._count = 0

    def add(self, packed: bytes, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        self._keys.append(packed)
        self._count += len(packed) // KEY_BYTES
        newer = self._count - len(self._keys[0]) // KEY_BYTES
        if self._count > FORGOTTEN_AT * REMOVALS_REMEMBERED_MAX and newer > REMOVALS_REMEMBERED_MAX:
            self._forget()

    def has(self, key: BlockKey, as_of: Sequence) -> bool:
        """Whether it was removed after log entry `as_of`."""
        sought = pack_keys([key])
        return any(find_packed(packed, sought) >= 0 for packed in self._after(as_of))

    def all_known(self, as_of: Sequence) -> bool:
        """Whether all that was removed after `as_of` is remembered: no more than REMOVALS_REMEMBERED_MAX blocks."""
        after = list(self._after(as_of))
        count = sum(map(len, after)) // KEY_BYTES
        return self.known_from <= as_of and (
            count <= REMOVALS_REMEMBERED_MAX or len(set(unpack_keys(b"".join(after)))) <= REMOVALS_REMEMBERED_MAX
        )

    def _after(self, as_of: Sequence) -> Iterator[bytes]:
        for sequence, packed in zip(reversed(self._sequences), reversed(self._keys), strict=True):
            if sequence <= as_of:
                return
            yield packed

    def _forget(self) -> None:
        seen: set[BlockKey] = set()
        sequences, keys = self._sequences, self._keys
        self._sequences, self._keys, self._count = deque(), deque(), 0
        while sequences and len(seen) <= REMOVALS_REMEMBERED_MAX:
            sequence, packed = sequences.pop(), keys.pop()
            fresh = set(unpack_keys(packed)) - seen
            if len(fresh) * KEY_BYTES < len(packed):
                packed = pack_keys(sorted(fresh))
            if fresh:
                seen |= fresh
                self._sequences.appendleft(sequence)
                self._keys.appendleft(packed)
                self._count += len(fresh)


class Contradictions:
    """Times are wall seconds."""

    def __init__(self) -> None:
        self._removals: dict[InstanceId, Removals] = {}
        self._stored_at: dict[InstanceId, Sequence] = {}
        self._open: dict[InstanceId, list[_Suspicion]] = {}
        self._found: dict[InstanceId, list[EngineSeconds]] = {}

    def begin(self, instance: InstanceId, sequence: Sequence) -> None:
        """The index of the instance was replaced; earlier entries do not count."""
        self.drop(instance)
        self._removals[instance] = Removals(sequence)

    def drop(self, instance: InstanceId) -> None:
        for kept in (self._removals, self._stored_at, self._open, self._found):
            kept.pop(instance, None)

    def stored(self, instance: InstanceId, sequence: Sequence) -> None:
        self._stored_at[instance] = sequence

    def stored_after(self, instance: InstanceId, as_of: Sequence) -> bool:
        """The index has more than a decision as of log entry `as_of` could know."""
        return self._stored_at.get(instance, 0) > as_of

    def removed(self, instance: InstanceId, packed: bytes, sequence: Sequence) -> None:
        """`packed`: block keys."""
        removals = self._removals.get(instance)
        if removals is None:
            removals = self._removals[instance] = Removals()
        removals.add(packed, sequence)
        if instance in self._open:
            gone = set(unpack_keys(packed))
            self._open[instance] = [suspicion for suspicion in self._open[instance] if suspicion.key not in gone]

    def explained(self, instance: InstanceId, key: BlockKey, as_of: Sequence) -> bool:
        removals = self._removals.get(instance)
        return removals is not None and (removals.has(key, as_of) or not removals.all_known(as_of))

    def removed_after(self, instance: InstanceId, key: BlockKey, as_of: Sequence) -> bool:
        removals = self._removals.get(instance)
        return removals is not None and removals.has(key, as_of)

    def suspect(self, instance: InstanceId, key: BlockKey, as_of: Sequence, reason: str, *, held: bool) -> None:
        """A request placed as of log entry `as_of` contradicts the index."""
        suspicions = self._open.setdefault(instance, [])
        if len(suspicions) < SUSPICIONS_MAX and not self.explained(instance, key, as_of):
            suspicions.append(_Suspicion(key, held, reason))

    def is_open(self, instance: InstanceId) -> bool:
        """Whether reports that agree are needed to settle something."""
        return instance in self._open

    def settle(self, instance: InstanceId, at: EngineSeconds, holds: Callable[[BlockKey], bool]) -> str:
        """Called when a report agrees with the index. Returns how the engine contradicted its events, or an empty
        string."""
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
