"""How people's commands ask a fleet for something: connect, ask, and say plainly who did not answer."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import click

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import Command, DescribeFleet, FleetDescribed
from pointsman.contracts.subjects import fleet_view_subject
from pointsman.ports import Commands, CommandTimeoutError, LogUnavailableError, NoResponderError
from pointsman.primitives import PoolName
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings

ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 3.0
POLL_SECONDS = 0.01

A = TypeVar("A", bound=Command)


class NoAnswerError(click.ClickException):
    """Nobody answered; the message says who should have, and what to do."""


@asynccontextmanager
async def asking(settings: FleetSettings, *, name: str) -> AsyncIterator[Commands]:
    """The command channel of a fleet, connected. Raises NoAnswerError."""
    async with open_link(settings, ScaledClock(settings.speed), HealthBoard(), name=name, only_reads=True) as link:
        deadline = time.monotonic() + CONNECT_SECONDS
        while not link.commands.connected:
            if time.monotonic() > deadline:
                message = f"no nats-server answers at {settings.nats_shown}"
                raise NoAnswerError(message)
            await asyncio.sleep(POLL_SECONDS)
        yield link.commands


async def ask(commands: Commands, subject: str, command: AnyCommand, answer: type[A], *, nobody: str) -> A:
    """The answer. `nobody`: what to tell people where nobody serves the command. Raises NoAnswerError."""
    try:
        answered = await commands.request(subject, command, timeout=ANSWER_SECONDS)
    except NoResponderError as error:
        raise NoAnswerError(nobody) from error
    except (CommandTimeoutError, LogUnavailableError) as error:
        message = f"no answer within {ANSWER_SECONDS:g} s; whether it was done, 'pointsman fleet' shows"
        raise NoAnswerError(message) from error
    if not isinstance(answered, answer):
        message = f"the answer is a {type(answered).__name__}; is the fleet of this version?"
        raise NoAnswerError(message)
    return answered


async def described(commands: Commands, settings: FleetSettings) -> FleetDescribed:
    """The fleet as its leader knows it. Raises NoAnswerError."""
    nobody = f"no scheduler serves the pool '{settings.pool}' on {settings.nats_shown}; look at its log"
    subject = fleet_view_subject(PoolName(settings.pool))
    return await ask(commands, subject, DescribeFleet(), FleetDescribed, nobody=nobody)
