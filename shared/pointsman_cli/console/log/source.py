"""The log that the console shows: running (`following`) or recorded (`recorded`). Both fold it into an Observer, which a reset
of the log replaces; both keep views of the fleet at earlier moments."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.shadow import Shadow
from pointsman.ports import LogEntry
from pointsman.primitives import PoolName, Sequence
from pointsman.runtime.health import HealthBoard
from pointsman.state.state import PoolSettings, State
from pointsman_cli.console.log.fleet_views import fleet_view
from pointsman_cli.console.log.metrics import LadderMetrics, ShadowMetrics
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.console.log.size_history import Spaced
from pointsman_cli.console.views import FleetView, Health, MomentView, StatusView

MOMENTS_MAX = 64
MOMENT_WALL_SECONDS = 10.0
PROBLEMS_MAX = 20

ShadowOf = Callable[[State], Shadow]


class LogSource(ABC):
    origin: str

    def __init__(self, *, pool: PoolName, board: HealthBoard) -> None:
        self.pool = pool
        self.board = board
        self.observer = Observer(State(PoolSettings()))
        """Empty until the log's first entries are read."""
        self.first: Sequence = 0
        self.until: Sequence = 0
        self.notes: list[str] = []
        self.ladder: HitRateLadder | None = None
        self.shadow: Shadow | None = None
        self._ladder_metrics = LadderMetrics(pool)
        self._shadow_metrics = ShadowMetrics(pool)
        self.shadow_of: ShadowOf | None = None
        """To be set before `run`."""
        self._moments: Spaced[FleetView] = Spaced(0.0, MOMENTS_MAX)

    @property
    @abstractmethod
    def health(self) -> Health: ...

    @property
    def silent_seconds(self) -> int:
        return 0

    @abstractmethod
    async def run(self) -> None:
        """Reads the log; returns only at the end of a recorded one."""

    def begin(self, state: State) -> Observer:
        self._moments = Spaced(MOMENT_WALL_SECONDS * state.settings.speed, MOMENTS_MAX)
        if self.ladder is None:
            self.ladder = HitRateLadder(state.settings)
        self.ladder.begin(state)
        if self.shadow is not None:
            self.shadow.begin_again(state)
        elif self.shadow_of is not None:
            self.shadow = self.shadow_of(state)
        self.observer = Observer(state, self.ladder, self.shadow)
        return self.observer

    def note_metrics(self) -> None:
        """Before they are scraped."""
        if self.ladder is not None:
            self._ladder_metrics.update(self.ladder.figures)
        if self.shadow is not None:
            self._shadow_metrics.update(self.shadow)

    def finish(self) -> None:
        """A recorded log has ended."""
        if self.ladder is not None:
            self.ladder.settle(self.observer.state)
        if self.shadow is not None:
            self.shadow.finish()

    def take(self, observer: Observer, entry: LogEntry) -> None:
        observer.apply(entry)
        self.first = self.first or entry.sequence
        if self._moments.due(observer.at):
            self._moments.add(fleet_view(observer), observer.at)

    def fleet_at(self, sequence: Sequence) -> FleetView:
        """The fleet as of the last kept moment not after the entry; now without one."""
        moments = self._moments.kept
        shown = next((view for view in reversed(moments) if view.sequence <= sequence), None) if sequence else None
        shown = shown or fleet_view(self.observer)
        kept = [MomentView(sequence=view.sequence, at=view.at) for view in moments]
        return msgspec.structs.replace(shown, moments=kept)

    def status(self, *, can_act: bool, pools: list[str]) -> StatusView:
        observer = self.observer
        leader = observer.leader
        settings = leader.settings if leader else {}
        pool = observer.state.settings
        return StatusView(
            pool=self.pool,
            origin=self.origin,
            health=self.health,
            sequence=observer.sequence,
            until=max(self.until, observer.sequence),
            first=self.first,
            at=observer.wall(observer.at),
            term=observer.state.term,
            scheduler=leader.scheduler if leader else "",
            policy=leader.policy if leader else "",
            admission=str(settings.get("admission", "")),
            ordering=str(settings.get("ordering", "")),
            speed=pool.speed,
            block_tokens=pool.block_tokens,
            problems=self._problems(),
            silent_seconds=self.silent_seconds,
            can_act=can_act,
            pools=pools,
        )

    def _problems(self) -> list[str]:
        found = [f"{part}: {reason}" for part, reason in self.board.lacks.items()] + self.notes
        observer = self.observer
        if observer.state.writes_lost:
            found.append(f"{observer.state.writes_lost:,} events could not be written into the log")
        if dead := observer.state.dead_letters.count:
            found.append(f"{dead:,} entries of the log were passed over: they do not decode or do not apply")
        return found[:PROBLEMS_MAX]
