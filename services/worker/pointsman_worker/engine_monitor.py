"""Polls the engine's /health, /v1/models and /metrics each report interval."""

import asyncio
from dataclasses import replace
from typing import Protocol

import structlog

from pointsman.adapters.http_engine import EngineFacts, EngineLoad, EngineUnreachableError, FurtherNames
from pointsman.ports import Clock
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_worker.session import SessionState
from pointsman_worker.settings import SettingsError
from pointsman_worker.tiers import CacheTranslator

log = structlog.get_logger()

ENGINE_PART = "engine"
ENGINE_RETRY_SECONDS: WallSeconds = WallSeconds(0.25)
ENGINE_LOG_SECONDS: WallSeconds = WallSeconds(30.0)
SERVING_GRACE_SECONDS: WallSeconds = WallSeconds(2.5)  # for timeouts; a refused connection counts at once


class Engine(Protocol):
    """Both methods raise EngineUnreachableError."""

    async def describe(self) -> EngineFacts: ...

    async def load(self) -> EngineLoad: ...


class _LogPace:
    """A line at once, then one each ENGINE_LOG_SECONDS."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at: WallSeconds | None = None

    def is_due(self) -> bool:
        now = self._clock.wall()
        if self._logged_at is not None and now - self._logged_at < ENGINE_LOG_SECONDS:
            return False
        self._logged_at = now
        return True


class EngineMonitor:
    def __init__(self, engine: Engine, state: SessionState, board: HealthBoard) -> None:
        self._engine = engine
        self._state = state
        self._board = board
        self.load = EngineLoad()
        self.names = FurtherNames()
        self._unfollowable = ""
        self._refused = False
        self._answered_at = WallSeconds(0.0)
        self._recovered = asyncio.Event()  # the engine serves again
        board.missing(ENGINE_PART, "not asked yet")

    async def run(self) -> None:
        while True:
            if self._state.session is not None:
                await self._poll()
            await self._state.clock.sleep_wall(self._state.settings.report_seconds)

    async def facts(self) -> EngineFacts:
        """Waits until the engine describes itself. One that takes another's place is reported as not serving until then, as
        what is known is of the other."""
        clock, settings = self._state.clock, self._state.settings
        log_pace = _LogPace(clock)
        while True:
            try:
                facts = await self._engine.describe()
            except EngineUnreachableError as error:
                if self._state.session is None:
                    self._board.missing(ENGINE_PART, str(error))
                else:
                    self._on_unfollowable(str(error))
                if log_pace.is_due():
                    log.info("waiting_for_engine", reason=str(error))
                await clock.sleep_wall(ENGINE_RETRY_SECONDS)
                continue
            self._unfollowable = ""
            self._on_answer()
            self._set_names(facts.further_names)
            return replace(facts, block_tokens=settings.engine_block_tokens or facts.block_tokens)

    async def engine_to_follow(self) -> tuple[EngineFacts, CacheTranslator]:
        """Raises SettingsError if the first engine's cache cannot be followed; a later one is reported as not
        serving."""
        clock = self._state.clock
        log_pace = _LogPace(clock)
        while True:
            facts = await self.facts()
            try:
                translator = self._state.new_translator(facts)
            except SettingsError as error:
                if self._state.session is None:
                    raise
                self._on_unfollowable(error.message)
                if log_pace.is_due():
                    log.warning("engine_not_followed", reason=error.message)
                await clock.sleep_wall(self._state.settings.report_seconds)
            else:
                return facts, translator

    async def next_engine(self) -> EngineFacts:
        """Waits until an unreachable engine serves again or was replaced."""
        await self._recovered.wait()
        self._recovered.clear()
        return await self.facts()

    async def refresh_load(self) -> None:
        """Raises EngineUnreachableError."""
        self.load = await self._engine.load()

    async def _poll(self) -> None:
        try:
            await self.refresh_load()
        except EngineUnreachableError as error:
            self._refused = self._refused or error.refused
            silent_seconds = self._state.clock.wall() - self._answered_at
            if self._state.answering and (error.refused or silent_seconds > SERVING_GRACE_SECONDS):
                log.warning("engine_unreachable", reason=str(error))
                self._on_unreachable(str(error))
        else:
            recovered = not self._state.answering and not self._unfollowable
            if self._refused:
                self._state.on_engine_restart()
            self._set_names(self.load.further_names or self.names)
            self._on_answer()
            if recovered:
                log.info("engine_reachable")
                self._recovered.set()
                self._state.report_now()
            if self._state.answering and self.load.late:
                self._board.degraded(ENGINE_PART, self.load.late)
            await self._check_model()

    async def _check_model(self) -> None:
        session, load = self._state.session, self.load
        if session is None or not load.model or self._unfollowable:
            return
        before = (session.facts.model, session.facts.max_model_len)
        now = (load.model, load.max_model_len or session.facts.max_model_len)
        if now == before:
            return
        log.warning("engine_replaced", model=load.model, max_model_len=load.max_model_len, before=before)
        self._on_unreachable(f"it serves {now} now, and joined with {before}")
        if session.translator is None:
            self._recovered.set()
            return
        facts, translator = await self.engine_to_follow()
        if self._state.session is session:
            self._state.begin(facts, "unknown", translator, detail="an engine with another model took its place")

    def _set_names(self, names: FurtherNames) -> None:
        if names.dropped != self.names.dropped:
            log.warning("engine_names_dropped", dropped=names.dropped, kept=len(names.aliases) + len(names.adapters))
        self.names = names

    def _on_unfollowable(self, reason: str) -> None:
        self._unfollowable = reason
        self._on_unreachable(reason)

    def _on_unreachable(self, reason: str) -> None:
        self._board.missing(ENGINE_PART, reason)
        self.load = EngineLoad()
        if self._state.answering:
            self._state.answering = False
            self._state.report_now()

    def _on_answer(self) -> None:
        self._answered_at = self._state.clock.wall()
        self._refused = False
        if not self._unfollowable:
            self._state.answering = True
            self._board.restored(ENGINE_PART)
