"""The operator of a pool: drains instances, undoes it, switches roles, or scales. Repeats a command until it is answered, for a while."""

import asyncio
import contextvars

from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import DrainInstance, ScalePool, UndrainInstance
from pointsman.contracts.fleet import Role
from pointsman.contracts.subjects import AdminAction, admin_subject
from pointsman.ports import CommandTimeoutError, NoResponderError
from pointsman.primitives import EngineSeconds, InstanceId, WallSeconds
from pointsman_lab.torture.clocks import SkewedClock
from pointsman_lab.torture.environment import Environment

ANSWER_SECONDS: EngineSeconds = 2.0
AGAIN_SECONDS: EngineSeconds = 0.5
TRIES_MAX = 8


class Operator:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._link = environment.link(SkewedClock(environment.loop, speed=environment.plan.speed), "operator")
        self._pool = environment.network.pool

    def drain(self, instance: InstanceId) -> None:
        self._insist("drain", DrainInstance(instance=instance, reason="an operator wants it"))

    def undrain(self, instance: InstanceId) -> None:
        self._insist("drain", UndrainInstance(instance=instance))

    def switch(self, instance: InstanceId, role: Role) -> None:
        self._insist("drain", DrainInstance(instance=instance, reason="an operator wants another role", becomes=role))

    def scale(self, wanted: int) -> None:
        self._insist("scale", ScalePool(wanted=wanted, asker="an operator"))

    def _insist(self, action: AdminAction, command: AnyCommand) -> None:
        subject = admin_subject(self._pool, action, "operator")
        self._environment.loop.launch(self._ask(subject, command), contextvars.Context())

    async def _ask(self, subject: str, command: AnyCommand) -> None:
        for _ in range(TRIES_MAX):
            try:
                await self._link.ports.commands.request(subject, command, timeout=WallSeconds(ANSWER_SECONDS))
            except (NoResponderError, CommandTimeoutError):
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return
