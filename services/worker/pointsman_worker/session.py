"""The instance's current epoch and all transitions to the next: on engine restarts, lost events and a lost log. After
lost events the cache is `unknown`: blocks are unverified until confirmed or expired. A cleared cache is exact again."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import structlog

from pointsman.adapters.http_engine import EngineFacts
from pointsman.adapters.kv_events.events import Cursor, EngineItem
from pointsman.contracts.block_keys import KeyChain
from pointsman.ports import Clock, EngineTarget, unix_now
from pointsman.primitives import WHOLE_MAX, Epoch, InstanceId, Seconds, Sequence, WallSeconds
from pointsman.runtime import telemetry
from pointsman_worker.event_sequencer import CacheEventSequencer
from pointsman_worker.settings import SettingsError, WorkerSettings
from pointsman_worker.tiers import CacheTranslator

log = structlog.get_logger()

UNCONFIRMED_WALL_SECONDS: WallSeconds = WallSeconds(45.0)  # maximum age of an unverified block
FLUSH_SECONDS_MAX = 1.0
PARKED_SECONDS_MAX: WallSeconds = WallSeconds(3.0)

CacheKnown = Literal["empty", "unknown", "no_events"]


class EventSource(Protocol):
    @property
    def replays(self) -> bool: ...

    @property
    def certain(self) -> bool: ...

    @property
    def catching_up(self) -> bool: ...

    @property
    def cursor(self) -> Cursor | None: ...

    def items(self, after: Cursor | None = None) -> AsyncGenerator[EngineItem, None]: ...


@dataclass(slots=True)
class CacheSession:
    """`translator`: None if events are not followed. `detail`: why the cache is unknown. `joined_at`: log sequence, 0
    before. `missed`: lost batches or events not yet logged."""

    sequencer: CacheEventSequencer
    facts: EngineFacts
    cache: CacheKnown
    translator: CacheTranslator | None
    detail: str = ""
    distrusted: bool = False
    joined_at: Sequence = 0
    log_identity: str = ""
    snapshot_due: bool = False
    missed: int = 0
    missed_reason: str = ""

    @property
    def epoch(self) -> Epoch:
        return self.sequencer.epoch

    @property
    def exact(self) -> bool:
        """All blocks of the engine are known, also by a clear that is not written yet."""
        return self.cache == "empty" or (self.translator is not None and self.translator.device.keys.cleared)


@dataclass(slots=True)
class LogPosition:
    """`went_back`: a write got an earlier sequence, so the log lost its tail."""

    written: Sequence = 0
    went_back: bool = False

    def confirm(self, sequence: Sequence) -> None:
        self.went_back = self.went_back or sequence <= self.written
        self.written = sequence


@dataclass(slots=True)
class SessionState:
    """`withheld`: why nothing may be placed there whatever the engine says; empty if it may. `joined_epoch`: the newest
    that this process wrote, 0 if none or left."""

    target: EngineTarget
    settings: WorkerSettings
    clock: Clock
    events: EventSource | None
    unconfirmed_wall_seconds: WallSeconds = UNCONFIRMED_WALL_SECONDS
    session: CacheSession | None = None
    last_epoch: Epoch = field(default=Epoch(0))
    joined_epoch: Epoch = field(default=Epoch(0))
    withheld: str = ""
    answering: bool = False
    """The engine answers, and can be followed."""
    position: LogPosition = field(default_factory=LogPosition)
    undecodable: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `wake` if nothing more is to be gathered first."""
    report_at: WallSeconds = WallSeconds(0.0)
    report_wanted: bool = False
    """In the log."""
    leaders_flush: float = 0.0
    """Wall seconds for which the leader has changes gathered; 0 without one."""

    @property
    def labels(self) -> tuple[str, InstanceId]:
        """Of its metrics: pool and engine."""
        return self.settings.pool, self.instance

    @property
    def instance(self) -> InstanceId:
        return self.target.instance

    @property
    def serving(self) -> bool:
        """Whether requests may be placed there, as far as the worker knows."""
        return self.answering and not self.withheld

    def withhold(self, reason: str) -> None:
        if reason != self.withheld:
            self.withheld = reason
            self.report_now()

    def report_now(self) -> None:
        self.report_at = self.clock.wall()
        self.write_now()

    @property
    def flush_seconds(self) -> float:
        return max(self.settings.flush_ms / 1000, min(self.leaders_flush, FLUSH_SECONDS_MAX))

    def log_report(self) -> None:
        self.report_wanted = True
        self.write_now()

    def write_now(self) -> None:
        self.hurry.set()
        self.wake.set()

    @property
    def catching_up(self) -> bool:
        """What the events tell is the engine's past. Changes gather until it is the present; nothing expires for it."""
        return self.events is not None and self.events.catching_up

    def certain(self, session: CacheSession) -> bool:
        return not (session.distrusted or self.catching_up) and (self.events is None or self.events.certain)

    def begin(
        self,
        facts: EngineFacts,
        cache: CacheKnown,
        translator: CacheTranslator | None,
        *,
        detail: str = "",
        distrusted: bool = False,
    ) -> CacheSession:
        self.last_epoch = Epoch(max(self.last_epoch + 1, int(self.unix_time() * 1000)))
        sequencer = CacheEventSequencer(self.instance, self.last_epoch)
        self.session = session = CacheSession(sequencer, facts, cache, translator, detail, distrusted)
        # The log may have dropped the store.
        session.snapshot_due = translator is not None and translator.store is not None
        self.report_now()
        log.info("epoch_started", instance=self.instance, epoch=session.epoch, cache=cache, model=facts.model)
        return session

    def rejoin(self, session: CacheSession) -> None:
        """The same cache under a new epoch, because the log lost the current one."""
        self.position = LogPosition()
        successor = self.begin(
            session.facts, session.cache, session.translator, detail=session.detail, distrusted=session.distrusted
        )
        successor.snapshot_due = session.translator is not None
        successor.missed, successor.missed_reason = session.missed, session.missed_reason

    def on_events_lost(self, count: int, reason: str) -> None:
        session, translator = self.followed_session()
        translator.mark_counts_unverified(float(self.clock.wall()))
        self._contents_unknown(session, count, reason)

    def check_capacity(self, translator: CacheTranslator) -> None:
        """More blocks than fit mean lost removals; without a known loss the events are unreliable."""
        over, session = translator.device.blocks_over, self.session
        if not over:
            return
        reason = f"more blocks were stored and not removed than the cache has room for, by {over}: removals were lost"
        if translator.device.trim():
            self.distrust(reason, forget=False)
        elif session is not None and session.cache == "empty":
            self._contents_unknown(session, 0, reason)

    def distrust(self, reason: str, *, forget: bool) -> None:
        """All blocks need repeated confirmation from now on."""
        session, translator = self.followed_session()
        log.warning("engine_events_distrusted", reason=reason)
        if forget:
            translator = self.new_translator(session.facts)
        translator.device.keys.forget_clear()
        translator.set_unverifiable(float(self.clock.wall()), on=True)
        session = self.begin(session.facts, "unknown", translator, detail=reason, distrusted=True)
        session.snapshot_due = True

    def expire(self) -> None:
        """Also called per batch, because the writer blocks while the log is unavailable. Not while the engine does not
        answer: an epoch that begins then would offer it to the leader, which grants all that waits before the next report."""
        session, now = self.session, float(self.clock.wall())
        if session is None or session.translator is None or not self.answering:
            return
        translator = session.translator
        if not self.catching_up:
            translator.set_unverifiable(now, on=not self.certain(session))
        parked_since = translator.device.orphans.since
        if parked_since is not None and session.cache == "empty" and now - parked_since > float(PARKED_SECONDS_MAX):
            self.on_events_lost(0, "blocks were stored that follow one which never was")
        expired = translator.expire(now - float(self.unconfirmed_wall_seconds))
        if expired:
            self.wake.set()
            telemetry.KV_BLOCKS_EXPIRED.labels(*self.labels).inc(expired)
            if session.cache == "empty":
                self._contents_unknown(session, 0, "blocks could not be confirmed in time")

    def on_engine_restart(self) -> None:
        """It answers, and nothing listened at its address before. With a replay socket its events show that."""
        session = self.session
        replays = self.events is None or self.events.replays
        if session is not None and session.translator is not None and not replays:
            reason = "the engine's process had ended, and there is no replay socket"
            self.begin(session.facts, "unknown", self.new_translator(session.facts), detail=reason)

    def followed_session(self) -> tuple[CacheSession, CacheTranslator]:
        session = self.session
        assert session is not None
        assert session.translator is not None
        return session, session.translator

    def new_translator(self, facts: EngineFacts) -> CacheTranslator:
        """Raises SettingsError if the engine's block size is unknown or does not fit."""
        if not facts.block_tokens:
            raise SettingsError("the engine's /metrics do not say its block size; set --engine-block-tokens")
        capacity = facts.kv_capacity_tokens // facts.block_tokens
        try:
            made = CacheTranslator(
                self.key_chain(facts),
                facts.block_tokens,
                capacity_blocks=capacity,
                shared_store=self.settings.shared_kv_store,
            )
        except ValueError as error:
            raise SettingsError(
                f"--block-tokens does not fit this engine: {error}; give a common multiple of the engines' block sizes, to a "
                "further pool of pointsman up with #block_tokens=N in --also"
            ) from error
        if self.session is not None and self.session.translator is not None:
            made.take_over_store(self.session.translator)
        return made

    def key_chain(self, facts: EngineFacts) -> KeyChain:
        settings = self.settings
        return KeyChain(secret=settings.secret.encode(), model=facts.model, block_tokens=settings.block_tokens)

    def unix_time(self) -> Seconds:
        return unix_now(self.clock)

    def _contents_unknown(self, session: CacheSession, missed: int, reason: str) -> None:
        """A clear that is not written yet would make the cache exact for the log, so it is not written any more."""
        keys = session.translator.device.keys if session.translator is not None else None
        if session.exact:
            log.warning("engine_events_lost", missed=missed, reason=reason)
            missed = min(session.missed + missed, WHOLE_MAX)
            session = self.begin(
                session.facts, "unknown", session.translator, detail=reason, distrusted=session.distrusted
            )
            session.snapshot_due = True
            if keys is not None:
                keys.forget_clear()
        session.missed = min(session.missed + missed, WHOLE_MAX)
        session.missed_reason = reason
        self.wake.set()
