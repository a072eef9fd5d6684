"""Tells the size of the pool. In: the folded log. Out: gauges, a log line for each change, readiness."""

from collections import Counter
from dataclasses import asdict

import structlog

from pointsman.ports import Clock
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard
from pointsman.state.fleet import Status
from pointsman.state.state import State
from pointsman_scaler.wanted_size import WantedSize

log = structlog.get_logger()

REPORT_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
SIZE = "size"
SCALING = "scaling"


async def report_size(size: WantedSize, board: HealthBoard, clock: Clock, pool: PoolName) -> None:
    """Runs without end."""
    reported: Counter[Status] = Counter()
    while True:
        sizes = pool_sizes(size.state)
        if size.state.scaling.is_applied:
            board.restored(SIZE)
        if trouble := size.trouble:
            board.degraded(SCALING, trouble)
        else:
            board.restored(SCALING)
        wanted = size.total or size.state.scaling.wanted  # a pool whose engines are all gone is not asleep
        if wanted is not None:
            telemetry.SCALER_DESIRED_ENGINES.labels(pool).set(wanted)
            for role, count in asdict(size.roles).items():
                telemetry.SCALER_DESIRED_ROLES.labels(pool, role).set(count)
        if sizes != reported:
            log.info("pool_size", total=sizes.total(), **{status.value: sizes[status] for status in sorted(sizes)})
        reported = sizes
        await clock.sleep_wall(REPORT_WALL_SECONDS)


def pool_sizes(state: State) -> Counter[Status]:
    return Counter(instance.status for instance in state.fleet.instances)
