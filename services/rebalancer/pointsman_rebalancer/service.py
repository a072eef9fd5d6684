"""The rebalancer: folds the log as the scheduler does. It has no migration policy yet, so it moves nothing.

What it will decide from is here already and proven by running: the same State, in log order, with its readiness.
"""

from pointsman.chassis.health import HealthBoard
from pointsman.chassis.log_follower import LogFollower
from pointsman.ports import Clock, EventLog
from pointsman.state.state import PoolSettings, State
from pointsman_rebalancer.settings import RebalancerSettings


class RebalancerService:
    """One rebalancer of one pool."""

    def __init__(self, *, event_log: EventLog, clock: Clock, board: HealthBoard, settings: RebalancerSettings) -> None:
        pool = PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed)
        self._follower = LogFollower(event_log, clock=clock, board=board, settings=pool)

    @property
    def state(self) -> State:
        """The pool as of the last log entry that was read."""
        return self._follower.state

    async def run(self) -> None:
        """Follow the log; ends only by cancellation or failure."""
        await self._follower.run()
