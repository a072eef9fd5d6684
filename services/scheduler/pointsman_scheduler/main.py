"""Composition root of `pointsman-scheduler`."""

from contextlib import nullcontext

from pointsman.adapters.clocks import ForwardClock, ScaledClock
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.policies.policy_set import PolicySet
from pointsman.primitives import WallSeconds
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.health import HealthBoard, health_server
from pointsman.runtime.log_connection import name_of_run, open_link
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import Supervisor, run
from pointsman.runtime.tracer_opening import open_tracer
from pointsman_scheduler.checkpoint_watch import CheckpointWatch
from pointsman_scheduler.checkpointer import running_beside
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.service import start_scheduler
from pointsman_scheduler.settings import SchedulerSettings


@command(SchedulerSettings, name="pointsman-scheduler", table="scheduler")
def main(settings: SchedulerSettings) -> None:
    """Place requests: fold the log, choose an instance for each request, and log why.

    One scheduler leads a pool; others follow and take over when it is gone. It answers the ingress over NATS and needs
    no port of its own but the one for /livez, /readyz and /metrics.

    \b
      pointsman-scheduler --nats nats://10.0.0.5:4222 --pool qwen
      pointsman-scheduler --policy dualmap --set routing.ttft_slo_threshold=0.8 --order edf
    """
    start_logs(settings)
    policies = settings.policies()
    run(lambda supervisor: _serve(settings, policies, supervisor))


async def _serve(settings: SchedulerSettings, policies: PolicySet, supervisor: Supervisor) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard(pool=settings.pool)
    supervisor.start(health_server(board, settings.host, settings.port).serve(), name="health")
    name = name_of_run("scheduler")
    tracer = open_tracer("pointsman-scheduler", instance=name)
    checkpointer = (
        running_beside(settings, supervisor, clock) if settings.checkpoint_seconds > WallSeconds(0.0) else nullcontext()
    )
    async with open_link(settings, clock, board, name=name, user=BusUser(BusRole.SCHEDULER)) as link:
        context = SchedulerContext(
            settings=settings,
            policies=policies,
            link=link,
            clock=ForwardClock(clock),
            board=board,
            name=name,
            tracer=tracer,
        )
        service = start_scheduler(supervisor, context)
        if settings.checkpoint_seconds > WallSeconds(0.0):
            watch = CheckpointWatch(
                event_log=link.log,
                checkpoints=link.checkpoints,
                clock=clock,
                board=board,
                form=service.checkpoint_form,
                every=settings.checkpoint_seconds,
            )
            supervisor.start(watch.run(), name="checkpoint-watch")
        with checkpointer:
            try:
                await supervisor.until_stopped()
            finally:
                await service.resign()
                if tracer is not None:
                    await tracer.close()
