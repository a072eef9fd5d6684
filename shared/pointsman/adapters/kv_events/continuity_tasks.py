"""Tasks of the continuity state machine, and its records of the replay socket and of recent batches."""

from dataclasses import dataclass, field
from hashlib import blake2b

from pointsman.adapters.kv_events.events import Cursor, EngineAttached, EngineRestarted
from pointsman.primitives import Seconds, Sequence

REPLAY_PAUSE_SECONDS = 15.0
"""Pause after a failed replay, so that live batches do not wait for it."""
RECENT_BATCHES_MAX = 4_096
"""Fingerprints kept to tell a duplicate from a new engine, without a replay socket."""
FINGERPRINT_BYTES = 16


@dataclass(slots=True)
class Verify:
    cursor: Cursor
    attempts: int = 0
    matches: bool = False


@dataclass(slots=True)
class Begin:
    announcement: type[EngineAttached | EngineRestarted]
    attempts: int = 0


@dataclass(slots=True)
class Resume:
    """Request all from the last batch on. `ahead`: a later batch was received, so an empty answer does not mean a new
    engine. `past`: the reading of the engine begins, or an answer had batches that were missed. `hole`: the previous answer's
    gap; if it repeats, it is the engine's. Other fields describe one answer."""

    ahead: bool = False
    past: bool = False
    failures: int = 0
    hole: Sequence | None = None
    expected: Sequence = 0
    new_hole: Sequence | None = None
    empty: bool = True
    torn: bool = False
    new_engine: bool = False
    recovered: int = 0
    answered: bool = False


@dataclass(slots=True)
class Deliver:
    """Deliver a live batch after earlier ones are recovered or known lost."""

    sequence: Sequence
    payload: bytes
    asked: bool = False


@dataclass(slots=True)
class ReplayHealth:
    """`answers`: as of the last request; `has_answered`: returned a batch at least once."""

    answers: bool
    has_answered: bool = False
    paused_until: Seconds = 0.0
    unproven_pauses: int = 0

    def pause(self, now: Seconds, *, unproven: bool) -> None:
        self.unproven_pauses += unproven
        self.paused_until = now + REPLAY_PAUSE_SECONDS


@dataclass(slots=True)
class RecentBatches:
    found: dict[Sequence, bytes] = field(default_factory=dict)

    def repeats(self, sequence: Sequence, payload: bytes) -> bool:
        return sequence in self.found and self.found[sequence] == fingerprint_of(payload)

    def arrives_late(self, sequence: Sequence) -> bool:
        return sequence not in self.found and min(self.found, default=sequence) < sequence

    def remember(self, sequence: Sequence, fingerprint: bytes) -> None:
        self.found[sequence] = fingerprint
        if len(self.found) > RECENT_BATCHES_MAX:
            del self.found[next(iter(self.found))]


def fingerprint_of(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=FINGERPRINT_BYTES).digest()
