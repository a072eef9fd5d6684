"""In-memory lease and checkpoints under the contract suite of the JetStream ones; unavailable with their broker."""

from collections.abc import Callable

from typing_extensions import override

from pointsman.adapters.checkpoint_retention import CHECKPOINTS_KEPT, superseded
from pointsman.ports import CheckpointLabel, Checkpoints, Lease, LeaseTakenError, StoreUnavailableError, Tenure
from pointsman.primitives import Sequence, Term


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
            taken = f"the revision is {revision}, not {after}"
            raise LeaseTakenError(taken)
        self._tenure = Tenure(holder, term, revision + 1)
        return self._tenure


class MemoryCheckpoints(Checkpoints):
    def __init__(self, available: Callable[[], bool]) -> None:
        self._available = available
        self._kept: dict[CheckpointLabel, bytes] = {}

    @override
    async def save(self, label: CheckpointLabel, content: bytes, *, log_begins: Sequence = 1) -> None:
        _require(self._available())
        if len(self._kept) == CHECKPOINTS_KEPT:
            del self._kept[superseded(self._kept, label, log_begins=log_begins)]
        self._kept[label] = content

    @override
    async def labels(self) -> list[CheckpointLabel]:
        _require(self._available())
        return sorted(self._kept, key=lambda label: -label.as_of)

    @override
    async def load(self, label: CheckpointLabel) -> bytes | None:
        _require(self._available())
        return self._kept.get(label)


def _require(available: bool) -> None:
    if not available:
        away = "the broker is away"
        raise StoreUnavailableError(away)
