"""Deterministic pseudo-random numbers from a seed and the subject of the decision."""

from hashlib import blake2b


def uniform(seed: int, *about: str) -> float:
    digest = blake2b("\x00".join((str(seed), *about)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


def pick(count: int, seed: int, *about: str) -> int:
    return int(uniform(seed, *about) * count)
