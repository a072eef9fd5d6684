"""What strikes, whom, and when: drawn from a seed, so that a run can be made again.

The times are the same again; what a process is doing at that moment is not. A seed that failed fails often, not always.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.primitives import Seconds

PROCESSES = ("leader", "follower", "worker", "engine", "nats", "recorder", "rebalancer", "scaler", "ingress")
"""Who can be struck. The leader is the scheduler that leads at that moment."""
ACTIONS = {
    "kill": tuple(name for name in PROCESSES if name != "ingress"),
    "freeze": (*PROCESSES, "any"),
    "network": ("cut", "delay", "drop"),
}
"""What can be done. An ingress that is killed takes its clients' connections with it, so nobody could be told."""

DEFAULT_FAULTS = ("kill:leader", "kill:worker", "kill:engine", "kill:nats", "freeze:any")
BEGIN_SHARE, END_SHARE = 0.1, 0.9
"""Faults strike in this part of the time in which requests are sent."""
LASTS_SECONDS = {"kill": (0.0, 0.0), "freeze": (1.0, 4.0), "network": (0.5, 3.0)}
"""How long, at least and at most; wall seconds."""


class FaultError(ValueError):
    """No such fault; the message says which there are."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`action` on `target`, `at` wall seconds after the first request; `lasts` wall seconds where it is not a kill."""

    action: str
    target: str
    at: Seconds
    lasts: Seconds

    @property
    def name(self) -> str:
        return f"{self.action}:{self.target}"


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """The same names. Raises FaultError."""
    for name in names:
        action, _, target = name.partition(":")
        if target not in ACTIONS.get(action, ()):
            known = "; ".join(f"{one}:{{{','.join(targets)}}}" for one, targets in ACTIONS.items())
            msg = f"there is no fault {name!r}; there are {known}"
            raise FaultError(msg)
    return tuple(names)


def scheduled(names: Sequence[str], *, seed: int, seconds: Seconds) -> list[Fault]:
    """Each named fault once, at any time of a run in which requests are sent for so many wall seconds."""
    chance = random.Random(seed)
    faults = []
    for name in names:
        action, _, target = name.partition(":")
        if target == "any":
            target = chance.choice(PROCESSES)
        at = chance.uniform(BEGIN_SHARE * seconds, END_SHARE * seconds)
        faults.append(Fault(action, target, at, chance.uniform(*LASTS_SECONDS[action])))
    return sorted(faults, key=lambda fault: fault.at)
