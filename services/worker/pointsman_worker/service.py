"""The worker: follows one engine's cache and tells the log, in pool keys, what is in it.

Four loops share what this instance is at the moment, its *life*: one epoch with a translator and a ledger. The
*follower* reads the engine's events into the translator. The *writer* is the only one that appends, one event
at a time: it joins, writes net changes every few milliseconds, snapshots that were asked for, and a report a
second. The *watcher* asks the engine over HTTP how it is. The *answerer* takes `cmd.resync`.

While the log is away nothing queues up: changes go on netting out in the translator, which never holds more than
the cache itself, and what is written in the end is the difference. A report is made by the writer right after the
changes before it were confirmed, so its digest is that of exactly what the log holds.

A life ends, and another begins with a higher epoch, when the engine restarts, or when it lost events that its
replay socket no longer has. The second kind keeps what is believed and says it again in a snapshot, but joins as
`unknown`, because blocks may have come and gone unseen; only a cleared cache makes it known again. The log says so with
a CacheGap. Within a life that is unknown anyway, a further gap is only written down, once a report at most. When the
log itself was recreated, lost its tail or dropped what this life began with, the same cache begins a new life, too.

What is in doubt and not confirmed again within UNCONFIRMED_WALL_SECONDS is believed no longer: blocks from before a gap,
and all blocks where removals may be lost unnoticed. That is so without a replay socket, while it does not answer, and for the
rest of an engine's life once it has contradicted its own events.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, assert_never

import msgspec
import structlog

from pointsman.adapters.calibration_file import Calibration
from pointsman.adapters.clocks import wall_time_of
from pointsman.adapters.http_engine import EngineAwayError, EngineFacts, EngineLoad, FurtherNames
from pointsman.adapters.kv_events.events import (
    Cursor,
    EngineAttached,
    EngineBatch,
    EngineGap,
    EngineItem,
    EngineNoise,
    EngineReplayed,
    EngineRestarted,
    EngineResumed,
)
from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import ResyncAnswered, ResyncCache
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft, InstanceReported
from pointsman.contracts.subjects import resync_subject
from pointsman.ports import Clock, Commands, EventLog, LogMissingError, LogUnavailableError, Reply
from pointsman.primitives import Epoch, InstanceId, PoolName, Seconds, Sequence
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman.state.engine_profiles import PROFILES
from pointsman_worker import handover
from pointsman_worker.event_sequencer import CacheEvents, CacheEventSequencer
from pointsman_worker.handover import Handover
from pointsman_worker.settings import SettingsError, WorkerSettings, role_of
from pointsman_worker.translator import BlockTranslator

log = structlog.get_logger()

ENGINE_PART = "engine"
WRITES_PART = "writes"

PENDING_KEYS_MAX = 100_000
"""With more changes than this waiting, a snapshot is written instead."""
RESYNCS_WAITING_MAX = 16
RESYNC_SECONDS_MAX = 5.0
ENGINE_RETRY_SECONDS = 0.25
ENGINE_LOG_SECONDS = 30.0
"""How often the log repeats that the engine is still away."""
SERVING_GRACE_SECONDS = 2.5
"""An engine that is slow to answer counts as serving for so long; one that refuses the connection does not."""
APPEND_RETRY_SECONDS = 0.2
APPEND_RETRY_SECONDS_MAX = 2.0
LOG_CHECK_SECONDS = 5.0
"""How often the writer looks whether the log still has what this life began with."""
LEAVE_SECONDS_MAX = 1.5
RESTART_WALL_SECONDS = 10.0
"""How long a worker that pauses asks not to be suspected. Most of a restart is the start of Python, and the machine may be
busy."""
UNCONFIRMED_WALL_SECONDS = 45.0
"""How long a block is believed in whose removal may have been missed, unless something confirms it. With the time that it takes to
notice a loss, below a minute."""
PARKED_SECONDS_MAX = 3.0
"""How long a store may wait for the block before it in a cache of which nothing was missed."""

CacheKnown = Literal["empty", "unknown", "no_events"]


class Engine(Protocol):
    """The engine's HTTP side. Both raise EngineAwayError."""

    async def describe(self) -> EngineFacts: ...

    async def load(self) -> EngineLoad: ...


