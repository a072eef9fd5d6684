"""What strikes, whom, and when: drawn from a seed, so that a run can be made again.

The times are the same again; what a process is doing at that moment is not. A seed that failed fails often, not always.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.primitives import Seconds

PROCESSES = ("leader", "follower", "worker", "engine", "nats", "recorder", "rebalancer", "scaler", "ingress")
"""Who can be struck. The leader is the scheduler that leads at that moment."""
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
"""What can be done. Several processes are struck at once as `kill:ingress+leader`. `restart`: SIGTERM, the next of those
alike each time. `down`: killed, and not started again for a while. The last three: as `/sim/misbehave` has them."""

MISBEHAVIOUR = frozenset({"errors", "hang", "slow"})
GENTLE = MISBEHAVIOUR | {"restart", "down"}
"""What no client behind a load balancer may notice."""
OF_OWN_SERVERS = frozenset({"network", "down"})
"""What needs a nats-server that `up` does not look after."""

DEFAULT_FAULTS = ("kill:leader", "kill:ingress", "kill:worker", "kill:engine", "kill:nats", "freeze:any")
BEGIN_SHARE, END_SHARE = 0.1, 0.9
"""Faults strike in this part of the time in which requests are sent."""
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
"""How long, at least and at most; wall seconds."""


class FaultError(ValueError):
    """No such fault; the message says which there are."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`action` on all `targets` at once, `at` wall seconds after the first request; `lasts` wall seconds where it is not a
    kill."""

    action: str
    targets: tuple[str, ...]
    at: Seconds
    lasts: Seconds

    @property
    def name(self) -> str:
        return f"{self.action}:{'+'.join(self.targets)}"


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """The same names. Raises FaultError."""
    for name in names:
        action, targets = _parts(name)
        if not set(targets) <= set(ACTIONS.get(action, ())) or (action == "network" and len(targets) > 1):
            known = "; ".join(f"{one}:{{{','.join(targets)}}}" for one, targets in ACTIONS.items())
            msg = f"there is no fault {name!r}; there are {known}"
            raise FaultError(msg)
    return tuple(names)


def scheduled(names: Sequence[str], *, seed: int, seconds: Seconds) -> list[Fault]:
    """Each named fault once, in any order, in a run in which requests are sent for so many wall seconds. Each has a part of it
    to itself, and strikes in the first half of that: what follows it is not another's doing."""
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
    """The named faults in this order, each due as soon as the fleet is well after the last one."""
    chance = random.Random(seed)
    faults = []
    for name in names:
        action, targets = _parts(name)
        targets = tuple(chance.choice(PROCESSES) if target == ANY else target for target in targets)
        faults.append(Fault(action, targets, 0.0, chance.uniform(*LASTS_SECONDS[action])))
    return faults


def rolling(*, ingresses: int, schedulers: int, engines: int) -> tuple[str, ...]:
    """A rolling restart: everything between clients and engines, one process after the other."""
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
