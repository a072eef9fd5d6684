"""Whether a scheduler is there: how long none has given a sign of life.

One that holds a request back is silent about it, so silence is judged by asking for something that it must always answer:
its view of the fleet.
"""

import structlog

from pointsman.contracts.commands import DescribeFleet
from pointsman.contracts.subjects import fleet_view_subject
from pointsman.ports import Clock, Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import PoolName, Seconds
from pointsman.runtime.health import HealthBoard

log = structlog.get_logger()

SIGN_OF_LIFE_WALL_SECONDS: Seconds = 1.0
"""How long a scheduler may take to show that it lives, and how often one that is silent is asked to."""


class SchedulerLiveness:
    """Of the scheduler of one pool. Wall time."""

    def __init__(
        self, *, commands: Commands, pool: PoolName, clock: Clock, board: HealthBoard, silence_max: Seconds
    ) -> None:
        """`silence_max`: wall seconds of it after which requests are placed without a scheduler."""
        self._commands = commands
        self._subject = fleet_view_subject(pool)
        self._clock = clock
        self._board = board
        self._silence_max = silence_max
        self._since: Seconds | None = None
        self._heard_at = clock.wall()

    @property
    def too_long(self) -> bool:
        """Whether requests are to be placed without a scheduler."""
        return self._since is not None and self._clock.wall() - self._since >= self._silence_max

    def heard(self) -> None:
        """A scheduler was heard."""
        self._heard_at = self._clock.wall()
        if self._since is not None:
            self._since = None
            self._board.restored("scheduler")
            log.info("scheduler_responsive")

    def nobody_there(self) -> None:
        """Nobody serves the command that was sent just now."""
        self._began(self._clock.wall())

    async def listen(self, asked_at: Seconds) -> None:
        """After a request without an answer: is it held back, or is nobody there? Whoever was heard since it was sent,
        at `asked_at`, is there."""
        heard_at = self._heard_at
        if heard_at < asked_at and not await self._answers() and self._heard_at == heard_at:
            self._began(heard_at)

    async def look_out(self) -> None:
        """While no scheduler answers, ask for one even if no request comes that would, for ever: who reads on
        /readyz that this ingress lacks a scheduler may send it none."""
        while True:
            await self._clock.sleep_wall(SIGN_OF_LIFE_WALL_SECONDS)
            if self._since is not None:
                await self._answers()

    async def _answers(self) -> bool:
        try:
            await self._commands.request(self._subject, DescribeFleet(), timeout=SIGN_OF_LIFE_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError):
            return False
        self.heard()
        return True

    def _began(self, since: Seconds) -> None:
        if self._since is None:
            self._since = since
            self._board.degraded("scheduler", "no scheduler answers; requests are placed by least load")
            log.warning("scheduler_unresponsive", silence_max=self._silence_max)
