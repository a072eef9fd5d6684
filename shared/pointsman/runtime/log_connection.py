"""Connects a service with its pool; connection events become metrics, log lines and health."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from secrets import token_hex

import structlog
from prometheus_client import Counter
from typing_extensions import override

from pointsman.adapters import jetstream
from pointsman.adapters.jetstream import Identity, StreamSettings
from pointsman.adapters.jetstream.connection import SERVER_VERSION_MIN
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import short_reason
from pointsman.contracts.permissions import BusUser
from pointsman.ports import Clock, Link
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.containment import note_failure
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.settings import DeploymentSettings

log = structlog.get_logger()

NATS_PART = "nats"
LOG_PART = "log"
VERSION_PART = "nats version"
WRITES_PART = "writes"
LOST_EVENT = "log_writes_lost"
TROUBLE_LOG_SECONDS: WallSeconds = WallSeconds(5.0)
TROUBLES_MAX = 100
"""Told apart within these seconds. Strangers choose some: a refused subject may be the inbox of who asks."""


def name_of_run(service: str) -> str:
    """Of one run of a process that may have others beside it; never used again."""
    return f"{service}-{os.getpid()}-{token_hex(3)}"


@asynccontextmanager
async def open_link(
    settings: DeploymentSettings,
    clock: Clock,
    board: HealthBoard,
    *,
    name: str,
    user: BusUser,
    serves_without: bool = False,
    reads_every: WallSeconds = WallSeconds(0.0),
) -> AsyncIterator[Link]:
    """Returns at once, connected or not. Until connected `board` lacks `nats` or `log`, appends are buffered and
    commands raise NoResponderError. `user`: what this process is on the bus. `serves_without`: degraded, not unready,
    meanwhile. `reads_every`: for who can wait that long for new entries; it wakes once for many."""
    _show_zeros(settings.pool)
    lacks = board.degraded if serves_without else board.missing
    lacks(NATS_PART, f"connecting to {settings.nats_shown}")
    lacks(LOG_PART, "not seen yet")
    listener = _TelemetryListener(board, lacks, clock, settings.pool)
    async with jetstream.connect(
        settings.nats,
        PoolName(settings.pool),
        clock,
        name=name,
        listener=listener,
        stream=StreamSettings(
            bytes_max=settings.log_bytes_max,
            age_seconds_max=settings.log_age_seconds_max,
            replicas=settings.log_replicas,
        ),
        user=user,
        identity=Identity(
            credentials=settings.nats_credentials,
            ca=settings.nats_ca,
            certificate=settings.nats_certificate,
            key=settings.nats_key,
        ),
        api=settings.nats_api,
        reads_every=reads_every,
    ) as link:
        yield link


def _show_zeros(pool: str) -> None:
    telemetry.NATS_CONNECTED.labels(pool).set(0)
    telemetry.LOG_WRITES_STALLED.labels(pool).set(0)
    for metric in (telemetry.LOG_LOST, telemetry.LOG_RESETS, telemetry.DEAD_LETTERS, telemetry.NATS_FORBIDDEN):
        metric.show_zeros(pool=pool)


class _TelemetryListener(LogListener):
    def __init__(self, board: HealthBoard, lacks: Callable[[str, str], None], clock: Clock, pool: str) -> None:
        self._pool = pool
        self._board = board
        self._lacks = lacks
        self._clock = clock
        self._appended: dict[str, Counter] = {}
        self._troubles: dict[str, WallSeconds] = {}
        self._lost_unlogged = 0

    @override
    def connected(self, server: str) -> None:
        telemetry.NATS_CONNECTED.labels(self._pool).set(1)
        self._board.restored(NATS_PART)
        log.info("nats_connected", server=server)

    @override
    def disconnected(self, reason: str) -> None:
        telemetry.NATS_CONNECTED.labels(self._pool).set(0)
        self._lacks(NATS_PART, reason)
        log.warning("nats_disconnected", reason=reason)

    @override
    def unreachable(self, reason: str) -> None:
        self._lacks(NATS_PART, short_reason(reason))
        self._warn("nats_unreachable", reason=reason)

    @override
    def forbidden(self, operation: str, subject: str) -> None:
        telemetry.NATS_FORBIDDEN.labels(self._pool, operation).inc()
        self._warn("nats_forbidden", what=f"{operation} {subject}")

    @override
    def outdated(self, version: str) -> None:
        if version:
            needed = ".".join(map(str, SERVER_VERSION_MIN))
            reason = f"the nats-server is {version}; before {needed} it has known security holes"
            self._board.degraded(VERSION_PART, reason)
            log.warning("nats_outdated", version=version, needed=needed)
        else:
            self._board.restored(VERSION_PART)

    @override
    def log_ready(self, identity: str) -> None:
        self._board.restored(LOG_PART)
        log.info("log_ready", identity=identity)

    @override
    def log_missing(self, reason: str) -> None:
        self._lacks(LOG_PART, reason)
        self._warn("log_missing", reason=reason)

    @override
    def appended(self, kind: str) -> None:
        counter = self._appended.get(kind)
        if counter is None:
            counter = self._appended[kind] = telemetry.LOG_APPENDED.labels(self._pool, kind)
        counter.inc()

    @override
    def stalled(self, reason: str) -> None:
        telemetry.LOG_WRITES_STALLED.labels(self._pool).set(1)
        self._board.degraded(WRITES_PART, reason)
        log.error("log_writes_stalled", reason=reason)

    @override
    def flowing(self) -> None:
        telemetry.LOG_WRITES_STALLED.labels(self._pool).set(0)
        self._board.restored(WRITES_PART)
        log.info("log_writes_resumed")

    @override
    def lost(self, count: int, reason: str) -> None:
        telemetry.LOG_LOST.labels(self._pool).inc(count)
        self._lost_unlogged += count
        if self._warn(LOST_EVENT, count=self._lost_unlogged, reason=reason):
            self._lost_unlogged = 0

    @override
    def dropped(self, count: int, reason: str) -> None:
        telemetry.LOG_LOST.labels(self._pool).inc(count)
        log.warning(LOST_EVENT, count=self._lost_unlogged + count, reason=reason)

    @override
    def undecodable(self, subject: str, problem: str) -> None:
        telemetry.DEAD_LETTERS.labels(self._pool, "undecodable").inc()
        self._warn("undecodable_message", subject=short_reason(subject), problem=problem)

    @override
    def reset(self, reason: str) -> None:
        telemetry.LOG_RESETS.labels(self._pool).inc()
        log.warning("log_reset", reason=reason)

    @override
    def handler_failed(self, subject: str, error: Exception) -> None:
        note_failure("command", error, subject=subject)

    @override
    def trouble(self, what: str, reason: str) -> None:
        self._warn("nats_error", what=what, reason=reason)

    def _warn(self, event: str, **details: object) -> bool:
        """Whether it was logged: of repeats, only one in a while is."""
        now = self._clock.wall()
        key = f"{event}:{details.get('what', '')}"
        if len(self._troubles) >= TROUBLES_MAX:
            self._troubles = {told: at for told, at in self._troubles.items() if now - at < TROUBLE_LOG_SECONDS}
            key = event if len(self._troubles) >= TROUBLES_MAX else key
        if now - self._troubles.get(key, -TROUBLE_LOG_SECONDS) >= TROUBLE_LOG_SECONDS:
            self._troubles[key] = now
            log.warning(event, **details)
            return True
        return False
