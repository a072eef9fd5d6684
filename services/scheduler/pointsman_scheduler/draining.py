"""`cmd.drain`: drain an instance, or let it take requests again. Decided by the leader, so nothing is placed there from
that entry on; what waited there moves in the same turn. A repeated command changes nothing."""

import structlog

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import DrainAnswered, DrainInstance, UndrainInstance
from pointsman.policies.dispatch import Dispatcher
from pointsman.primitives import InstanceId, Seconds

log = structlog.get_logger()


def take_drain(
    dispatcher: Dispatcher, command: DrainInstance | UndrainInstance, now: Seconds
) -> tuple[list[LogEvent], DrainAnswered]:
    """Decisions, applied already and to be published, and the answer."""
    fleet = dispatcher.state.fleet
    if command.instance not in fleet:
        known = ", ".join(instance.id for instance in fleet.instances) or "none"
        refusal = f"there is no instance {command.instance}; there are: {known}"
        return [], DrainAnswered(instance=command.instance, draining=False, refusal=refusal)
    if isinstance(command, DrainInstance):
        events = dispatcher.drain(command.instance, command.reason, now, leaving=command.leaving)
    else:
        events = dispatcher.undrain(command.instance, now)
    answer = DrainAnswered(
        instance=command.instance,
        draining=fleet[command.instance].draining,
        requests=_requests_at(dispatcher, command.instance),
    )
    if events:
        log.info("drain", instance=answer.instance, draining=answer.draining, requests=answer.requests)
    return events, answer


def _requests_at(dispatcher: Dispatcher, instance: InstanceId) -> int:
    queue = dispatcher.state.workload.queues.get(instance)
    return queue.requests if queue else 0
