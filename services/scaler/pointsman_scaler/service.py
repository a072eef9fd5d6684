"""The scaler: folds the log and reports the size of the pool. With the policy `manual`, the only one so far, people
start and stop engines and it decides nothing.
"""

from collections import Counter

import structlog

from pointsman.chassis.health import HealthBoard
from pointsman.chassis.log_follower import LogFollower
from pointsman.chassis.telemetry import POOL_INSTANCES
from pointsman.ports import Clock, EventLog
from pointsman.primitives import Seconds
from pointsman.state.fleet import Status
from pointsman.state.state import PoolSettings, State
from pointsman_scaler.settings import ScalerSettings

log = structlog.get_logger()

REPORT_WALL_SECONDS: Seconds = 1.0


class ScalerService:
    """One scaler of one pool."""

    def __init__(self, *, event_log: EventLog, clock: Clock, board: HealthBoard, settings: ScalerSettings) -> None:
        pool = PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed)
        self._follower = LogFollower(event_log, clock=clock, board=board, settings=pool)
        self._clock = clock

    async def run(self) -> None:
        """Follow the log; ends only by cancellation or failure."""
        await self._follower.run()

    async def report(self) -> None:
        """Keep the gauge of instances up to date, and log each change, for ever."""
        reported: Counter[Status] = Counter()
        while True:
            sizes = pool_sizes(self._follower.state)
            for status in Status:
                POOL_INSTANCES.labels(status).set(sizes[status])
            if sizes != reported:
                log.info("pool_size", total=sizes.total(), **{status.value: sizes[status] for status in sorted(sizes)})
            reported = sizes
            await self._clock.sleep_wall(REPORT_WALL_SECONDS)


def pool_sizes(state: State) -> Counter[Status]:
    """How many instances there are of each status."""
    return Counter(instance.status for instance in state.fleet.instances)
