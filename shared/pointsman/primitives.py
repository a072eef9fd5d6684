"""Ids and units, as types, with the bounds within which they may come off the wire.

Everything else in Pointsman is built from these words. An id has its own type so that an instance can
never be passed where a request is meant; a unit is an alias so that arithmetic stays arithmetic.

The bounds (`Meta`) are checked by `contracts.codec` alone, when a message is read and when one is written. They are wide:
what lies outside is no measurement but an error, and what lies inside can be added, squared and counted up without overflow.
"""

from typing import TYPE_CHECKING, Annotated, NewType

from msgspec import Meta

WHOLE_MAX = 2**53
"""The largest whole number on the wire that is no key or digest: what a JSON reader in any language keeps exactly."""
KEYS_MAX = 2**64 - 1
BLOCK_TOKENS_MAX = 2**16
SPEED_MIN = 1e-3

InstanceId = NewType("InstanceId", Annotated[str, Meta(max_length=63)])
"""One engine in the fleet. Made of `[a-z0-9-]`, so that it can be a subject token."""

RequestId = NewType("RequestId", Annotated[str, Meta(max_length=64)])
"""One client request, from arrival to its single end in the log. Made of `[A-Za-z0-9_-]`, at most 64 long."""

PoolName = NewType("PoolName", str)
"""The instances that serve one model and may replace each other."""

Tenant = NewType("Tenant", Annotated[str, Meta(max_length=256)])
"""Who pays: the name of an API key, or what the client calls itself."""

SessionId = NewType("SessionId", Annotated[str, Meta(max_length=256)])
"""A conversation, as far as the client names one."""

Epoch = NewType("Epoch", Annotated[int, Meta(ge=0, le=WHOLE_MAX)])
"""A life of one instance: grows whenever the engine, or our knowledge of it, starts again. Unix ms of its start."""

BlockKey = NewType("BlockKey", Annotated[int, Meta(ge=0)])
"""64-bit key of a block, chained over all the tokens before it: equal keys mean equal prefixes."""

Digest = Annotated[int, Meta(ge=0)]
"""The xor of block keys: 64 bits too."""

PackedKeys = Annotated[bytes, Meta(max_length=8 * 1024 * 1024)]
"""Block keys as little-endian u64, 8 bytes each (`contracts.block_keys`)."""

Term = NewType("Term", Annotated[int, Meta(ge=0, le=WHOLE_MAX)])
"""A scheduler's leadership. Grows with each take-over."""

Seconds = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""Engine time: with `--speed X` it runs X times faster than the wall. See `ports.Clock`."""

if TYPE_CHECKING:

    class WallSeconds:
        """A duration or a time of the wall clock, whatever the speed. A float at run time; to the type checker no float, so that it
        is never taken for engine time."""

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


def engine_seconds(wall: WallSeconds, speed: float) -> Seconds:
    """The engine time that passes in so much wall time."""
    return float(wall) * speed


Moment = Annotated[float, Meta(ge=0.0, le=1e13)]
"""Engine seconds since the Unix epoch."""

Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""A share, a factor or a rate."""

Coefficient = Annotated[float, Meta(ge=0.0, le=1e6)]
"""Of a cost model."""

Tokens = Annotated[int, Meta(ge=-1, le=2**40)]
"""A count of tokens; -1 where nobody said, in the fields that may say so."""

BlockTokens = Annotated[int, Meta(ge=1, le=BLOCK_TOKENS_MAX)]
"""Tokens of one block."""

Count = Annotated[int, Meta(ge=0, le=WHOLE_MAX)]
Rank = Annotated[int, Meta(ge=-1, le=2**20)]
Sequence = Annotated[int, Meta(ge=0, le=WHOLE_MAX)]

Name = Annotated[str, Meta(max_length=1024)]
"""Of a model, a policy, a process; a URL."""

Text = Annotated[str, Meta(max_length=65_536)]
"""A reason, for people."""

Listed = Meta(max_length=65_536)
"""The bound of every list in a message, but for the runs of blocks."""
