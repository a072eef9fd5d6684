"""Chance without dice: numbers that look random and follow from a seed and what is being decided."""

from hashlib import blake2b


def uniform(seed: int, *about: str) -> float:
    """A number from 0 (inclusive) to 1, the same for the same seed and subject, whatever else happened."""
    digest = blake2b("\x00".join((str(seed), *about)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


def pick(count: int, seed: int, *about: str) -> int:
    """An index below `count`."""
    return int(uniform(seed, *about) * count)
