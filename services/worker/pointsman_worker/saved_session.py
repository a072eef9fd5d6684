"""Handover file from a stopped worker to its successor: blocks with their engine hashes, which the log does not have,
and the cursor in the engine's events. Used once and while fresh, since another worker may then have written for this
instance."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import structlog

from pointsman.adapters.http_engine import EngineFacts
from pointsman.adapters.kv_events.events import Cursor
from pointsman.adapters.owner_only import write_whole
from pointsman.primitives import Epoch, Seconds, Sequence, WallSeconds
from pointsman_worker.event_sequencer import CacheEventSequencer
from pointsman_worker.fleet_events import FleetEvents
from pointsman_worker.session import CacheSession
from pointsman_worker.settings import FRESH_WALL_SECONDS, WorkerSettings
from pointsman_worker.tiers import HeldTiers

log = structlog.get_logger()

BREATH_WALL_SECONDS: WallSeconds = WallSeconds(0.1)
"""Between two restored caches: 40,000 blocks keep the event loop for 0.5 s, and others have reports to write."""
FILE_BYTES_MAX = 1 << 30
SUFFIX = ".worker"


class SavedSession(msgspec.Struct, frozen=True, kw_only=True):
    """`joined`: the join event without times. `written`: log sequence of the last write. `kept_at`: Unix time. `engine`:
    the target's identity."""

    kept_at: Seconds
    keys: int
    joined: bytes
    epoch: Epoch
    sequence: Sequence
    joined_at: Sequence
    written: Sequence
    log_identity: str
    cursor: Cursor
    blocks: HeldTiers
    engine: str = ""


def write_handover(path: Path, handover: SavedSession) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.msgpack.encode(handover))


def read_handover(path: Path, *, now: Seconds) -> SavedSession | None:
    """Deletes the file. Returns None if it is missing, invalid or too old at the Unix time `now`."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return None
        content = path.read_bytes()
        path.unlink()
        found = msgspec.msgpack.decode(content, type=SavedSession)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError) as error:
        log.warning("handover_unreadable", path=str(path), reason=str(error)[:200])
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    age = now - found.kept_at
    if not 0 <= age <= float(FRESH_WALL_SECONDS):
        log.info("handover_expired", path=str(path), seconds=round(age))
        return None
    return found


def remove_expired(settings: WorkerSettings, *, now: Seconds) -> None:
    """Of engines of this pool that did not come back: nobody else would read, and so delete, their files."""
    if not settings.state_directory:
        return
    for path in Path(settings.state_directory).glob(f"{settings.pool}.*{SUFFIX}"):
        with contextlib.suppress(OSError):
            age = now - path.stat().st_mtime
            if age > float(FRESH_WALL_SECONDS):
                path.unlink()
                log.info("handover_expired", path=str(path), seconds=round(age))


class SessionStore:
    def __init__(self, fleet_events: FleetEvents, turns: asyncio.Lock | None = None) -> None:
        """`turns`: of the engines of one worker, to restore their caches."""
        self._turns = turns or asyncio.Lock()
        self._fleet_events = fleet_events
        self._state = fleet_events.state
        self._loaded: tuple[CacheSession, Sequence] | None = None

    @property
    def _path(self) -> Path | None:
        settings = self._state.settings
        directory = settings.state_directory
        return Path(directory) / f"{settings.pool}.{self._state.instance}{SUFFIX}" if directory else None

    def save(self, session: CacheSession) -> None:
        """No await: blocks and cursor must belong to the same moment."""
        state, path, translator = self._state, self._path, session.translator
        blocks = translator.dump() if translator is not None and session.cache == "empty" else None
        cursor = state.events.cursor if state.events is not None else None
        complete = state.certain(session) and state.session is session
        if path is None or blocks is None or cursor is None or not complete:
            log.info("handover_skipped", instance=state.instance, cache=session.cache)
            return
        handover = SavedSession(
            kept_at=state.unix_time(),
            keys=state.key_chain(session.facts).root(),
            joined=self._fleet_events.identity(session),
            epoch=session.epoch,
            sequence=session.sequencer.sequence,
            joined_at=session.joined_at,
            written=state.position.written,
            log_identity=session.log_identity,
            cursor=cursor,
            blocks=blocks,
            engine=state.target.identity,
        )
        try:
            write_handover(path, handover)
        except OSError as error:
            log.warning("handover_not_written", path=str(path), reason=str(error))
        else:
            log.info("handover_written", instance=state.instance, epoch=session.epoch, blocks=len(blocks.device.blocks))

    async def load(self, facts: EngineFacts) -> Cursor | None:
        """None: there is no usable handover. Raises SettingsError."""
        async with self._turns:
            cursor = self._restored(facts)
            if cursor is not None:
                await self._state.clock.sleep_wall(BREATH_WALL_SECONDS)
        return cursor

    def _restored(self, facts: EngineFacts) -> Cursor | None:
        state, path = self._state, self._path
        handover = read_handover(path, now=state.unix_time()) if path is not None else None
        if handover is None or handover.keys != state.key_chain(facts).root():
            return None
        if handover.engine != state.target.identity and handover.engine and state.target.identity:
            log.info("handover_of_another_engine", instance=state.instance)
            return None
        translator = state.new_translator(facts)
        try:
            translator.restore(handover.blocks)
        except (ValueError, OverflowError) as error:
            log.warning("handover_unreadable", path=str(path), reason=str(error))
            return None
        state.last_epoch = handover.epoch
        sequencer = CacheEventSequencer(state.instance, handover.epoch)
        sequencer.sequence = handover.sequence
        session = CacheSession(
            sequencer, facts, "empty", translator, joined_at=handover.joined_at, log_identity=handover.log_identity
        )
        if self._fleet_events.identity(session) != handover.joined:
            session.joined_at = 0  # the log needs a new join event
        self._loaded = session, handover.written
        return handover.cursor

    def resume(self) -> None:
        assert self._loaded is not None
        (session, written), self._loaded = self._loaded, None
        state = self._state
        if not session.joined_at:
            state.rejoin(session)
            return
        state.session, state.position.written = session, written
        state.joined_epoch = session.epoch
        state.report_now()
        log.info("epoch_resumed", instance=state.instance, epoch=session.epoch, sequence=session.sequencer.sequence)

    def discard(self) -> None:
        self._loaded = None
