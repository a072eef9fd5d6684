"""The log that the console shows: running (`following`) or recorded (`bundle`). Both fold it into an Observer, which a reset
of the log replaces; both keep views of the fleet at earlier moments."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import msgspec

from pointsman.ports import LogEntry
from pointsman.primitives import PoolName, Sequence
from pointsman.runtime.health import HealthBoard
from pointsman.state.state import State
from pointsman_cli.console.fleet_views import fleet_view
from pointsman_cli.console.observer import Analysis, Observer
from pointsman_cli.console.sizes import Spaced
from pointsman_cli.console.times import wall
from pointsman_cli.console.views import FleetView, Health, MomentView, StatusView

MOMENTS_MAX = 64
MOMENT_WALL_SECONDS = 10.0
PROBLEMS_MAX = 20

Analyses = Callable[[State], Iterable[Analysis]]


class LogSource(ABC):
    origin: str

    def __init__(self, *, pool: PoolName, board: HealthBoard, analyses: Analyses = lambda _state: ()) -> None:
        self.pool = pool
        self.board = board
        self.observer: Observer | None = None
        self.first: Sequence = 0
        self.until: Sequence = 0
        self.notes: list[str] = []
        self._analyses = analyses
        self._moments: Spaced[FleetView] = Spaced(0.0, MOMENTS_MAX)

    @property
    @abstractmethod
    def health(self) -> Health: ...

    @abstractmethod
    async def run(self) -> None:
        """Reads the log; returns only at the end of a recorded one."""

    def begin(self, state: State) -> Observer:
        self._moments = Spaced(MOMENT_WALL_SECONDS * state.settings.speed, MOMENTS_MAX)
        self.observer = Observer(state, self._analyses(state))
        return self.observer

    def take(self, observer: Observer, entry: LogEntry) -> None:
        observer.apply(entry)
        self.first = self.first or entry.sequence
        if self._moments.due(observer.at):
            self._moments.add(fleet_view(observer), observer.at)

    def fleet_at(self, sequence: Sequence) -> FleetView | None:
        """The fleet as of the last kept moment not after the entry; now without one."""
        if self.observer is None:
            return None
        moments = self._moments.kept
        shown = next((view for view in reversed(moments) if view.sequence <= sequence), None) if sequence else None
        shown = shown or fleet_view(self.observer)
        kept = [MomentView(sequence=view.sequence, at=view.at) for view in moments]
        return msgspec.structs.replace(shown, moments=kept)

    def status(self, *, can_act: bool, pools: list[str]) -> StatusView:
        observer = self.observer
        leader = observer.leader if observer else None
        settings = leader.settings if leader else {}
        pool = observer.state.settings if observer else None
        return StatusView(
            pool=self.pool,
            origin=self.origin,
            health=self.health,
            sequence=observer.sequence if observer else 0,
            until=self.until,
            first=self.first,
            at=wall(observer, observer.at) if observer else 0.0,
            term=observer.state.term if observer else 0,
            scheduler=leader.scheduler if leader else "",
            policy=leader.policy if leader else "",
            admission=str(settings.get("admission", "")),
            ordering=str(settings.get("ordering", "")),
            speed=pool.speed if pool else 1.0,
            block_tokens=pool.block_tokens if pool else 0,
            problems=self._problems(),
            can_act=can_act,
            pools=pools,
        )

    def _problems(self) -> list[str]:
        found = [f"{part}: {reason}" for part, reason in self.board.lacks.items()] + self.notes
        observer = self.observer
        if observer is not None:
            if observer.state.writes_lost:
                found.append(f"{observer.state.writes_lost:,} events could not be written into the log")
            if dead := observer.state.dead_letters.count:
                found.append(f"{dead:,} entries of the log were passed over: they do not decode or do not apply")
        return found[:PROBLEMS_MAX]
