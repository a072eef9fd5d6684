"""Cache events of one epoch, with dense sequences, each small enough for one message.

Pure: changes in, events out. Who writes them, and when, is the service's affair.
"""

from collections.abc import Iterator

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheGap, CacheSnapshot, Run
from pointsman.primitives import BlockKey, Epoch, InstanceId, Seconds, Sequence
from pointsman_worker.held_keys import Changes

CacheEvents = BlocksStored | BlocksRemoved | CacheCleared | CacheGap | CacheSnapshot

EVENT_KEY_BYTES_MAX = 384 * 1024
"""Packed keys and run headers in one event: with base64 and JSON around it, well below NATS's 1 MiB."""
RUN_OVERHEAD_BYTES = 48
"""About what a run costs beside its keys, in the same measure."""


class CacheEventSequencer:
    """Numbers the cache events of one epoch, from 1."""

    def __init__(self, instance: InstanceId, epoch: Epoch) -> None:
        self.instance = instance
        self.epoch = epoch
        self.sequence: Sequence = 0
        """Of the last event that was made."""

    def gap(self, at: Seconds, missed: int, reason: str) -> CacheGap:
        return CacheGap(
            at=at, instance=self.instance, epoch=self.epoch, sequence=self._next(), missed=missed, reason=reason
        )

    def changes(self, at: Seconds, changes: Changes) -> Iterator[CacheEvents]:
        """Cleared, removed, expired, stored: at most one event of each, unless there is more than fits one message."""
        if changes.cleared:
            yield CacheCleared(at=at, instance=self.instance, epoch=self.epoch, sequence=self._next())
        yield from self._removed(at, changes.removed, expired=False)
        yield from self._removed(at, changes.expired, expired=True)
        for runs in portions(changes.stored):
            yield self._stored(at, runs)

    def snapshot(self, at: Seconds, runs: list[Run]) -> Iterator[CacheEvents]:
        """The whole cache: a snapshot, followed by stores where it does not fit one message."""
        first, *rest = list(portions(runs)) or [[]]
        yield CacheSnapshot(at=at, instance=self.instance, epoch=self.epoch, sequence=self._next(), runs=first)
        for portion in rest:
            yield self._stored(at, portion)

    def _removed(self, at: Seconds, keys: list[BlockKey], *, expired: bool) -> Iterator[BlocksRemoved]:
        keys_max = EVENT_KEY_BYTES_MAX // KEY_BYTES
        for start in range(0, len(keys), keys_max):
            yield BlocksRemoved(
                at=at,
                instance=self.instance,
                epoch=self.epoch,
                sequence=self._next(),
                keys=pack_keys(keys[start : start + keys_max]),
                expired=expired,
            )

    def _stored(self, at: Seconds, runs: list[Run]) -> BlocksStored:
        return BlocksStored(at=at, instance=self.instance, epoch=self.epoch, sequence=self._next(), runs=runs)

    def _next(self) -> Sequence:
        self.sequence += 1
        return self.sequence


def portions(runs: list[Run], bytes_max: int = EVENT_KEY_BYTES_MAX) -> Iterator[list[Run]]:
    """The same runs in the same order, in lists of which each fits one event; a long run is cut, its second part
    following the last key of the first."""
    portion: list[Run] = []
    room = bytes_max
    for run in runs:
        keys, parent = run.keys, run.parent
        while keys:
            fitting = (room - RUN_OVERHEAD_BYTES) // KEY_BYTES * KEY_BYTES
            if fitting <= 0:
                yield portion
                portion, room = [], bytes_max
                continue
            part, keys = keys[:fitting], keys[fitting:]
            portion.append(Run(keys=part, parent=parent))
            room -= RUN_OVERHEAD_BYTES + len(part)
            parent = _last_key(part)
    if portion:
        yield portion


def _last_key(keys: bytes) -> BlockKey:
    return BlockKey(int.from_bytes(keys[-KEY_BYTES:], "little"))
