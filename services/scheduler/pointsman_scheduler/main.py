"""The composition root of `pointsman-scheduler`."""

import os

import click
import structlog

from pointsman.adapters.clocks import ScaledClock
from pointsman.chassis.health import HealthBoard, health_server
from pointsman.chassis.log_link import open_link
from pointsman.chassis.settings import command
from pointsman.chassis.supervision import Supervisor, run
from pointsman.chassis.telemetry import configure_logging
from pointsman.policies.dispatch import PolicySet, UnknownPolicyError, policy_set
from pointsman_scheduler.service import SchedulerService
from pointsman_scheduler.settings import SchedulerSettings

log = structlog.get_logger()


@command(SchedulerSettings, name="pointsman-scheduler", table="scheduler")
def main(settings: SchedulerSettings) -> None:
    """Place requests: fold the log, choose an instance for each request, and write down why.

    One scheduler leads a pool. It answers the ingress over NATS and needs no port of its own but the one for
    /health, /ready and /metrics.
    """
    configure_logging(settings.log_level, settings.log_format)
    policies = _policies(settings)
    run(lambda supervisor: _serve(settings, policies, supervisor))


async def _serve(settings: SchedulerSettings, policies: PolicySet, supervisor: Supervisor) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard()
    supervisor.start(health_server(board, settings.host, settings.port).serve_until_cancelled(), name="health")
    async with open_link(settings, clock, board, name="scheduler") as link:
        service = SchedulerService(
            event_log=link.log,
            commands=link.commands,
            clock=clock,
            board=board,
            settings=settings,
            policies=policies,
            name=f"scheduler-{os.getpid()}",
        )
        supervisor.start(service.run(), name="fold")
        supervisor.start(service.keep_house(), name="housekeeping")
        supervisor.start(service.heal(), name="healing")
        await supervisor.until_stopped()


def _policies(settings: SchedulerSettings) -> PolicySet:
    pairs = [pair.partition("=") for pair in settings.policy_settings]
    try:
        return policy_set(
            routing=settings.policy,
            admission=settings.admission,
            ordering=settings.order,
            settings={name: value for name, _, value in pairs},
            prefill_window_tokens=settings.prefill_window_tokens,
            running_max=settings.running_max,
            pending_max=settings.pending_max,
        )
    except UnknownPolicyError as error:
        raise click.BadParameter(str(error), param_hint="--policy-settings") from error
