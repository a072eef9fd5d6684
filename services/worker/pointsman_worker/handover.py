"""What a worker that is stopped leaves for the one that is started in its place, in a file: the cache as the log knows it,
and how far its engine's events were read.

The log holds pool keys only, and an engine's removals name engine hashes. So what joins the two must be kept, or the cache
is unknown to a new worker as soon as the engine's replay buffer has lost its beginning. The new worker goes on in the same
epoch if the engine still gives the very batch that was read last (`KvEventReader`): then it is the same engine, and what came
after that batch is replayed.

A file is used once, and only while it is fresh: later another worker may have told of this instance.
"""

import contextlib
from pathlib import Path

import msgspec
import structlog

from pointsman.adapters.kv_events.events import Cursor
from pointsman.primitives import Epoch, Seconds, Sequence
from pointsman_worker.translator import HeldBlocks

log = structlog.get_logger()

FRESH_WALL_SECONDS: Seconds = 60.0
FILE_BYTES_MAX = 1 << 30


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """`joined`: what the log was told that the instance is, without times. `written`: the log's sequence of the last write.
    `keys`: stands for the secret, the model and the block size. `kept_at`: Unix time."""

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
    """What was left, if it is fresh at the Unix time `now`; the file is gone then. Never raises."""
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
    if not 0 <= age <= FRESH_WALL_SECONDS:
        log.info("handover_expired", path=str(path), seconds=round(age))
        return None
    return found
