"""In-memory lease, values and checkpoints under the contract suite of the JetStream ones; unavailable with their broker."""

import asyncio
from collections.abc import AsyncIterator, Callable

from typing_extensions import override

from pointsman.adapters.checkpoint_retention import CHECKPOINTS_KEPT, superseded
from pointsman.ports import (
    CheckpointLabel,
    Checkpoints,
    KeyValueStore,
    Lease,
    LeaseTakenError,
    StoredValue,
    StoreUnavailableError,
    Tenure,
    ValueChangedError,
    ValuesRead,
)
from pointsman.primitives import Sequence, Term

AWAY = "the broker is away"
POLLS_MISSED_MAX = 6
"""Before followers are told that nothing is read."""


class MemoryLease(Lease):
    def __init__(self, available: Callable[[], bool]) -> None:
        self._available = available
        self._tenure: Tenure | None = None

    def forget(self) -> None:
        """As after a restart of the server."""
        self._tenure = None

    @override
    async def look(self) -> Tenure | None:
        _require(self._available())
        return self._tenure

    @override
    async def put(self, holder: str, term: Term, *, after: int) -> Tenure:
        _require(self._available())
        revision = self._tenure.revision if self._tenure is not None else 0
        if revision != after:
            raise LeaseTakenError(f"the revision is {revision}, not {after}")
        self._tenure = Tenure(holder, term, revision + 1)
        return self._tenure


class MemoryKeyValueStore(KeyValueStore):
    def __init__(self, available: Callable[[], bool] = lambda: True, *, poll_seconds: float = 0.5) -> None:
        self._available = available
        self._poll_seconds = poll_seconds
        self._values: dict[str, StoredValue] = {}
        self._revision = 0
        self._incarnation = 0

    def recreate(self) -> None:
        """The store is deleted; the next write begins another."""
        self._values.clear()
        self._revision = 0
        self._incarnation += 1

    @override
    async def get(self, key: str) -> StoredValue | None:
        _require(self._available())
        return self._values.get(key)

    @override
    async def put(self, key: str, value: bytes, *, after: int) -> int:
        _require(self._available())
        known = self._values.pop(key, None)
        revision = known.revision if known is not None else 0
        if known is not None and revision != after:
            self._values[key] = known
        if revision != after:
            raise ValueChangedError(f"the revision is {revision}, not {after}")
        self._revision += 1
        self._values[key] = StoredValue(key, value, self._revision)
        return self._revision

    @override
    async def read(self, keys: str = "") -> ValuesRead:
        _require(self._available())
        found = self._followed(keys)
        return ValuesRead(found, whole=True, exists=bool(found))

    def _followed(self, keys: str) -> list[StoredValue]:
        return [value for name, value in self._values.items() if name.startswith(keys)]

    @override
    async def follow(self, keys: str = "") -> AsyncIterator[ValuesRead]:
        seen: tuple[int, int] | None = None
        polls_missed = 0
        while True:
            now = self._incarnation, self._revision
            if not self._available():
                polls_missed += 1
                if polls_missed == POLLS_MISSED_MAX:
                    yield ValuesRead([], whole=False, unread=AWAY)
            elif seen != now:
                same = seen is not None and seen[0] == now[0]
                after = seen[1] if same and seen is not None else 0
                followed = self._followed(keys)
                values = [value for value in followed if value.revision > after]
                seen, polls_missed = now, 0
                yield ValuesRead(values, whole=not same, exists=bool(followed))
            elif polls_missed:
                is_told = polls_missed >= POLLS_MISSED_MAX
                polls_missed = 0
                if is_told:
                    yield ValuesRead([], whole=False, exists=bool(self._values))
            await asyncio.sleep(self._poll_seconds)


class MemoryCheckpoints(Checkpoints):
    def __init__(self, available: Callable[[], bool]) -> None:
        self._available = available
        self._kept: dict[CheckpointLabel, bytes] = {}
        self._head_bytes: dict[CheckpointLabel, int] = {}

    @override
    async def save(
        self, label: CheckpointLabel, content: bytes, *, head_bytes: int = 0, log_begins: Sequence = 1
    ) -> None:
        _require(self._available())
        if len(self._kept) == CHECKPOINTS_KEPT:
            del self._kept[superseded(self._kept, label, log_begins=log_begins)]
        self._kept[label] = content
        self._head_bytes[label] = head_bytes

    @override
    async def labels(self) -> list[CheckpointLabel]:
        _require(self._available())
        return sorted(self._kept, key=lambda label: -label.as_of)

    @override
    async def load(self, label: CheckpointLabel) -> bytes | None:
        _require(self._available())
        return self._kept.get(label)

    @override
    async def load_head(self, label: CheckpointLabel) -> bytes | None:
        content, head_bytes = await self.load(label), self._head_bytes.get(label, 0)
        return content[:head_bytes] if content is not None and head_bytes else None


def _require(available: bool) -> None:
    if not available:
        raise StoreUnavailableError(AWAY)
