"""`pointsman drain`: takes one instance out of service, or back."""

import sys
from typing import Literal, get_args

import click

from pointsman.contracts.commands import (
    DrainAnswered,
    DrainInstance,
    FleetDescribed,
    InstanceDescribed,
    UndrainInstance,
)
from pointsman.contracts.fleet import Role
from pointsman.contracts.subjects import admin_subject
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import (
    WAIT_SECONDS_MAX,
    ask,
    connected_link,
    described,
    no_scheduler,
    wait_until,
)
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.event_loop import run_command
from pointsman_cli.options import CONTEXT, as_given, fleet_options, json_switch
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import print_line

REASON = "pointsman drain"


@click.command("drain", context_settings=CONTEXT)
@click.argument("instance")
@click.option("--undo", is_flag=True, help="Put it back into service.")
@click.option(
    "--role",
    type=click.Choice(get_args(Role)),
    help="When it is drained, put it back into service in this role. A scaler that sizes roles may undo it.",
)
@click.option("--wait", is_flag=True, help="Wait until it has no requests; with --role, until it has the role.")
@fleet_options
@json_switch
def drain_command(
    instance: str,
    undo: bool,
    role: Role | None,
    wait: bool,
    place: str | None,
    pool: str | None,
    as_json: bool,
) -> None:
    """Drain INSTANCE: it gets no new requests, its queue moves to others, and running requests finish.

    It stays in the fleet and keeps its cache until it is stopped or undrained. A scaler replaces it, but does not stop it.

    \b
      pointsman drain engine-2 --wait      then restart or upgrade it
      pointsman drain engine-2 --undo
      pointsman drain engine-2 --role decode --wait
    """
    if undo and role:
        raise click.UsageError("--undo and --role contradict each other")
    settings, name = fleet_settings(place, pool, acts=True), InstanceId(instance)
    command: DrainInstance | UndrainInstance = UndrainInstance(instance=name)
    if not undo:
        command = DrainInstance(instance=name, reason=REASON, becomes=role or "")
    sys.exit(run_command(_drain(settings, command, wait=wait and not undo, as_json=as_json)))


async def _drain(
    settings: FleetSettings, command: DrainInstance | UndrainInstance, *, wait: bool, as_json: bool
) -> int:
    async with connected_link(settings, name="drain") as link:
        subject = admin_subject(PoolName(settings.pool), "drain", settings.actor)
        answer = await ask(link.commands, subject, command, DrainAnswered, absent=no_scheduler(settings))
        if answer.refusal:
            raise click.ClickException(answer.refusal)
        role = command.becomes if isinstance(command, DrainInstance) else ""
        goal = RoleChange(answer.instance, role) if role else Drained(answer.instance)
        if wait:
            await wait_until(lambda: described(link.commands, settings), goal.is_over, goal.progress, quiet=as_json)
    print_json(answer) if as_json else print_line(goal.result if goal.reached else _begun(answer, role))
    if answer.warning:
        print_line(f"warning: {answer.warning}", error=True)
    if wait and not goal.reached:
        print_line(goal.failure, error=True)
    return 1 if wait and not goal.reached else 0


class Drained:
    """What `--wait` waits for: the instance has no requests."""

    def __init__(self, instance: InstanceId) -> None:
        self.reached = False
        self.result = (
            f"{instance} is drained: stop it, or take it back with: pointsman drain{as_given()} {instance} --undo"
        )
        self.failure = f"{instance} was not idle within {WAIT_SECONDS_MAX:g} s; it goes on draining"
        self._instance = instance

    def is_over(self, fleet: FleetDescribed) -> bool:
        self.reached = _requests_left(_found(fleet, self._instance)) == 0
        return self.reached

    def progress(self, fleet: FleetDescribed) -> str:
        return f"{self._instance}: {_requests_left(_found(fleet, self._instance))} requests left"


class RoleChange:
    """What `--role --wait` waits for: the fleet shows the role, and no change under way."""

    def __init__(self, instance: InstanceId, role: Role) -> None:
        self.reached = False
        self.result = f"{instance} has the role {role} and is back in service"
        self.failure = f"{instance} did not take the role {role} within {WAIT_SECONDS_MAX:g} s; the change goes on"
        self._instance = instance
        self._role = role
        self._has_begun = False
        """The fleet has shown the change: if it shows none after that, it is over."""

    def is_over(self, fleet: FleetDescribed) -> bool:
        known = _found(fleet, self._instance)
        if known is None:
            self.failure = f"{self._instance} has left the fleet"
            return True
        self._has_begun |= known.becomes == self._role
        self.reached = known.role == self._role and not known.becomes
        if self._has_begun and not self.reached and known.becomes != self._role:
            self.failure = (
                f"{self._instance} stays with the role {known.becomes or known.role}: it is needed there, or somebody "
                "took the change back (a scaler that sizes roles does)"
            )
            return True
        return self.reached

    def progress(self, fleet: FleetDescribed) -> str:
        known = _found(fleet, self._instance)
        role = known.role if known else "none"
        return f"{self._instance}: role {role}, {_requests_left(known)} requests left"


def _found(fleet: FleetDescribed, instance: InstanceId) -> InstanceDescribed | None:
    return next((i for i in fleet.instances if i.instance == instance), None)


def _requests_left(known: InstanceDescribed | None) -> int:
    return known.pending + known.in_prefill + known.decoding if known else 0


def _begun(answer: DrainAnswered, role: Role | Literal[""]) -> str:
    if not answer.draining:
        return f"{answer.instance} takes requests"
    then = f", then it takes the role {role}" if role else ""
    return (
        f"{answer.instance} drains: {answer.requests} requests left there{then}; "
        f"watch with: pointsman fleet{as_given()} --watch"
    )
