"""The composition root of `pointsman-scaler`."""

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.policies.scaling import ScalingPolicy
from pointsman.ports import InstanceProvider
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.health import HealthBoard, health_server
from pointsman.runtime.log_connection import name_of_run, open_link
from pointsman.runtime.log_metrics import measure_log
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import Supervisor, run
from pointsman_scaler.providers import chosen_provider
from pointsman_scaler.service import ScalerService
from pointsman_scaler.settings import ScalerSettings, chosen_policy

READS_EVERY_WALL_SECONDS: WallSeconds = WallSeconds(0.1)


@command(ScalerSettings, name="pointsman-scaler", table="scaler")
def main(settings: ScalerSettings) -> None:
    """Keep the pool as large as it needs to be: decide, log why, start engines, drain them before they stop.

    Without a provider (--provider static) it logs what it would do. Any number of scalers may run; one acts.

    \b
      pointsman-scaler --scaling slo_attainment --min-instances 2 --max-instances 6
      pointsman-scaler --scaling target_utilisation --provider kubernetes --kubernetes-workload statefulset/vllm
    """
    start_logs(settings)
    policy, provider = chosen_policy(settings), chosen_provider(settings)
    run(lambda supervisor: _serve(settings, policy, provider, supervisor))


async def _serve(
    settings: ScalerSettings, policy: ScalingPolicy, provider: InstanceProvider, supervisor: Supervisor
) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard(pool=settings.pool)
    name = name_of_run("scaler")
    user = BusUser(BusRole.SCALER)
    async with open_link(settings, clock, board, name=name, user=user, reads_every=READS_EVERY_WALL_SECONDS) as link:
        service = ScalerService(
            link=link,
            provider=provider,
            policy=policy,
            clock=clock,
            board=board,
            settings=settings,
            name=name,
        )
        documents = {"/desired": service.desired}
        health = health_server(board, settings.host, settings.port, documents=documents)
        supervisor.start(health.serve(), name="health")
        supervisor.start(service.run(), name="fold")
        supervisor.start(service.act(), name="act")
        supervisor.start(service.report(), name="report")
        supervisor.start(service.pass_on_reads(), name="reads")
        measures = measure_log(link.log, clock, PoolName(settings.pool), lambda: service.state.sequence)
        supervisor.start(measures, name="log-metrics")
        try:
            await supervisor.until_stopped()
        finally:
            await service.resign()
