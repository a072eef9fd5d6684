"""Consistent hashing of prefixes: an instance that joins or leaves changes only its own share. Source: DualMap; the
candidate pair of a prefix is its owner on each of two independent rings (Eq. 5)."""

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

from pointsman.primitives import BlockKey, InstanceId

VIRTUAL_NODES = 64
RING_BITS = 64


class HashRing:
    def __init__(self, instances: tuple[InstanceId, ...], salt: str) -> None:
        anchors = sorted(
            (_hash(f"{salt}/{instance}/{node}".encode()), instance)
            for instance in instances
            for node in range(VIRTUAL_NODES)
        )
        self._positions = [position for position, _ in anchors]
        self._owners = [owner for _, owner in anchors]
        self._salt = salt.encode()

    def owner(self, key: BlockKey, *, other_than: InstanceId | None = None) -> InstanceId | None:
        """Returns the first instance clockwise from the key other than `other_than`, or None."""
        owners = self._owners
        start = bisect_left(self._positions, _hash(self._salt + key.to_bytes(8, "little")))
        for step in range(len(owners)):
            owner = owners[(start + step) % len(owners)]
            if owner != other_than:
                return owner
        return None


@lru_cache(maxsize=64)
def ring(instances: tuple[InstanceId, ...], salt: str) -> HashRing:
    return HashRing(instances, salt)


def ring_candidates(instances: tuple[InstanceId, ...], key: BlockKey, count: int) -> tuple[InstanceId, ...]:
    """Returns `count` distinct owners, or all, over successive independent rings."""
    found: list[InstanceId] = []
    number = 1
    while len(found) < min(count, len(instances)):
        owner = ring(instances, f"ring-{number}").owner(key)
        if owner is not None and owner not in found:
            found.append(owner)
        number += 1
    return tuple(found)


def home_among(instances: Iterable[InstanceId], key: BlockKey) -> InstanceId:
    """Rendezvous hashing: the same key and instances give the same instance."""
    names, suffix = list(instances), key.to_bytes(8, "little")
    digests = [_digest(name.encode() + suffix) for name in names]  # of one length: they compare as their numbers do
    return names[digests.index(max(digests))]


def candidate_pair(instances: tuple[InstanceId, ...], key: BlockKey) -> tuple[InstanceId, ...]:
    if len(instances) < 2:
        return instances
    first = ring(instances, "ring-1").owner(key)
    assert first is not None, "a ring of instances has an owner"
    second = ring(instances, "ring-2").owner(key, other_than=first)
    return (first,) if second is None else (first, second)


def _hash(data: bytes) -> int:
    return int.from_bytes(_digest(data), "big")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=RING_BITS // 8).digest()