class EventSource(Protocol):
    """The engine's KV events, in order, gaps and restarts marked; for ever."""

    @property
    def replays(self) -> bool:
        """Whether missed events can be asked for, so that a new engine is told from the old one by them."""
        ...

    @property
    def certain(self) -> bool:
        """Whether all that was missed so far was had again, or will be."""
        ...

    @property
    def cursor(self) -> Cursor | None:
        """How far the items go that were given out."""
        ...

    def items(self, after: Cursor | None = None) -> AsyncGenerator[EngineItem, None]: ...


@dataclass(slots=True)
class CacheSession:
    """One epoch of the instance. `translator` is None where the engine publishes no events."""

    ledger: CacheEventSequencer
    facts: EngineFacts
    cache: CacheKnown
    translator: BlockTranslator | None
    detail: str = ""
    """Why the contents are unknown."""
    distrusted: bool = False
    """Whether the engine has contradicted its own events."""
    joined_at: Sequence = 0
    """Where in the log this life began; 0 before it has."""
    log_identity: str = ""
    """Of the log that has it; empty before it was asked."""
    snapshot_due: bool = False
    missed: int = 0
    """Engine batches or events lost for good, not yet written down."""
    missed_reason: str = ""

    @property
    def epoch(self) -> Epoch:
        return self.ledger.epoch


