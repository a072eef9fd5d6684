"""The composition root of `pointsman-rebalancer`."""

from pointsman.adapters.clocks import ScaledClock
from pointsman.chassis.health import HealthBoard, health_server
from pointsman.chassis.log_link import open_link
from pointsman.chassis.settings import command
from pointsman.chassis.supervision import Supervisor, run
from pointsman.chassis.telemetry import configure_logging
from pointsman_rebalancer.service import RebalancerService
from pointsman_rebalancer.settings import RebalancerSettings


@command(RebalancerSettings, name="pointsman-rebalancer", table="rebalancer")
def main(settings: RebalancerSettings) -> None:
    """Watch for requests that wait in the wrong queue. At present it folds the log and moves nothing.

    It needs no port of its own but the one for /health, /ready and /metrics.
    """
    configure_logging(settings.log_level, settings.log_format)
    run(lambda supervisor: _serve(settings, supervisor))


async def _serve(settings: RebalancerSettings, supervisor: Supervisor) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard()
    supervisor.start(health_server(board, settings.host, settings.port).serve_until_cancelled(), name="health")
    async with open_link(settings, clock, board, name="rebalancer") as link:
        service = RebalancerService(event_log=link.log, clock=clock, board=board, settings=settings)
        supervisor.start(service.run(), name="fold")
        await supervisor.until_stopped()
