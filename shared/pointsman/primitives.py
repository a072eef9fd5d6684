"""Ids and units as types, with their bounds on the wire. `contracts.codec` alone checks the bounds (`Meta`), when it
reads or writes a message. They are wide: values within them can be added, squared and counted up without overflow."""

from array import array
from collections.abc import Iterable
from functools import reduce
from operator import add
from sys import byteorder
from typing import TYPE_CHECKING, Annotated, NewType

from msgspec import Meta

WHOLE_MAX = 2**53
"""Largest integer that JSON readers of every language keep exactly; keys and digests may be larger."""
KEYS_MAX = 2**64 - 1
BLOCK_TOKENS_MAX = 2**16
SPEED_MIN = 1e-3
ANCHOR_UNIX_SECONDS = 1_767_225_600.0
"""2026-01-01T00:00:00Z: there, engine time and Unix time are equal."""

InstanceId = NewType("InstanceId", Annotated[str, Meta(max_length=63)])
"""One engine. Made of `[a-z0-9-]`, so that it can be a subject token."""

RequestId = NewType("RequestId", Annotated[str, Meta(max_length=64)])
"""Made of `[A-Za-z0-9_-]`."""

PoolName = NewType("PoolName", str)

Tenant = NewType("Tenant", Annotated[str, Meta(max_length=256)])
"""Name of an API key, or the name that the client gives itself."""

SessionId = NewType("SessionId", Annotated[str, Meta(max_length=256)])
"""A conversation, if the client names one."""

Epoch = NewType("Epoch", Annotated[int, Meta(ge=0, le=WHOLE_MAX)])
"""One run of an instance: Unix ms of its start. Grows when the engine, or the worker's knowledge of its cache,
restarts."""

BlockKey = NewType("BlockKey", Annotated[int, Meta(ge=0)])
"""Chained over all tokens before the block: equal keys mean equal prefixes."""

Digest = Annotated[int, Meta(ge=0)]

PackedKeys = Annotated[bytes, Meta(max_length=8 * 1024 * 1024)]
"""Little-endian u64 (`contracts.block_keys`)."""

Term = NewType("Term", Annotated[int, Meta(ge=0, le=WHOLE_MAX)])
"""Grows with each new leader."""

EngineSeconds = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""Engine time: passes `--speed` times faster than wall time. See `ports.Clock`."""

Seconds = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""Wall seconds for what takes a float: time-outs and times of an event loop, Unix time. Functions that also know engine
time take `WallSeconds`."""

Objective = Annotated[float, Meta(ge=0.0, le=1e30)]
"""Engine seconds; 0: none."""

NO_SECONDS: EngineSeconds = 0.0
"""Default of wire fields. msgspec leaves out this object, not every zero: `seconds or NO_SECONDS` is not written."""

if TYPE_CHECKING:

    class WallSeconds:
        """Wall-clock time or duration. A float at run time; a separate type for the type checker, so that it is not
        mixed with engine time."""

        def __init__(self, seconds: float, /) -> None: ...
        def __float__(self) -> float: ...
        def __add__(self, other: "WallSeconds", /) -> "WallSeconds": ...
        def __sub__(self, other: "WallSeconds", /) -> "WallSeconds": ...
        def __neg__(self) -> "WallSeconds": ...
        def __mul__(self, factor: float, /) -> "WallSeconds": ...
        def __rmul__(self, factor: float, /) -> "WallSeconds": ...
        def __truediv__(self, divisor: float, /) -> "WallSeconds": ...
        def __lt__(self, other: "WallSeconds", /) -> bool: ...
        def __le__(self, other: "WallSeconds", /) -> bool: ...
        def __gt__(self, other: "WallSeconds", /) -> bool: ...
        def __ge__(self, other: "WallSeconds", /) -> bool: ...
else:
    WallSeconds = NewType("WallSeconds", Annotated[float, Meta(ge=-1e30, le=1e30)])


def engine_seconds(wall: WallSeconds, speed: float) -> EngineSeconds:
    return float(wall) * speed


def engine_time_of(unix_seconds: Seconds, speed: float) -> EngineSeconds:
    return ANCHOR_UNIX_SECONDS + (unix_seconds - ANCHOR_UNIX_SECONDS) * speed


def wall_time_of(now: EngineSeconds, speed: float) -> Seconds:
    return ANCHOR_UNIX_SECONDS + (now - ANCHOR_UNIX_SECONDS) / speed


def plain_sum(values: Iterable[float]) -> float:
    """Adds one after the other, as `sum` does in Python 3.11. From 3.12 on `sum` compensates the rounding of floats, and a log
    would be decided otherwise there."""
    start: float = 0
    return reduce(add, values, start)


def little_endian(kind: str, values: Iterable[int]) -> bytes:
    """Packs unsigned integers. `kind`: type code of `array`. Raises OverflowError."""
    packed = array(kind, values)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def from_little_endian(kind: str, packed: bytes) -> "array[int]":
    """Raises ValueError if the length is no multiple of the size of a value."""
    values: array[int] = array(kind, packed)
    if byteorder == "big":
        values.byteswap()
    return values


Moment = Annotated[float, Meta(ge=0.0, le=1e13)]

Number = Annotated[float, Meta(ge=-1e30, le=1e30)]

Coefficient = Annotated[float, Meta(ge=0.0, le=1e6)]

Tokens = Annotated[int, Meta(ge=-1, le=2**40)]
"""-1 where unknown, in fields that allow it."""

BlockTokens = Annotated[int, Meta(ge=1, le=BLOCK_TOKENS_MAX)]

Count = Annotated[int, Meta(ge=0, le=WHOLE_MAX)]

ANSWERS_MAX = 2**31
Answers = Annotated[int, Meta(ge=1, le=ANSWERS_MAX)]
"""Of one request: its prompts times the answers to each."""

Rank = Annotated[int, Meta(ge=-1, le=2**20)]
Sequence = Annotated[int, Meta(ge=0, le=WHOLE_MAX)]

Name = Annotated[str, Meta(max_length=1024)]

Text = Annotated[str, Meta(max_length=65_536)]

Listed = Meta(max_length=65_536)
"""Bound of every list in a message except runs of blocks."""
