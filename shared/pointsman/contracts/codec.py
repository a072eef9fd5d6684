"""Encoding: msgspec structs as JSON, so that `nats sub 'pm.>'` reads as text."""

import msgspec

from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheGap, CacheSnapshot
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    DescribeFleet,
    DrainAnswered,
    DrainInstance,
    FleetDescribed,
    FollowAnswered,
    FollowRequests,
    HandOverRequest,
    MigrateRequests,
    MigrationAnswered,
    ResyncAnswered,
    ResyncCache,
    RouteGranted,
    RouteRejected,
    RouteRequest,
    ScaleAnswered,
    ScalePool,
    UndrainInstance,
)
from pointsman.contracts.decisions import (
    HandOverRefused,
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    ScaleApplied,
    ScaleDecided,
    WritesLost,
)
from pointsman.contracts.envelope import Event
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceProbed,
    InstanceReported,
    InstanceSuspected,
    InstanceUndrained,
)
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)

LogEvent = (
    BlocksStored
    | BlocksRemoved
    | CacheCleared
    | CacheGap
    | CacheSnapshot
    | InstanceJoined
    | InstanceReported
    | InstanceProbed
    | InstanceSuspected
    | InstanceDraining
    | InstanceUndrained
    | InstanceLeft
    | RequestArrived
    | RequestPlaced
    | RequestGranted
    | RequestHandedOver
    | HandOverRefused
    | RequestMigrated
    | MigrationRefused
    | RequestRejected
    | PrefillFinished
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | LeaderElected
    | WritesLost
    | ScaleDecided
    | ScaleApplied
)
"""Every event that a log may hold."""

AnyCommand = (
    RouteRequest
    | RouteGranted
    | RouteRejected
    | HandOverRequest
    | FollowRequests
    | FollowAnswered
    | CancelRequest
    | CancelAnswered
    | ResyncCache
    | ResyncAnswered
    | DescribeFleet
    | FleetDescribed
    | MigrateRequests
    | MigrationAnswered
    | DrainInstance
    | UndrainInstance
    | DrainAnswered
    | ScalePool
    | ScaleAnswered
)

_encoder = msgspec.json.Encoder()
_events: msgspec.json.Decoder[LogEvent] = msgspec.json.Decoder(LogEvent)
_commands: msgspec.json.Decoder[AnyCommand] = msgspec.json.Decoder(AnyCommand)


class UndecodableError(ValueError):
    """Bytes that are no event or command we know. The message says where and why."""


def encode(message: Event | AnyCommand) -> bytes:
    return _encoder.encode(message)


def decode_event(payload: bytes) -> LogEvent:
    """Raises UndecodableError."""
    try:
        return _events.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise UndecodableError(str(error)) from error


def decode_command(payload: bytes) -> AnyCommand:
    """Raises UndecodableError."""
    try:
        return _commands.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise UndecodableError(str(error)) from error
