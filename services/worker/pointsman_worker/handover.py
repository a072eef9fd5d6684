"""What a stopped worker leaves in a file for the one started in its place: the cache as the log knows it, and how far the
engine's events were read.

The log holds pool keys only, and an engine's removals name engine hashes, so what joins the two must be kept. The successor
resumes the epoch if the engine still has the very batch that was read last. A file is used once and only while it is fresh:
later another worker may have written of this instance.
"""

import contextlib
from pathlib import Path

import msgspec
import structlog

from pointsman.adapters.http_engine import EngineFacts
from pointsman.adapters.kv_events.events import Cursor
from pointsman.primitives import Epoch, Seconds, Sequence, WallSeconds
from pointsman_worker.event_sequencer import CacheEventSequencer
from pointsman_worker.fleet_events import FleetEvents
from pointsman_worker.session import CacheSession
from pointsman_worker.translator import HeldBlocks

log = structlog.get_logger()

FRESH_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
FILE_BYTES_MAX = 1 << 30


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """`joined`: the instance as the log knows it, without times. `written`: the log's sequence of the last write.
    `keys`: stands for secret, model and block size. `kept_at`: Unix time."""

    kept_at: Seconds
    keys: int
    joined: bytes
    epoch: Epoch
    sequence: Sequence
    joined_at: Sequence
    written: Sequence
    log_identity: str
    cursor: Cursor
    blocks: HeldBlocks


def leave(path: Path, handover: Handover) -> None:
    """Write the file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(msgspec.msgpack.encode(handover))
    unfinished.replace(path)


def take(path: Path, *, now: Seconds) -> Handover | None:
    """Read and delete the file; None if there is none that is fresh at the Unix time `now`. Never raises."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return None
        content = path.read_bytes()
        path.unlink()
        found = msgspec.msgpack.decode(content, type=Handover)
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


class Successor:
    """Saves the session for the next worker, and resumes that of the one before."""

    def __init__(self, fleet_events: FleetEvents) -> None:
        self._fleet_events = fleet_events
        self._state = fleet_events.state
        self._loaded: tuple[CacheSession, Sequence] | None = None
        """The earlier worker's session and last write, until the engine has proved to be the same."""

    @property
    def _path(self) -> Path | None:
        settings = self._state.settings
        directory = settings.state_directory
        return Path(directory) / f"{settings.pool}.{self._state.instance}.worker" if directory else None

    def save(self, session: CacheSession) -> None:
        """Without an await: blocks and cursor are of the same moment."""
        state, path, translator = self._state, self._path, session.translator
        blocks = translator.dump() if translator is not None and session.cache == "empty" else None
        cursor = state.events.cursor if state.events is not None else None
        complete = state.certain(session) and state.session is session
        if path is None or blocks is None or cursor is None or not complete:
            log.info("handover_skipped", instance=state.instance, cache=session.cache)
            return
        kept = Handover(
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
        )
        try:
            leave(path, kept)
        except OSError as error:
            log.warning("handover_not_written", path=str(path), reason=str(error))
        else:
            log.info("handover_written", instance=state.instance, epoch=session.epoch, blocks=len(blocks.blocks))

    def load(self, facts: EngineFacts) -> Cursor | None:
        """Read what the worker before this one saved. Returns how far its engine's events were read, if there is anything."""
        state, path = self._state, self._path
        kept = take(path, now=state.unix_time()) if path is not None else None
        if kept is None or kept.keys != state.key_chain(facts).root():
            return None
        translator = state.new_translator(facts)
        try:
            translator.restore(kept.blocks)
        except (ValueError, OverflowError) as error:
            log.warning("handover_unreadable", path=str(path), reason=str(error))
            return None
        state.last_epoch = kept.epoch
        sequencer = CacheEventSequencer(state.instance, kept.epoch)
        sequencer.sequence = kept.sequence
        session = CacheSession(
            sequencer, facts, "empty", translator, joined_at=kept.joined_at, log_identity=kept.log_identity
        )
        if self._fleet_events.identity(session) != kept.joined:
            session.joined_at = 0  # to the log it is another instance, with the same cache
        self._loaded = session, kept.written
        return kept.cursor

    def resume(self) -> None:
        """The engine is the one that the worker before this one followed."""
        assert self._loaded is not None
        (session, written), self._loaded = self._loaded, None
        state = self._state
        if not session.joined_at:
            state.rejoin(session)
            return
        state.session, state.position.written = session, written
        state.report_now()
        log.info("epoch_resumed", instance=state.instance, epoch=session.epoch, sequence=session.sequencer.sequence)

    def discard(self) -> None:
        """The engine is another one."""
        self._loaded = None
