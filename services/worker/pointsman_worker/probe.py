"""The engine's HTTP side. In: its /health, /v1/models and /metrics, once a report interval. Out: facts for a new session, load and
names for reports, and whether the engine serves."""

import asyncio
from dataclasses import replace
from typing import Protocol

import structlog

from pointsman.adapters.http_engine import EngineFacts, EngineLoad, EngineUnreachableError, FurtherNames
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_worker.session import SessionState
from pointsman_worker.settings import SettingsError
from pointsman_worker.translator import BlockTranslator

log = structlog.get_logger()

ENGINE_PART = "engine"
ENGINE_RETRY_SECONDS: WallSeconds = WallSeconds(0.25)
ENGINE_LOG_SECONDS: WallSeconds = WallSeconds(30.0)
"""How often the log repeats that the engine does not answer."""
SERVING_GRACE_SECONDS: WallSeconds = WallSeconds(2.5)
"""An engine that is slow to answer counts as serving for so long; one that refuses the connection does not."""


class Engine(Protocol):
    """The engine's HTTP interface. Both methods raise EngineUnreachableError."""

    async def describe(self) -> EngineFacts: ...

    async def load(self) -> EngineLoad: ...


class EngineProbe:
    """Watches one engine. `load`, `names` and `serving` are what reports carry."""

    def __init__(self, engine: Engine, state: SessionState, board: HealthBoard) -> None:
        self._engine = engine
        self._state = state
        self._board = board
        self.load = EngineLoad()
        self.names = FurtherNames()
        self.serving = False
        self._contradiction = ""
        """Why the engine cannot be followed as it describes itself now; empty while it can."""
        self._refused = False
        """Whether nothing listens where the engine was."""
        self._answered_at = WallSeconds(0.0)
        self._returned = asyncio.Event()
        """Set when an engine that was away serves again."""
        board.missing(ENGINE_PART, "not asked yet")

    async def run(self) -> None:
        while True:
            if self._state.session is not None:
                await self._look()
            await self._state.clock.sleep_wall(self._state.settings.report_seconds)

    async def facts(self) -> EngineFacts:
        """What the engine is, as soon as it answers."""
        clock, settings = self._state.clock, self._state.settings
        logged_at: WallSeconds | None = None
        while True:
            try:
                facts = await self._engine.describe()
            except EngineUnreachableError as error:
                self._board.missing(ENGINE_PART, str(error))
                if logged_at is None or clock.wall() - logged_at >= ENGINE_LOG_SECONDS:
                    logged_at = clock.wall()
                    log.info("waiting_for_engine", reason=str(error))
                await clock.sleep_wall(ENGINE_RETRY_SECONDS)
                continue
            self._on_answer()
            self._note_names(facts.further_names)
            return replace(facts, block_tokens=settings.engine_block_tokens or facts.block_tokens)

    async def engine_to_follow(self) -> tuple[EngineFacts, BlockTranslator]:
        """What the engine is, as soon as its cache can be followed. Raises SettingsError where the first engine cannot be;
        a later one is reported as not serving until it can."""
        clock = self._state.clock
        logged_at: WallSeconds | None = None
        while True:
            facts = await self.facts()
            try:
                translator = self._state.new_translator(facts)
            except SettingsError as error:
                if self._state.session is None:
                    raise
                self._contradiction = error.message
                self._on_away(error.message)
                if logged_at is None or clock.wall() - logged_at >= ENGINE_LOG_SECONDS:
                    logged_at = clock.wall()
                    log.warning("engine_not_followed", reason=error.message)
                await clock.sleep_wall(self._state.settings.report_seconds)
            else:
                self._contradiction = ""
                self._on_answer()
                return facts, translator

    async def next_engine(self) -> EngineFacts:
        """Wait until an engine that was away serves again, or another took its place."""
        await self._returned.wait()
        self._returned.clear()
        return await self.facts()

    async def refresh_load(self) -> None:
        """Raises EngineUnreachableError."""
        self.load = await self._engine.load()

    async def _look(self) -> None:
        try:
            await self.refresh_load()
        except EngineUnreachableError as error:
            if error.refused and not self._refused:
                self._refused = True
                self._state.forget_ended_engine()
            silent_seconds = self._state.clock.wall() - self._answered_at
            if self.serving and (error.refused or silent_seconds > SERVING_GRACE_SECONDS):
                log.warning("engine_unreachable", reason=str(error))
                self._on_away(str(error))
        else:
            returned = not self.serving and not self._contradiction
            self._note_names(self.load.further_names or self.names)
            self._on_answer()
            if returned:
                log.info("engine_reachable")
                self._returned.set()
                self._state.report_now()
            await self._check_model()

    async def _check_model(self) -> None:
        """An engine that serves another model or context length than it joined with is another engine."""
        session, load = self._state.session, self.load
        if session is None or not load.model or self._contradiction:
            return
        before = (session.facts.model, session.facts.max_model_len)
        now = (load.model, load.max_model_len or session.facts.max_model_len)
        if now == before:
            return
        log.warning("engine_replaced", model=load.model, max_model_len=load.max_model_len, before=before)
        self._on_away(f"it serves {now} now, and joined with {before}")
        if session.translator is None:
            self._returned.set()
            return
        facts, translator = await self.engine_to_follow()
        if self._state.session is session:
            self._state.begin(facts, "unknown", translator, detail="an engine with another model took its place")

    def _note_names(self, names: FurtherNames) -> None:
        if names.dropped != self.names.dropped:
            log.warning("engine_names_dropped", dropped=names.dropped, kept=len(names.aliases) + len(names.adapters))
        self.names = names

    def _on_away(self, reason: str) -> None:
        self.serving = False
        self.load = EngineLoad()
        self._board.missing(ENGINE_PART, reason)
        self._state.report_now()

    def _on_answer(self) -> None:
        self._answered_at = self._state.clock.wall()
        self._refused = False
        if not self._contradiction:
            self.serving = True
            self._board.restored(ENGINE_PART)
