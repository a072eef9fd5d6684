"""The page `/desired`, for autoscalers that start engines themselves (KEDA's `metrics-api`). In: the folded log, reads.
Out: the decided size, and whether somebody reads it, here or at another scaler. Who reads it acts on it, so that
operators may set the size, too."""

import contextlib
import json

from pointsman.contracts.commands import ScalePool
from pointsman.contracts.subjects import SCALER_ACTOR, admin_subject
from pointsman.policies.scaling.decider import in_service
from pointsman.ports import Clock, Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.leadership import Leadership
from pointsman.runtime.log_follower import LogFollower

AUTOSCALER_WALL_SECONDS: WallSeconds = WallSeconds(300.0)
"""Between two reads of /desired. KEDA reads it every 15 to 30 s."""
PASS_ON_WALL_SECONDS: WallSeconds = WallSeconds(1.0)


class DesiredPage:
    def __init__(
        self, follower: LogFollower, leadership: Leadership, commands: Commands, clock: Clock, pool: PoolName
    ) -> None:
        self._follower = follower
        self._leadership = leadership
        self._commands = commands
        self._clock = clock
        self._pool = pool
        self._read_at: WallSeconds | None = None
        """Here, or at another scaler, which then only follows."""
        self._read_here = False

    @property
    def is_read(self) -> bool:
        return self._read_at is not None and self._clock.wall() - self._read_at < AUTOSCALER_WALL_SECONDS

    def read(self) -> bytes | None:
        """None before the first decision, which is not zero instances."""
        self.note_read()
        self._read_here = True
        state = self._follower.state
        decided = state.scaling.decided
        if decided is None or not self._follower.caught_up:
            return None
        page = {
            "pool": self._pool,
            "desired": decided.wanted,
            "ready": len(in_service(state)),
            "number": decided.number,
            "reason": decided.reason,
        }
        if decided.wanted and decided.prefill:
            page |= {"prefill": decided.prefill, "decode": decided.decode}
        return json.dumps(page).encode()

    def note_read(self) -> None:
        self._read_at = self._clock.wall()

    async def pass_on_reads(self) -> None:
        """Several scalers stand behind one address, so autoscalers may read this one while another acts. Runs without end."""
        while True:
            is_read, self._read_here = self._read_here, False
            if is_read and not self._leadership.holds:
                await self._tell_acting()
            await self._clock.sleep_wall(PASS_ON_WALL_SECONDS)

    async def _tell_acting(self) -> None:
        """Not repeated: the next read is told again."""
        subject = admin_subject(self._pool, "scale", SCALER_ACTOR)
        with contextlib.suppress(NoResponderError, CommandTimeoutError):
            await self._commands.request(subject, ScalePool(size_read=True), timeout=PASS_ON_WALL_SECONDS)
