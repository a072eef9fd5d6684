"""Traffic and caches for `pointsman-lab scale`: conversations of tenants with shared system prompts, and the blocks that
an instance holds. In: a seed; out: prompts as block keys."""

from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random

from pointsman.primitives import BlockKey, InstanceId

BLOCK_TOKENS = 64
TENANTS = 20
SYSTEM_BLOCKS, TURN_BLOCKS, TURNS_MAX = 24, 6, 12
NEXT_TURN_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Prompt:
    tenant: int
    session: int
    keys: list[BlockKey]

    @property
    def tokens(self) -> int:
        return len(self.keys) * BLOCK_TOKENS + 17


class Conversations:
    """`open_min`: conversations begun before one is taken up again."""

    def __init__(self, chance: Random, open_min: int) -> None:
        self._chance = chance
        self._open_min = open_min
        self._numbers = count(1)
        self._systems = [random_keys(chance, SYSTEM_BLOCKS) for _ in range(TENANTS)]
        self._open: deque[Prompt] = deque()

    def next(self) -> Prompt:
        if len(self._open) > self._open_min and self._chance.random() < NEXT_TURN_SHARE:
            last = self._open.popleft()
            prompt = Prompt(last.tenant, last.session, [*last.keys, *random_keys(self._chance, TURN_BLOCKS)])
        else:
            tenant = self._chance.randrange(TENANTS)
            keys = [*self._systems[tenant], *random_keys(self._chance, TURN_BLOCKS)]
            prompt = Prompt(tenant, next(self._numbers), keys)
        if len(prompt.keys) < SYSTEM_BLOCKS + TURNS_MAX * TURN_BLOCKS:
            self._open.append(prompt)
        return prompt


@dataclass
class SimulatedCache:
    """Blocks in the order of their last use; evicts those used longest ago, of a prompt the last ones first."""

    blocks_max: int
    held: dict[BlockKey, None] = field(default_factory=dict)

    def cached(self, keys: list[BlockKey]) -> int:
        return next((depth for depth, key in enumerate(keys) if key not in self.held), len(keys))

    def hold(self, keys: list[BlockKey]) -> tuple[int, list[BlockKey]]:
        """Returns how many of them were cached, and what is evicted."""
        known = self.cached(keys)
        for key in reversed(keys):
            self.held.pop(key, None)
            self.held[key] = None
        surplus = list(islice(self.held, max(0, len(self.held) - self.blocks_max)))
        for key in surplus:
            del self.held[key]
        return known, surplus


def random_keys(chance: Random, number: int) -> list[BlockKey]:
    return [BlockKey(chance.getrandbits(64) or 1) for _ in range(number)]


def instance_names(instances: int) -> list[InstanceId]:
    return [InstanceId(f"engine-{number:03}") for number in range(instances)]
