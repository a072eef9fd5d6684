"""Requests snapshots or rejoins from workers whose cache index is unverified."""

from collections.abc import Callable

import structlog

from pointsman.contracts.commands import ResyncCache
from pointsman.contracts.subjects import resync_subject
from pointsman.ports import Clock, Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, PoolName, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.containment import contained
from pointsman.state.state import State
from pointsman_scheduler.leader import Candidacy
from pointsman_scheduler.replica import Replica

log = structlog.get_logger()

PERIOD_WALL_SECONDS: WallSeconds = WallSeconds(0.5)
TIMEOUT_WALL_SECONDS: WallSeconds = WallSeconds(1.0)


class Resync:
    def __init__(
        self,
        *,
        leader: Candidacy,
        replica: Replica,
        commands: Commands,
        clock: Clock,
        pool: PoolName,
        is_refused: Callable[[InstanceId], bool],
    ) -> None:
        self._is_refused = is_refused
        self._leader = leader
        self._replica = replica
        self._commands = commands
        self._clock = clock
        self._pool = pool
        self._rejoin_requested: dict[InstanceId, EngineSeconds] = {}
        """Last report of each unregistered instance that was asked to join."""

    async def run(self) -> None:
        while True:
            await self._clock.sleep_wall(PERIOD_WALL_SECONDS)
            with contained("resync"):
                if self._leader.leading is not None:
                    await self._resync_doubtful(self._replica.state)

    async def _resync_doubtful(self, state: State) -> None:
        for instance in state.fleet.instances:
            if instance.forged:
                await self._request(instance.id, instance.doubt, rejoin=True)
            elif instance.contradicted:
                await self._request(instance.id, instance.contradicted, distrust=instance.epoch)
            elif instance.doubt:
                await self._request(instance.id, instance.doubt)
        for unregistered, reported_at in list(state.unregistered.items()):
            if self._is_refused(unregistered):
                continue
            if self._rejoin_requested.get(unregistered) != reported_at:  # by the instance's clock, which may be wrong
                self._rejoin_requested[unregistered] = reported_at
                await self._request(unregistered, "it reports, but the log does not say that it joined", rejoin=True)

    async def _request(
        self, instance: InstanceId, reason: str, *, rejoin: bool = False, distrust: Epoch | None = None
    ) -> None:
        """`distrust`: epoch in which the engine contradicted its own events."""
        telemetry.CACHE_RESYNCS.labels(self._pool, instance).inc()
        log.info("resync", instance=instance, doubt=reason, rejoin=rejoin, distrust=distrust)
        above = max(Epoch(0), self._replica.state.newest_epoch(instance)) if rejoin else distrust or Epoch(0)
        command = ResyncCache(
            instance=instance, reason=reason, rejoin=rejoin, above=above, distrust=distrust is not None
        )
        try:
            await self._commands.request(resync_subject(self._pool, instance), command, timeout=TIMEOUT_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError) as error:
            log.warning("resync_unanswered", instance=instance, problem=str(error))