class WorkerService:
    """One agent beside one engine. `run` until `leave`."""

    def __init__(
        self,
        *,
        event_log: EventLog,
        commands: Commands,
        clock: Clock,
        board: HealthBoard,
        settings: WorkerSettings,
        instance: InstanceId,
        engine: Engine,
        events: EventSource | None,
        calibration: Calibration | None = None,
        unconfirmed_wall_seconds: Seconds = UNCONFIRMED_WALL_SECONDS,
    ) -> None:
        """`events` None: the engine publishes none, and the instance joins as one whose cache nobody knows. `calibration`:
        what the engine was measured to cost; without it, what its profile says."""
        self._log = event_log
        self._commands = commands
        self._clock = clock
        self._board = board
        self._settings = settings
        self._instance = instance
        self._engine = engine
        self._events = events
        self._calibration = calibration
        self._unconfirmed_wall_seconds = unconfirmed_wall_seconds
        self._life: CacheSession | None = None
        self._last_epoch = Epoch(0)
        self._load = EngineLoad()
        self._names = FurtherNames()
        self._contradiction = ""
        """Why the engine cannot be followed as it describes itself now; empty while it can."""
        self._serving = False
        self._refused = False
        """Whether nothing listens where the engine was."""
        self._answered_at: Seconds = 0.0
        self._returned = asyncio.Event()
        """Set when an engine that was away serves again."""
        self._undecodable = 0
        self._wake = asyncio.Event()
        self._report_at: Seconds = 0.0
        self._log_checked_at: Seconds = 0.0
        self._written: Sequence = 0
        """Log sequence of the last write that was confirmed."""
        self._went_back = False
        """Whether a write came to stand before an earlier one: the log lost its tail in between."""
        self._resyncs: list[asyncio.Future[None]] = []
        self._leaving = ""
        self._pausing = False
        """Whether a successor is to go on where this worker stops."""
        self._taken_over: tuple[CacheSession, Sequence] | None = None
        """The life of the worker before this one and its last write, until the engine has proved to be the same."""
        self._running: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        board.missing(ENGINE_PART, "not asked yet")

    async def run(self) -> None:
        """Follow the engine and tell the log, until `leave`. Raises SettingsError where settings and engine
        contradict each other."""
        self._running = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(work) for work in (self._follow(), self._watch(), self._answer())]
                await self._write()
                for task in others:
                    task.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._stopped.set()

    async def pause(self) -> None:
        """Write what is pending, leave all that is known in the state directory, and end `run`: the instance stays."""
        self._pausing = True
        await self.leave("worker paused")

    async def leave(self, reason: str) -> None:
        """Write what is pending and that the instance leaves, and end `run`; gives up after LEAVE_SECONDS_MAX."""
        if self._running is None:
            return
        self._leaving = reason
        self._wake.set()
        try:
            async with asyncio.timeout(LEAVE_SECONDS_MAX):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("leave_unconfirmed", instance=self._instance, reason="the log did not confirm in time")
            self._running.cancel()
            await self._stopped.wait()

    # The follower

    async def _follow(self) -> None:
        facts = await self._engine_facts()
        while self._events is None or not facts.completes:
            facts = await self._follow_blindly(facts)
        cursor = self._take_over(facts)
        async with aclosing(self._events.items(cursor)) as items:
            async for item in items:
                await self._on_item(item)

    async def _follow_blindly(self, facts: EngineFacts) -> EngineFacts:
        """Without events, or with those of a cache by which nothing is placed, there is nothing to follow but whether the
        engine was replaced. What it then is."""
        if self._events is not None:
            log.info(
                "cache_not_followed", reason="the engine makes vectors only: it is placed by load", model=facts.model
            )
        self._begin_life(facts, "no_events", None)
        await self._returned.wait()
        self._returned.clear()
        return await self._engine_facts()

    async def _on_item(self, item: EngineItem) -> None:
        match item:
            case EngineResumed():
                with contextlib.suppress(EngineAwayError):
                    self._load = await self._engine.load()
                self._go_on()
            case EngineAttached() | EngineRestarted():
                self._taken_over = None
                log.info("engine_followed", restarted=isinstance(item, EngineRestarted), exact=item.exact)
                facts, translator = await self._engine_to_follow()
                socket = "" if self._events is not None and self._events.replays else ", and there is no replay socket"
                detail = "" if item.exact else f"the engine's first events may have been missed{socket}"
                self._begin_life(facts, "empty" if item.exact else "unknown", translator, detail=detail)
            case EngineBatch():
                self._on_batch(item)
            case EngineGap():
                telemetry.ENGINE_EVENT_GAPS.labels("lost").inc()
                self._on_missed(item.missed, item.reason)
            case EngineReplayed():
                telemetry.ENGINE_EVENT_GAPS.labels("replayed").inc()
                log.debug("engine_events_replayed", batches=item.recovered)
            case EngineNoise():
                self._on_undecodable(1, item.reason)
            case _:
                assert_never(item)

    def _on_batch(self, batch: EngineBatch) -> None:
        self._believe_no_longer()
        life = self._life
        assert life is not None
        translator = life.translator
        assert translator is not None
        now, dropped_before = self._clock.wall(), translator.tally.dropped
        for event in batch.events:
            telemetry.ENGINE_EVENTS.labels(str(event.__struct_config__.tag)).inc()
            translator.apply(event, now)
        if batch.unknown:
            telemetry.ENGINE_EVENTS.labels("unknown").inc(batch.unknown)
            log.debug("engine_event_unknown", sequence=batch.sequence, problem=batch.problem)
        if batch.undecodable:
            self._on_undecodable(batch.undecodable, batch.problem)
            self._on_missed(batch.undecodable, f"not understood: {batch.problem}"[:200])
        dropped = translator.tally.dropped - dropped_before
        if dropped:
            telemetry.ENGINE_STORES_DROPPED.inc(dropped)
            self._on_missed(dropped, translator.tally.problem)
        if translator.blocks_over:
            self._on_overflow(translator)
        if translator.changed:
            self._wake.set()

    def _on_undecodable(self, count: int, problem: str) -> None:
        self._undecodable += count
        telemetry.ENGINE_EVENTS_UNDECODABLE.inc(count)
        log.warning("engine_event_undecodable", count=count, problem=problem[:200])

    def _on_missed(self, missed: int, reason: str) -> None:
        """What is held stays believed, but nobody shall take it for certain any more."""
        life = self._life
        assert life is not None
        assert life.translator is not None
        life.translator.doubt(self._clock.wall())
        self._contents_unknown(life, missed, reason)

    def _on_overflow(self, translator: BlockTranslator) -> None:
        """More is believed to be held than the engine has room for: removals were lost. Where none is known to be, nothing that
        the events say is certain any more."""
        over, life = translator.blocks_over, self._life
        reason = f"more blocks were stored and not removed than the cache has room for, by {over}: removals were lost"
        if translator.trim():
            self._distrust(reason, forget=False)
        elif life is not None and life.cache == "empty":
            self._contents_unknown(life, 0, reason)

    def _contents_unknown(self, life: CacheSession, missed: int, reason: str) -> None:
        if life.cache == "empty":
            log.warning("engine_events_lost", missed=missed, reason=reason)
            life = self._begin_life(life.facts, "unknown", life.translator, detail=reason, distrusted=life.distrusted)
            life.snapshot_due = True
        life.missed += missed
        life.missed_reason = reason
        self._wake.set()

    def _distrust(self, reason: str, *, forget: bool) -> None:
        """The engine's events are not what is in its cache. From here on everything must be confirmed again and again."""
        life = self._life
        assert life is not None
        assert life.translator is not None
        log.warning("engine_events_distrusted", reason=reason)
        translator = self._new_translator(life.facts) if forget else life.translator
        translator.fade(self._clock.wall(), fading=True)
        life = self._begin_life(life.facts, "unknown", translator, detail=reason, distrusted=True)
        life.snapshot_due = True

    def _believe_no_longer(self) -> None:
        """Give up what nothing has confirmed for too long. Asked with each batch, too: while the log is away the writer waits,
        and what is noted of blocks in doubt must not grow until it is back."""
        life, now = self._life, self._clock.wall()
        if life is None or life.translator is None:
            return
        translator = life.translator
        translator.fade(now, fading=not self._certain(life))
        parked_since = translator.parked_since
        if parked_since is not None and life.cache == "empty" and now - parked_since > PARKED_SECONDS_MAX:
            self._on_missed(0, "blocks were stored that follow one which never was")
        given_up = translator.expire(now - self._unconfirmed_wall_seconds)
        if given_up:
            telemetry.ENGINE_BLOCKS_EXPIRED.inc(given_up)
            if life.cache == "empty":
                self._contents_unknown(life, 0, "blocks could not be confirmed in time")

    def _certain(self, life: CacheSession) -> bool:
        """Whether missed events can be had again, and what they say is true."""
        return not life.distrusted and (self._events is None or self._events.certain)

    def _begin_life(
        self,
        facts: EngineFacts,
        cache: CacheKnown,
        translator: BlockTranslator | None,
        *,
        detail: str = "",
        distrusted: bool = False,
    ) -> CacheSession:
        unix_ms = int(wall_time_of(self._clock.now(), self._clock.speed) * 1000)
        self._last_epoch = Epoch(max(self._last_epoch + 1, unix_ms))
        ledger = CacheEventSequencer(self._instance, self._last_epoch)
        self._life = life = CacheSession(ledger, facts, cache, translator, detail, distrusted)
        self._report_at = self._clock.wall()
        self._wake.set()
        log.info("epoch_started", instance=self._instance, epoch=life.epoch, cache=cache, model=facts.model)
        return life

    def _new_translator(self, facts: EngineFacts) -> BlockTranslator:
        if not facts.block_tokens:
            msg = "the engine's /metrics do not say its block size; set --engine-block-tokens"
            raise SettingsError(msg)
        settings = self._settings
        chain = KeyChain(secret=settings.secret.encode(), model=facts.model, block_tokens=settings.block_tokens)
        try:
            return BlockTranslator(
                chain, facts.block_tokens, capacity_blocks=facts.kv_capacity_tokens // facts.block_tokens
            )
        except ValueError as error:
            msg = (
                f"--block-tokens does not fit this engine: {error}; under pointsman up give a pool of --also a number of its "
                "own with --also-block-tokens"
            )
            raise SettingsError(msg) from error

    async def _engine_to_follow(self) -> tuple[EngineFacts, BlockTranslator]:
        """What the engine is, as soon as its cache can be followed. Raises SettingsError where an engine that was never
        followed cannot be; later that is the engine's fault, and waited for."""
        said_at: Seconds | None = None
        while True:
            facts = await self._engine_facts()
            try:
                translator = self._new_translator(facts)
            except SettingsError as error:
                if self._life is None:
                    raise
                self._contradiction = error.message
                self._on_away(error.message)
                if said_at is None or self._clock.wall() - said_at >= ENGINE_LOG_SECONDS:
                    said_at = self._clock.wall()
                    log.warning("engine_not_followed", reason=error.message)
                await self._clock.sleep_wall(self._settings.report_seconds)
            else:
                self._contradiction = ""
                self._on_answer()
                return facts, translator

    async def _engine_facts(self) -> EngineFacts:
        """What the engine is, as soon as it answers."""
        said_at: Seconds | None = None
        while True:
            try:
                facts = await self._engine.describe()
            except EngineAwayError as error:
                self._board.missing(ENGINE_PART, str(error))
                if said_at is None or self._clock.wall() - said_at >= ENGINE_LOG_SECONDS:
                    said_at = self._clock.wall()
                    log.info("waiting_for_engine", reason=str(error))
                await self._clock.sleep_wall(ENGINE_RETRY_SECONDS)
                continue
            self._on_answer()
            self._note_names(facts.further_names)
            return replace(facts, block_tokens=self._settings.engine_block_tokens or facts.block_tokens)

    # The watcher

    async def _watch(self) -> None:
        while True:
            if self._life is not None:
                await self._probe()
            await self._clock.sleep_wall(self._settings.report_seconds)

    async def _probe(self) -> None:
        try:
            self._load = await self._engine.load()
        except EngineAwayError as error:
            if error.refused and not self._refused:
                self._refused = True
                self._forget_the_gone()
            if self._serving and (error.refused or self._clock.wall() - self._answered_at > SERVING_GRACE_SECONDS):
                log.warning("engine_unreachable", reason=str(error))
                self._on_away(str(error))
        else:
            returned = not self._serving and not self._contradiction
            self._note_names(self._load.further_names or self._names)
            self._on_answer()
            if returned:
                log.info("engine_reachable")
                self._returned.set()
                self._report_now()
            await self._check_model()

    async def _check_model(self) -> None:
        """An engine that serves another model than it joined with, or with another context, is another engine, however that
        came about."""
        life, load = self._life, self._load
        if life is None or not load.model or self._contradiction:
            return
        before = (life.facts.model, life.facts.max_model_len)
        now = (load.model, load.max_model_len or life.facts.max_model_len)
        if now == before:
            return
        log.warning("engine_replaced", model=load.model, max_model_len=load.max_model_len, before=before)
        self._on_away(f"it serves {now} now, and joined with {before}")
        if life.translator is None:
            self._returned.set()
            return
        facts, translator = await self._engine_to_follow()
        if self._life is life:
            self._begin_life(facts, "unknown", translator, detail="an engine with another model took its place")

    def _note_names(self, names: FurtherNames) -> None:
        if names.dropped != self._names.dropped:
            log.warning("engine_names_dropped", dropped=names.dropped, kept=len(names.aliases) + len(names.adapters))
        self._names = names

    def _on_away(self, reason: str) -> None:
        self._serving = False
        self._load = EngineLoad()
        self._board.missing(ENGINE_PART, reason)
        self._report_now()

    def _on_answer(self) -> None:
        self._answered_at = self._clock.wall()
        self._refused = False
        if not self._contradiction:
            self._serving = True
            self._board.restored(ENGINE_PART)

    def _forget_the_gone(self) -> None:
        """The engine's process has ended, and its cache with it. With a replay socket the events of the next one say so."""
        life = self._life
        if life is not None and life.translator is not None and self._events is not None and not self._events.replays:
            reason = "the engine's process had ended, and there is no replay socket"
            self._begin_life(life.facts, "unknown", self._new_translator(life.facts), detail=reason)

    def _report_now(self) -> None:
        self._report_at = self._clock.wall()
        self._wake.set()

    # The answerer

    async def _answer(self) -> None:
        subject = resync_subject(PoolName(self._settings.pool), self._instance)
        async with self._commands.serve(subject, self._on_resync):
            await asyncio.Event().wait()

    async def _on_resync(self, command: AnyCommand, reply: Reply) -> None:
        """Answered once the snapshot is in the log, or with why it will not be; at once where all begins again."""
        if isinstance(command, ResyncCache) and command.rejoin and self._life is not None:
            if self._life.joined_at:
                log.warning("rejoin_requested", reason=command.reason)
                self._last_epoch = max(self._last_epoch, command.above)
                self._begin_again(self._life)
            refusal = ""
        elif isinstance(command, ResyncCache) and command.distrust:
            refusal = self._refusal(command)
            if not refusal and self._life is not None and self._life.epoch <= command.above:
                self._distrust(command.reason, forget=True)
        else:
            refusal = self._refusal(command) or await self._snapshot_written()
        await reply(ResyncAnswered(instance=self._instance, accepted=not refusal, detail=refusal))

    async def _snapshot_written(self) -> str:
        """Have a snapshot written and wait for it; why it was not, or nothing."""
        written = asyncio.get_running_loop().create_future()
        self._resyncs.append(written)
        self._wake.set()
        try:
            async with asyncio.timeout(RESYNC_SECONDS_MAX):
                await written
        except TimeoutError:
            return "the log did not confirm in time"
        finally:
            with contextlib.suppress(ValueError):
                self._resyncs.remove(written)
        return ""

    def _refusal(self, command: AnyCommand) -> str:
        """Why no snapshot can be written; empty if one can."""
        if not isinstance(command, ResyncCache) or command.instance != self._instance:
            return f"this is the worker of {self._instance}, and takes ResyncCache only"
        if self._life is None:
            return "the engine does not answer yet"
        if self._life.translator is None:
            return "the engine publishes no events, or none that anybody needs"
        if len(self._resyncs) >= RESYNCS_WAITING_MAX:
            return f"{RESYNCS_WAITING_MAX} snapshots wait to be written already"
        return ""

    # The writer

    async def _write(self) -> None:
        while not self._leaving:
            await self._until_due()
            self._wake.clear()
            self._believe_no_longer()
            life = self._life
            reporting = self._clock.wall() >= self._report_at
            if reporting:
                self._report_at = self._clock.wall() + self._settings.report_seconds
            if life is not None and await self._write_life(life, reporting=reporting) and reporting:
                await self._report(life)
                await self._check_log(life)
        await self._say_goodbye()

    async def _until_due(self) -> None:
        """Until a report is due, or something changed and what comes with it had the time to come too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._report_at - self._clock.wall())):
                await self._wake.wait()
                await self._clock.sleep_wall(0.0 if self._leaving else self._settings.flush_ms / 1000)

    async def _write_life(self, life: CacheSession, *, reporting: bool) -> bool:
        """Write what the log does not know yet of this life. False when the life ended meanwhile."""
        if not life.joined_at and not await self._append(self._joined(life), life):
            return False
        answered, self._resyncs = self._resyncs, []
        for event in list(self._due_events(life, snapshot=bool(answered), gaps=reporting)):
            if not await self._append(event, life):
                self._resyncs = answered + self._resyncs
                return False
        for written in answered:
            if not written.done():
                written.set_result(None)
        return True

    def _due_events(self, life: CacheSession, *, snapshot: bool, gaps: bool) -> Iterator[CacheEvents]:
        if life.translator is None:
            return
        at = self._clock.now()
        if life.missed_reason and gaps:
            yield life.ledger.gap(at, life.missed, life.missed_reason)
            life.missed, life.missed_reason = 0, ""
        if snapshot or life.snapshot_due or life.translator.pending > PENDING_KEYS_MAX:
            life.snapshot_due = False
            yield from life.ledger.snapshot(at, life.translator.take_snapshot())
            return
        changes = life.translator.take_changes()
        if changes.cleared:
            life.cache, life.detail = "empty", ""
        yield from life.ledger.changes(at, changes)

    def _joined(self, life: CacheSession) -> InstanceJoined:
        settings, facts = self._settings, life.facts
        profile, measured = PROFILES[settings.engine_model], self._calibration
        return InstanceJoined(
            at=self._clock.now(),
            instance=self._instance,
            epoch=life.epoch,
            url=settings.engine_advertised_url or settings.engine_url,
            model=facts.model,
            block_tokens=settings.block_tokens,
            engine_block_tokens=facts.block_tokens or settings.block_tokens,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            max_model_len=facts.max_model_len,
            prefill=measured.prefill if measured else profile.prefill_cost,
            speed=settings.speed,
            engine_version=facts.version,
            cache=life.cache,
            dp_rank=settings.dp_rank,
            role=role_of(settings),
            decode=measured.decode if measured else profile.decode_cost,
            transfer_tokens_per_s=settings.kv_transfer_gb_per_s * 1e9 / profile.kv_bytes_per_token,
            adapters=list(self._names.adapters),
            aliases=list(self._names.aliases),
            completes=facts.completes,
            certain=self._certain(life),
            cache_detail=life.detail if life.cache == "unknown" else "",
        )

    async def _report(self, life: CacheSession, *, back_within: Seconds = 0.0) -> None:
        """One try: the next report says more than a late one."""
        translator, load = life.translator, self._load
        report = InstanceReported(
            at=self._clock.now(),
            instance=self._instance,
            epoch=life.epoch,
            serving=self._serving,
            waiting=load.waiting,
            running=load.running,
            kv_usage=load.kv_usage,
            sequence=life.ledger.sequence,
            blocks=translator.count if translator else 0,
            digest=translator.digest if translator else 0,
            undecodable=self._undecodable,
            adapters=list(self._names.adapters),
            aliases=list(self._names.aliases),
            certain=self._certain(life),
            back_within=back_within,
        )
        with contextlib.suppress(LogUnavailableError):
            self._confirm(await self._log.append(report))

    def _confirm(self, sequence: Sequence) -> None:
        self._went_back = self._went_back or sequence <= self._written
        self._written = sequence

    async def _check_log(self, life: CacheSession) -> None:
        """Begin a new life for the same cache when the log no longer has the beginning or the end of this one."""
        if not self._went_back and self._clock.wall() - self._log_checked_at < LOG_CHECK_SECONDS:
            return
        self._log_checked_at = self._clock.wall()
        try:
            extent = await self._log.extent()
        except (LogUnavailableError, LogMissingError):
            return
        life.log_identity = life.log_identity or extent.identity
        same = extent.identity == life.log_identity and not self._went_back
        if self._life is not life or (same and extent.first <= life.joined_at and self._written <= extent.last):
            return
        log.warning("log_recreated", identity=extent.identity, first=extent.first, last=extent.last)
        self._begin_again(life)

    def _begin_again(self, life: CacheSession) -> None:
        """Tell the whole story once more, under a new epoch: the log, or its leader, no longer knows it."""
        self._written, self._went_back = 0, False
        successor = self._begin_life(
            life.facts, life.cache, life.translator, detail=life.detail, distrusted=life.distrusted
        )
        successor.snapshot_due = life.translator is not None
        successor.missed, successor.missed_reason = life.missed, life.missed_reason

    async def _append(self, event: LogEvent, life: CacheSession) -> bool:
        """Append one event, however often it takes: what comes after it would be a gap without it. False when the
        life ended meanwhile, and nobody needs the event any more."""
        wait = APPEND_RETRY_SECONDS
        while self._life is life:
            try:
                self._confirm(await self._log.append(event))
            except LogUnavailableError as error:
                self._board.missing(WRITES_PART, str(error))
                if wait == APPEND_RETRY_SECONDS:
                    log.warning("log_unavailable", reason=str(error))
                await self._clock.sleep_wall(wait)
                wait = min(wait * 2, APPEND_RETRY_SECONDS_MAX)
            else:
                self._board.restored(WRITES_PART)
                life.joined_at = life.joined_at or self._written
                return True
        return False

    async def _say_goodbye(self) -> None:
        life = self._life
        if life is None or not life.joined_at or not await self._write_life(life, reporting=True):
            return
        if self._pausing:
            await self._report(life, back_within=RESTART_WALL_SECONDS * self._clock.speed)
            while (
                life.translator is not None and life.translator.changed and await self._write_life(life, reporting=True)
            ):
                pass
            self._hand_over(life)
            return
        await self._append(
            InstanceLeft(at=self._clock.now(), instance=self._instance, epoch=life.epoch, reason=self._leaving), life
        )

    # From worker to worker

    @property
    def _state_file(self) -> Path | None:
        settings = self._settings
        directory = settings.state_directory
        return Path(directory) / f"{settings.pool}.{self._instance}.worker" if directory else None

    def _hand_over(self, life: CacheSession) -> None:
        """Nothing is awaited in here: blocks and cursor are of the same moment."""
        path, translator = self._state_file, life.translator
        blocks = translator.to_keep() if translator is not None and life.cache == "empty" else None
        cursor = self._events.cursor if self._events is not None else None
        if path is None or blocks is None or cursor is None or not self._certain(life) or self._life is not life:
            log.info("handover_skipped", instance=self._instance, cache=life.cache)
            return
        kept = Handover(
            kept_at=self._unix_time(),
            keys=self._key_check(life.facts),
            joined=self._identity(life),
            epoch=life.epoch,
            sequence=life.ledger.sequence,
            joined_at=life.joined_at,
            written=self._written,
            log_identity=life.log_identity,
            cursor=cursor,
            blocks=blocks,
        )
        try:
            handover.leave(path, kept)
        except OSError as error:
            log.warning("handover_not_written", path=str(path), reason=str(error))
        else:
            log.info("handover_written", instance=self._instance, epoch=life.epoch, blocks=len(blocks.blocks))

    def _take_over(self, facts: EngineFacts) -> Cursor | None:
        """Read what the worker before this one left. Where its engine's events were read to, if there is anything."""
        path = self._state_file
        kept = handover.take(path, now=self._unix_time()) if path is not None else None
        if kept is None or kept.keys != self._key_check(facts):
            return None
        translator = self._new_translator(facts)
        try:
            translator.go_on_from(kept.blocks)
        except (ValueError, OverflowError) as error:
            log.warning("handover_unreadable", path=str(path), reason=str(error))
            return None
        self._last_epoch = kept.epoch
        ledger = CacheEventSequencer(self._instance, kept.epoch)
        ledger.sequence = kept.sequence
        life = CacheSession(
            ledger, facts, "empty", translator, joined_at=kept.joined_at, log_identity=kept.log_identity
        )
        if self._identity(life) != kept.joined:
            life.joined_at = 0  # it is another instance to the log, with the same cache
        self._taken_over = life, kept.written
        return kept.cursor

    def _go_on(self) -> None:
        """The engine is the one that the worker before this one followed."""
        assert self._taken_over is not None
        (life, written), self._taken_over = self._taken_over, None
        if not life.joined_at:
            self._begin_again(life)
            return
        self._life, self._written = life, written
        self._report_now()
        log.info("epoch_resumed", instance=self._instance, epoch=life.epoch, sequence=life.ledger.sequence)

    def _identity(self, life: CacheSession) -> bytes:
        """What the log is told of the instance when it joins, but for what its reports tell as well."""
        joined = msgspec.structs.replace(self._joined(life), at=0.0, adapters=[], aliases=[], certain=True)
        return msgspec.json.encode(joined)

    def _key_check(self, facts: EngineFacts) -> int:
        settings = self._settings
        return KeyChain(secret=settings.secret.encode(), model=facts.model, block_tokens=settings.block_tokens).root()

    def _unix_time(self) -> Seconds:
        return wall_time_of(self._clock.now(), self._clock.speed)
