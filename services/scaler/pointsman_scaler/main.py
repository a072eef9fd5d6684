"""The composition root of `pointsman-scaler`."""

from pointsman.adapters.clocks import ScaledClock
from pointsman.chassis.health import HealthBoard, health_server
from pointsman.chassis.log_link import open_link
from pointsman.chassis.settings import command
from pointsman.chassis.supervision import Supervisor, run
from pointsman.chassis.telemetry import configure_logging
from pointsman_scaler.service import ScalerService
from pointsman_scaler.settings import ScalerSettings


@command(ScalerSettings, name="pointsman-scaler", table="scaler")
def main(settings: ScalerSettings) -> None:
    """Watch the size of the pool. At present people start and stop engines; the scaler reports how many there are.

    It needs no port of its own but the one for /health, /ready and /metrics.
    """
    configure_logging(settings.log_level, settings.log_format)
    run(lambda supervisor: _serve(settings, supervisor))


async def _serve(settings: ScalerSettings, supervisor: Supervisor) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard()
    supervisor.start(health_server(board, settings.host, settings.port).serve_until_cancelled(), name="health")
    async with open_link(settings, clock, board, name="scaler") as link:
        service = ScalerService(event_log=link.log, clock=clock, board=board, settings=settings)
        supervisor.start(service.run(), name="fold")
        supervisor.start(service.report(), name="report")
        await supervisor.until_stopped()
