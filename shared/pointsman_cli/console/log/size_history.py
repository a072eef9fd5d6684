"""Moments of a log that are kept evenly spaced over its whole time: when there are too many, every other one is dropped and
the space doubles."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pointsman.primitives import EngineSeconds
from pointsman.state.fleet import Status
from pointsman.state.state import State
from pointsman_cli.console.views import SizeView, unix_seconds

SIZES_MAX = 360
FIRST_WALL_SECONDS = 5.0

T = TypeVar("T")


@dataclass(slots=True)
class Spaced(Generic[T]):
    space: EngineSeconds
    kept_max: int
    kept: list[T] = field(default_factory=list)
    next_at: EngineSeconds = 0.0

    def due(self, at: EngineSeconds) -> bool:
        return at >= self.next_at

    def add(self, value: T, at: EngineSeconds) -> None:
        self.kept.append(value)
        if len(self.kept) > self.kept_max:
            del self.kept[1::2]
            self.space *= 2
        self.next_at = at + self.space


def sizes_of(speed: float) -> Spaced[SizeView]:
    return Spaced(FIRST_WALL_SECONDS * speed, SIZES_MAX)


def size_of(state: State) -> SizeView:
    ready = sum(instance.status is Status.READY for instance in state.fleet.instances)
    wanted = state.scaling.wanted
    return SizeView(
        at=unix_seconds(state.last_at, state.settings.speed),
        ready=ready,
        wanted=ready if wanted is None else wanted,
        pending=sum(len(queue.pending) for queue in state.workload.queues.values()),
    )
