"""Builds one epoch's cache events from changes: dense sequences, each event within one message. No I/O."""

from collections.abc import Iterator

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheGap, CacheSnapshot, Run, Tier
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, Sequence
from pointsman_worker.held_keys import Changes

CacheEvents = BlocksStored | BlocksRemoved | CacheCleared | CacheGap | CacheSnapshot

EVENT_KEY_BYTES_MAX = 32 * 1024  # 4,096 keys: 10 to 40 ms of a leader, which does nothing else meanwhile
RUN_OVERHEAD_BYTES = 48


class CacheEventSequencer:
    def __init__(self, instance: InstanceId, epoch: Epoch) -> None:
        self.instance = instance
        self.epoch = epoch
        self.sequence: Sequence = 0

    def gap(self, at: EngineSeconds, missed: int, reason: str) -> CacheGap:
        return CacheGap(
            at=at, instance=self.instance, epoch=self.epoch, sequence=self._next(), missed=missed, reason=reason
        )

    def cleared(self, at: EngineSeconds) -> CacheCleared:
        return CacheCleared(at=at, instance=self.instance, epoch=self.epoch, sequence=self._next())

    def changes(self, at: EngineSeconds, changes: Changes, tier: Tier = "device") -> Iterator[CacheEvents]:
        """At most one event of a kind, unless it exceeds a message. The device's clear is that of all tiers."""
        if changes.cleared and tier == "device":
            yield self.cleared(at)
        yield from self._removed(at, changes.removed, tier, expired=False)
        yield from self._removed(at, changes.expired, tier, expired=True)
        yield from self.stored(at, changes.stored, tier)

    def stored(self, at: EngineSeconds, runs: list[Run], tier: Tier) -> Iterator[CacheEvents]:
        for portion in portions(runs):
            yield self._stored(at, portion, tier)

    def snapshot(self, at: EngineSeconds, runs: list[Run]) -> Iterator[CacheEvents]:
        """A snapshot, then stores if it exceeds one message."""
        first, *rest = list(portions(runs)) or [[]]
        yield CacheSnapshot(at=at, instance=self.instance, epoch=self.epoch, sequence=self._next(), runs=first)
        for portion in rest:
            yield self._stored(at, portion, "device")

    def _removed(
        self, at: EngineSeconds, keys: list[BlockKey], tier: Tier, *, expired: bool
    ) -> Iterator[BlocksRemoved]:
        keys_max = EVENT_KEY_BYTES_MAX // KEY_BYTES
        for start in range(0, len(keys), keys_max):
            yield BlocksRemoved(
                at=at,
                instance=self.instance,
                epoch=self.epoch,
                sequence=self._next(),
                keys=pack_keys(keys[start : start + keys_max]),
                expired=expired,
                tier=tier,
            )

    def _stored(self, at: EngineSeconds, runs: list[Run], tier: Tier) -> BlocksStored:
        return BlocksStored(
            at=at, instance=self.instance, epoch=self.epoch, sequence=self._next(), runs=runs, tier=tier
        )

    def _next(self) -> Sequence:
        self.sequence += 1
        return self.sequence


def portions(runs: list[Run], bytes_max: int = EVENT_KEY_BYTES_MAX) -> Iterator[list[Run]]:
    """Splits runs into lists that fit one event; the rest of a cut run follows its first part's last key."""
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
            parent = BlockKey(int.from_bytes(part[-KEY_BYTES:], "little"))
    if portion:
        yield portion
