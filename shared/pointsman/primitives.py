"""Ids and units, as types.

Everything else in Pointsman is built from these words. An id has its own type so that an instance can
never be passed where a request is meant; a unit is an alias so that arithmetic stays arithmetic.
"""

from typing import NewType

InstanceId = NewType("InstanceId", str)
"""One engine in the fleet. Made of `[a-z0-9-]`, so that it can be a subject token."""

RequestId = NewType("RequestId", str)
"""One client request, from arrival to its single end in the log. Made of `[A-Za-z0-9_-]`, at most 64 long."""

PoolName = NewType("PoolName", str)
"""The instances that serve one model and may replace each other."""

Tenant = NewType("Tenant", str)
"""Who pays: the name of an API key, or what the client calls itself."""

SessionId = NewType("SessionId", str)
"""A conversation, as far as the client names one."""

Epoch = NewType("Epoch", int)
"""A life of one instance: grows whenever the engine, or our knowledge of it, starts again. Unix ms of its start."""

BlockKey = NewType("BlockKey", int)
"""64-bit key of a block, chained over all the tokens before it: equal keys mean equal prefixes."""

Term = NewType("Term", int)
"""A scheduler's leadership. Grows with each take-over."""

Seconds = float
"""Engine time: with `--speed X` it runs X times faster than the wall. See `ports.Clock`."""

Tokens = int
Sequence = int
