"""Which entries the log has, asked until it answers."""

from pointsman.ports import Clock, EventLog, LogExtent, LogUnavailableError
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard

RETRY_WALL_SECONDS: WallSeconds = WallSeconds(0.1)


async def await_extent(event_log: EventLog, clock: Clock, board: HealthBoard, part: str) -> LogExtent:
    """Waits until the log answers; `board` lacks `part` meanwhile."""
    while True:
        try:
            return await event_log.extent()
        except LogUnavailableError as error:
            board.missing(part, f"the log does not answer: {error}")
            await clock.sleep_wall(RETRY_WALL_SECONDS)
