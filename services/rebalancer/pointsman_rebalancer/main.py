"""Composition root of `pointsman-rebalancer`."""

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.policies.rebalancing import RebalancingPolicy
from pointsman.primitives import PoolName
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.health import HealthBoard, health_server
from pointsman.runtime.log_connection import name_of_run, open_link
from pointsman.runtime.log_metrics import measure_log
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import Supervisor, run
from pointsman_rebalancer.service import RebalancerService
from pointsman_rebalancer.settings import RebalancerSettings, chosen_policy


@command(RebalancerSettings, name="pointsman-rebalancer", table="rebalancer")
def main(settings: RebalancerSettings) -> None:
    """Move pending requests from queues that would miss their SLOs to instances that have room.

    It folds the log and sends plans to the scheduler, which makes or refuses each move. Its only port is for /livez, /readyz
    and /metrics.

    \b
      pointsman-rebalancer --rebalance global --set rebalance.waste_weight=2
      pointsman-rebalancer --rebalance off            follow the log and move nothing
    """
    start_logs(settings)
    policy = chosen_policy(settings)
    run(lambda supervisor: _serve(settings, policy, supervisor))


async def _serve(settings: RebalancerSettings, policy: RebalancingPolicy, supervisor: Supervisor) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard(pool=settings.pool)
    supervisor.start(health_server(board, settings.host, settings.port).serve(), name="health")
    name = name_of_run("rebalancer")
    async with open_link(settings, clock, board, name=name, user=BusUser(BusRole.REBALANCER)) as link:
        service = RebalancerService(
            link=link,
            clock=clock,
            board=board,
            settings=settings,
            policy=policy,
            name=name,
        )
        supervisor.start(service.run(), name="fold")
        supervisor.start(service.rebalance(), name="rebalance")
        measures = measure_log(link.log, clock, PoolName(settings.pool), lambda: service.state.sequence)
        supervisor.start(measures, name="log-metrics")
        await supervisor.until_stopped()
