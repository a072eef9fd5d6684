"""One simulated instance: a cache, and the real worker's writer, heartbeats and resync around it. Only what reads an
engine's events is left out: the keys of blocks are given. In: prompts; out: what a worker tells the log and the leader."""

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

from pointsman.adapters.http_engine import EngineFacts, EngineLoad
from pointsman.ports import Clock, EngineTarget, Link
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.state.prefix_index import ROOT
from pointsman_lab.traffic import BLOCK_TOKENS, SimulatedCache
from pointsman_worker.engine_monitor import EngineMonitor
from pointsman_worker.fleet_events import FleetEvents
from pointsman_worker.heartbeats import Heartbeats
from pointsman_worker.resync import ResyncHandler
from pointsman_worker.saved_session import SessionStore
from pointsman_worker.session import SessionState
from pointsman_worker.settings import WorkerSettings
from pointsman_worker.targets import completed
from pointsman_worker.writer import LogWriter

SETTINGS = WorkerSettings(block_tokens=BLOCK_TOKENS)
ENGINE_BLOCK_TOKENS = 16
REQUESTS_FULL = 64
FIRST_PORT = 10_000
POLL_SECONDS = 0.02


@dataclass
class MonitoredEngine:
    """As the worker's monitor asks it. `free_at`: when it has computed all prompts."""

    blocks: int
    running: int = 0
    free_at: EngineSeconds = 0.0

    async def describe(self) -> EngineFacts:
        return EngineFacts(
            model="m", max_model_len=0, version="", block_tokens=ENGINE_BLOCK_TOKENS,
            kv_capacity_tokens=self.blocks * BLOCK_TOKENS,
        )  # fmt: skip

    async def load(self) -> EngineLoad:
        return EngineLoad(running=self.running, kv_usage=min(1.0, self.running / REQUESTS_FULL))


@dataclass
class FollowedInstance:
    """`number`: of the instance, for its URL."""

    name: InstanceId
    number: int
    blocks: int
    link: Link
    clock: Clock
    engine: MonitoredEngine = field(init=False)

    def __post_init__(self) -> None:
        url = f"http://127.0.0.1:{FIRST_PORT + self.number}"
        board = HealthBoard(pool=SETTINGS.pool)
        self.engine = MonitoredEngine(self.blocks)
        self._cache = SimulatedCache(self.blocks)
        self._state = state = SessionState(
            completed(EngineTarget(instance=self.name, url=url), SETTINGS), SETTINGS, self.clock, events=None
        )
        self._monitor = EngineMonitor(self.engine, state, board)
        events, heartbeats = FleetEvents(state, self._monitor, None), Heartbeats(self.link.commands, state, board)
        writer = LogWriter(self.link.log, state, events, SessionStore(events), board, heartbeats)
        self._parts = (self._monitor, heartbeats, writer, ResyncHandler(self.link.commands, state, writer))

    async def run(self, *, after: float) -> None:
        """Joins. `after`: wall seconds, so that heartbeats of a pool are spread."""
        await asyncio.sleep(after)
        facts = await self._monitor.facts()
        self._state.begin(facts, "empty", self._state.new_translator(facts))
        async with asyncio.TaskGroup() as tasks:
            for part in self._parts:
                tasks.create_task(part.run())

    async def settled(self) -> None:
        """Until it has joined and the log has all changes of its cache."""
        state = self._state
        while state.session is None or not state.session.joined_at or self._has_changes:
            await self.clock.sleep_wall(WallSeconds(POLL_SECONDS))

    def cached(self, keys: list[BlockKey]) -> int:
        return self._cache.cached(keys)

    def store(self, keys: list[BlockKey]) -> None:
        cached, evicted = self._cache.hold(keys)
        held = self._state.followed_session()[1].device.keys
        for parent, key in pairwise([keys[cached - 1] if cached else ROOT, *keys[cached:]]):
            held.gain(key, parent)
        for key in evicted:
            held.lose(key, expired=False)
        self._state.wake.set()

    @property
    def _has_changes(self) -> bool:
        return self._state.followed_session()[1].changed
