"""Admin commands that a person asked for on a page: drain, undrain and scale. The only thing that the console ever sends to
the leader or the scaler; a connection is made for each and closed again."""

from typing import TypeVar

from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import (
    Command,
    DrainAnswered,
    DrainInstance,
    ScaleAnswered,
    ScalePool,
    UndrainInstance,
)
from pointsman.contracts.subjects import AdminAction, admin_subject, valid_name
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import NoAnswerError, ask, connected_link, no_scheduler
from pointsman_cli.console.views import ActionView

REASON = "the console"
WANTED_MAX = 1000
A = TypeVar("A", bound=Command)


class Actions:
    def __init__(self, settings: FleetSettings | None) -> None:
        """`settings`: with the credentials of an operator; None: this console only reads."""
        self._settings = settings

    @property
    def possible(self) -> bool:
        return self._settings is not None

    async def drain(self, instance: str, *, undo: bool = False) -> ActionView:
        if not valid_name(instance):
            return ActionView(done=False, detail="there is no such instance")
        name = InstanceId(instance)
        command = UndrainInstance(instance=name) if undo else DrainInstance(instance=name, reason=REASON)
        answer = await self._ask("drain", command, DrainAnswered)
        if isinstance(answer, ActionView):
            return answer
        if answer.refusal:
            return ActionView(done=False, detail=answer.refusal)
        left = f"drains; {answer.requests} requests left there" if answer.draining else "takes requests"
        warning = f"; warning: {answer.warning}" if answer.warning else ""
        return ActionView(done=True, detail=f"{answer.instance} {left}{warning}")

    async def scale(self, wanted: str) -> ActionView:
        if not (wanted.isascii() and wanted.isdigit()) or len(wanted) > 4 or int(wanted) > WANTED_MAX:
            return ActionView(done=False, detail=f"a number of instances from 0 to {WANTED_MAX} is needed")
        answer = await self._ask("scale", ScalePool(wanted=int(wanted), asker=REASON), ScaleAnswered)
        if isinstance(answer, ActionView):
            return answer
        if answer.refusal:
            return ActionView(done=False, detail=f"nothing was changed: {answer.refusal}")
        return ActionView(done=True, detail=f"{answer.wanted} wanted, {answer.ready} ready")

    async def _ask(self, action: AdminAction, command: AnyCommand, answer: type[A]) -> A | ActionView:
        settings = self._settings
        if settings is None:
            return ActionView(done=False, detail="this console only reads: it was given no admin credential")
        subject = admin_subject(PoolName(settings.pool), action, settings.actor)
        absent = no_scheduler(settings) if action == "drain" else f"no scaler acts for the pool '{settings.pool}'"
        try:
            async with connected_link(settings, name="console-action") as link:
                return await ask(link.commands, subject, command, answer, absent=absent)
        except NoAnswerError as error:
            return ActionView(done=False, detail=error.message)
