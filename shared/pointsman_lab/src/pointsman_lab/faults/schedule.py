"""Draws faults, targets and times from a seed. A seed repeats the schedule, not the interleaving of the processes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds

PROCESSES = ("leader", "follower", "worker", "engine", "nats", "recorder", "rebalancer", "scaler", "ingress")
ANY = "any"
ACTIONS = {
    "kill": (*PROCESSES, ANY),
    "freeze": (*PROCESSES, ANY),
    "restart": ("leader", "follower", "worker", "recorder", "rebalancer", "scaler", "ingress"),
    "down": ("nats",),
    "network": ("cut", "delay", "drop"),
    "errors": ("engine",),
    "hang": ("engine",),
    "slow": ("engine",),
}
"""Several processes at once: `kill:ingress+leader`. `restart`: SIGTERM, alike processes in turn. `down`: killed,
restarted later. The last three are those of `/sim/misbehave`."""

MISBEHAVIOUR = frozenset({"errors", "hang", "slow"})
GENTLE = MISBEHAVIOUR | {"restart", "down"}
OF_OWN_SERVERS = frozenset({"network", "down"})
DEFAULT_FAULTS = ("kill:leader", "kill:ingress", "kill:worker", "kill:engine", "kill:nats", "freeze:any")
BEGIN_SHARE, END_SHARE = 0.1, 0.9
LASTS_SECONDS = {
    "kill": (0.0, 0.0),
    "freeze": (1.0, 4.0),
    "restart": (0.0, 0.0),
    "down": (10.0, 10.0),
    "network": (0.5, 3.0),
    "errors": (30.0, 30.0),
    "hang": (30.0, 30.0),
    "slow": (30.0, 30.0),
}


class FaultError(ValueError):
    """Unknown fault; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`action` on all `targets` at once, `at` wall seconds after the first request; `lasts` wall seconds unless it is a
    kill."""

    action: str
    targets: tuple[str, ...]
    at: EngineSeconds
    lasts: EngineSeconds

    @property
    def name(self) -> str:
        return f"{self.action}:{'+'.join(self.targets)}"


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """The same names. Raises FaultError."""
    for name in names:
        action, targets = _parts(name)
        if not set(targets) <= set(ACTIONS.get(action, ())) or (action == "network" and len(targets) > 1):
            known = "; ".join(f"{one}:{{{','.join(targets)}}}" for one, targets in ACTIONS.items())
            raise FaultError(f"there is no fault {name!r}; there are {known}")
    return tuple(names)


def scheduled(names: Sequence[str], *, seed: int, seconds: EngineSeconds) -> list[Fault]:
    """Each named fault once, shuffled, in a run of so many wall seconds. Each has its own interval and strikes in the
    first half of it."""
    chance = random.Random(seed)
    faults = []
    part = (END_SHARE - BEGIN_SHARE) * seconds / max(1, len(names))
    for place, name in enumerate(chance.sample(names, len(names))):
        action, targets = _parts(name)
        targets = tuple(chance.choice(PROCESSES) if target == ANY else target for target in targets)
        at = BEGIN_SHARE * seconds + (place + 0.5 * chance.random()) * part
        faults.append(Fault(action, targets, at, chance.uniform(*LASTS_SECONDS[action])))
    return faults


def in_turn(names: Sequence[str], *, seed: int) -> list[Fault]:
    """The named faults in order, each due once the fleet has recovered from the last."""
    chance = random.Random(seed)
    faults = []
    for name in names:
        action, targets = _parts(name)
        targets = tuple(chance.choice(PROCESSES) if target == ANY else target for target in targets)
        faults.append(Fault(action, targets, 0.0, chance.uniform(*LASTS_SECONDS[action])))
    return faults


def rolling(*, ingresses: int, schedulers: int, engines: int) -> tuple[str, ...]:
    """A rolling restart of everything between clients and engines, one process after the other."""
    return (
        *("restart:ingress",) * ingresses,
        *("restart:follower",) * (schedulers - 1),
        "restart:leader",
        *("restart:worker",) * engines,
        "restart:rebalancer",
    )


def _parts(name: str) -> tuple[str, tuple[str, ...]]:
    action, _, targets = name.partition(":")
    return action, tuple(targets.split("+"))
