"""Traffic and caches for benchmarks of the leader: conversations of tenants with shared system prompts, and the blocks that
each instance holds. In: a seed; out: prompts as block keys, and cache events as a worker would write them."""

from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, Run
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceJoined, InstanceReported
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman.state.prefix_index import ROOT

BLOCK_TOKENS = 64
TENANTS = 20
SYSTEM_BLOCKS, TURN_BLOCKS, TURNS_MAX = 24, 6, 12
NEXT_TURN_SHARE = 0.8
EVENT_BLOCKS_MAX = 512
FIRST_EPOCH = Epoch(1)


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
class SimulatedInstance:
    """Blocks in the order of their last use; evicts those used longest ago, of a prompt the last ones first."""

    name: InstanceId
    blocks_max: int
    epoch: Epoch = FIRST_EPOCH
    held: dict[BlockKey, None] = field(default_factory=dict)
    digest: int = 0
    sequence: int = 0
    free_at: EngineSeconds = 0.0

    def join(self, at: EngineSeconds) -> InstanceJoined:
        return InstanceJoined(
            at=at, instance=self.name, epoch=self.epoch, url=f"http://{self.name}", model="m",
            block_tokens=BLOCK_TOKENS, engine_block_tokens=16, kv_capacity_tokens=self.blocks_max * BLOCK_TOKENS,
            max_model_len=0, prefill=PROFILES[DEFAULT_PROFILE].prefill_cost,
        )  # fmt: skip

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

    def store(self, keys: list[BlockKey], at: EngineSeconds) -> list[LogEvent]:
        known, surplus = self.hold(keys)
        new = keys[known:]
        events: list[LogEvent] = []
        for start in range(0, len(new), EVENT_BLOCKS_MAX):
            part = new[start : start + EVENT_BLOCKS_MAX]
            parent = keys[known + start - 1] if known + start else ROOT
            events.append(
                BlocksStored(
                    at=at, instance=self.name, epoch=self.epoch, sequence=self._next(), runs=[Run(pack_keys(part), parent)]
                )
            )  # fmt: skip
        if surplus:
            events.append(
                BlocksRemoved(
                    at=at, instance=self.name, epoch=self.epoch, sequence=self._next(), keys=pack_keys(surplus)
                )
            )
        for key in (*new, *surplus):
            self.digest ^= key
        return events

    def report(self, at: EngineSeconds, running: int = 1) -> InstanceReported:
        return InstanceReported(
            at=at, instance=self.name, epoch=self.epoch, serving=True, waiting=0, running=running, kv_usage=0.5,
            sequence=self.sequence, blocks=len(self.held), digest=self.digest,
        )  # fmt: skip

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence


def random_keys(chance: Random, number: int) -> list[BlockKey]:
    return [BlockKey(chance.getrandbits(64) or 1) for _ in range(number)]


def instance_names(instances: int) -> list[InstanceId]:
    return [InstanceId(f"engine-{number:03}") for number in range(instances)]
