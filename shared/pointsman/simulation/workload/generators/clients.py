"""Several clients, some of which misbehave, as in Cao et al., *Locality-aware Fair Scheduling in LLM Serving* (2025):
S1 sends more requests, S2 longer prefixes, which longest-prefix-first orders prefer."""

import random
from dataclasses import dataclass

from pointsman.primitives import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The first `misbehaving` of `count` clients send `requests_factor` times as many tasks, with prefixes
    `prefix_factor` times as long. Raises ValueError."""

    count: int = 8
    misbehaving: int = 1
    requests_factor: float = 1.0
    prefix_factor: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.misbehaving <= self.count >= 1 and min(self.requests_factor, self.prefix_factor) > 0):
            raise ValueError(
                f"clients need a count, at most as many misbehaving ones, and positive factors, not {self}"
            )

    def tenants(self) -> list[Tenant]:
        return [Tenant(f"client-{number + 1}") for number in range(self.count)]

    def misbehaves(self, index: int) -> bool:
        return index < self.misbehaving

    def pick(self, chance: random.Random) -> int:
        weights = [self.requests_factor if self.misbehaves(index) else 1.0 for index in range(self.count)]
        return chance.choices(range(self.count), weights=weights)[0]

    def prefix_blocks(self, index: int, blocks: int) -> int:
        return round(blocks * self.prefix_factor) if self.misbehaves(index) else blocks


WELL_BEHAVED = Clients()
MORE_REQUESTS = Clients(requests_factor=8.0)
LONGER_PREFIXES = Clients(prefix_factor=4.0)
