"""How much of the log there is, and how much of it this process has not read: the stream is asked, because a reader
that hangs does not know what it misses."""

from collections.abc import Callable

from pointsman.ports import Clock, EventLog, LogUnavailableError
from pointsman.primitives import PoolName, Sequence, WallSeconds
from pointsman.runtime import telemetry

PERIOD_WALL_SECONDS: WallSeconds = WallSeconds(5.0)


async def measure_log(event_log: EventLog, clock: Clock, pool: PoolName, position: Callable[[], Sequence]) -> None:
    """`position`: the last entry read. Runs without end."""
    while True:
        telemetry.LOG_WRITE_LOAD.labels(pool).set(event_log.write_load)
        try:
            extent = await event_log.extent()
        except LogUnavailableError:
            pass  # /readyz and the link's metrics say so
        else:
            telemetry.LOG_FIRST_SEQUENCE.labels(pool).set(extent.first)
            telemetry.LOG_LAST_SEQUENCE.labels(pool).set(extent.last)
            telemetry.LOG_BYTES.labels(pool).set(extent.bytes)
            telemetry.LOG_BYTES_LIMIT.labels(pool).set(extent.bytes_max)
            telemetry.LOG_COPIES_BEHIND.labels(pool).set(extent.copies_behind)
            telemetry.LOG_LAG.labels(pool).set(max(0, extent.end - position()))
        await clock.sleep_wall(PERIOD_WALL_SECONDS)
