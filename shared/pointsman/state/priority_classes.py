"""Priority classes of the requests pending at one instance. Higher classes are granted first. So that lower ones do not
starve, each prefill second granted to a higher class while they wait gives them LOWER_SHARE seconds of credit. A class
begins to wait with the work of its first request as debt; with credit it goes first, and pays for what it is granted. So
it waits at most for 1/LOWER_SHARE times its own work, and its turn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pointsman.contracts.tenants import Priority
from pointsman.primitives import EngineSeconds, Tokens

QueueClass = Priority | Literal["best_effort"]
BEST_EFFORT: QueueClass = "best_effort"
"""Requests of all classes that would be late even alone."""
RANK: dict[QueueClass, int] = {"best_effort": 0, "batch": 1, "standard": 2, "interactive": 3}
LOWEST = BEST_EFFORT
LOWER_SHARE = 0.05
CREDIT_SECONDS_MAX: EngineSeconds = 1.0
"""What a class that cannot be granted may save up."""
LOWER_WINDOW_SHARE = 0.25
"""Of an engine's prefill window that a class may fill while a higher one is in use: what is granted is not overtaken."""
CLASS_REMEMBERED_SECONDS: EngineSeconds = 60.0
"""How long a class is in use after its last arrival."""


@dataclass(slots=True)
class PendingClass:
    """Only `requests` counts while it is 0."""

    requests: int = 0
    seconds: EngineSeconds = 0.0
    tokens: Tokens = 0
    credit: EngineSeconds = 0.0

    def begin(self, seconds: EngineSeconds) -> None:
        """`seconds`: work of the first request."""
        self.seconds, self.tokens, self.credit = 0.0, 0, -seconds


def work_from(classes: Mapping[QueueClass, PendingClass], priority: QueueClass) -> tuple[EngineSeconds, Tokens]:
    """Pending work of this class and those above it."""
    seconds, tokens = 0.0, 0
    for name, known in classes.items():
        if known.requests and RANK[name] >= RANK[priority]:
            seconds += max(0.0, known.seconds)
            tokens += known.tokens
    return seconds, tokens


def next_class(classes: Mapping[QueueClass, PendingClass]) -> QueueClass:
    """The lowest with credit, else the highest. At least one has requests."""
    ordered = sorted(
        (name for name, known in classes.items() if known.requests and name != BEST_EFFORT), key=RANK.__getitem__
    )
    return next((name for name in ordered[:-1] if classes[name].credit > 0), ordered[-1])


def note_grant(
    classes: Mapping[QueueClass, PendingClass],
    granted: QueueClass,
    seconds: EngineSeconds,
    *,
    credit_max: EngineSeconds = CREDIT_SECONDS_MAX,
) -> None:
    """Before the grant is taken out of its class. `credit_max`: infinite before fold version 9."""
    if any(known.requests and RANK[name] > RANK[granted] for name, known in classes.items()):
        classes[granted].credit -= seconds
    for name, known in classes.items():
        if known.requests and RANK[name] < RANK[granted]:
            known.credit = min(credit_max, known.credit + LOWER_SHARE * seconds)
