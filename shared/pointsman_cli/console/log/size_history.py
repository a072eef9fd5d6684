"""The fleet's size over the time of a log, at evenly spaced moments: when there are too many, every other one is dropped
and the space doubles."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pointsman.primitives import EngineSeconds
from pointsman.state.fleet import Status
from pointsman.state.state import State

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


@dataclass(frozen=True, slots=True)
class Size:
    at: EngineSeconds
    ready: int
    wanted: int
    pending: int


class Sizes:
    def __init__(self, speed: float) -> None:
        self._spaced: Spaced[Size] = Spaced(FIRST_WALL_SECONDS * speed, SIZES_MAX)

    @property
    def kept(self) -> list[Size]:
        return self._spaced.kept

    def note(self, state: State) -> None:
        if self._spaced.due(state.last_at):
            self._spaced.add(size_of(state), state.last_at)


def size_of(state: State) -> Size:
    ready = sum(instance.status is Status.READY for instance in state.fleet.instances)
    wanted = state.scaling.wanted
    pending = sum(len(queue.pending) for queue in state.workload.queues.values())
    return Size(state.last_at, ready, ready if wanted is None else wanted, pending)
