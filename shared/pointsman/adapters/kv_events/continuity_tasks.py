"""What the continuity of KV events is doing (one task a class) and what it remembers of the engine and of the replay socket."""

from dataclasses import dataclass, field
from hashlib import blake2b

from pointsman.adapters.kv_events.events import Cursor, EngineAttached, EngineRestarted
from pointsman.primitives import Seconds, Sequence

REPLAY_REST_SECONDS = 15.0
"""How long a replay socket that did not answer is left alone, so that live batches do not wait for it."""
RECENT_BATCHES_MAX = 4_096
"""Without a replay socket: fingerprints that are kept, to tell a repetition from a new engine."""
FINGERPRINT_BYTES = 16


@dataclass(slots=True)
class Verify:
    """Find out whether the engine's oldest batch from the cursor on is that very one."""

    cursor: Cursor
    attempts: int = 0
    matches: bool = False


@dataclass(slots=True)
class Begin:
    """Follow the engine from its first batch, or from the oldest that it still has."""

    announcement: type[EngineAttached | EngineRestarted]
    attempts: int = 0


@dataclass(slots=True)
class Resume:
    """Ask for everything from the last batch on. `ahead`: a later batch was seen, so an empty answer does not mean a new
    engine. `hole`: where the answer before had one; if the next has it too, it is the engine's. The rest is of one answer."""

    ahead: bool = False
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
    """Give out a live batch once what came before it was recovered or is known to be lost."""

    sequence: Sequence
    payload: bytes
    asked: bool = False


@dataclass(slots=True)
class ReplayHealth:
    """The replay socket: whether it `answers` now, whether it `gave` a batch ever, and until when it is left alone."""

    answers: bool
    gave: bool = False
    rests_until: Seconds = 0.0
    unproven_rests: int = 0

    def rest(self, now: Seconds, *, unproven: bool) -> None:
        self.unproven_rests += unproven
        self.rests_until = now + REPLAY_REST_SECONDS


@dataclass(slots=True)
class RecentBatches:
    """Fingerprints of the newest batches by sequence, in the order of arrival."""

    found: dict[Sequence, bytes] = field(default_factory=dict)

    def repeats(self, sequence: Sequence, payload: bytes) -> bool:
        return sequence in self.found and self.found[sequence] == fingerprint_of(payload)

    def arrives_late(self, sequence: Sequence) -> bool:
        """Whether the sequence was passed over as missing a short while ago on this connection."""
        return sequence not in self.found and min(self.found, default=sequence) < sequence

    def remember(self, sequence: Sequence, fingerprint: bytes) -> None:
        self.found[sequence] = fingerprint
        if len(self.found) > RECENT_BATCHES_MAX:
            del self.found[next(iter(self.found))]


def fingerprint_of(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=FINGERPRINT_BYTES).digest()
