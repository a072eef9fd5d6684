"""Requests of commands to the leader or the scaler of a running fleet, with error messages for users."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import click

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream.producer import STALLED_SECONDS
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import Command, DescribeFleet, FleetDescribed
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import command_subject
from pointsman.ports import (
    CommandRefusedError,
    Commands,
    CommandTimeoutError,
    CommandUnsendableError,
    ForbiddenError,
    Link,
    LogUnavailableError,
    NoResponderError,
)
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import NATS_PART, open_link
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.structured_logs import configure_logging
from pointsman_cli.formatting import plural
from pointsman_cli.options import as_given
from pointsman_cli.terminal import one_line, print_line

ANSWER_SECONDS = 5.0
CONNECT_SECONDS_MAX = 5.0
POLL_SECONDS = 0.02
WATCH_SECONDS = 0.5
WAIT_SECONDS_MAX = 600.0
STALLED_ADVICE = (
    "The disk of nats-server is full or fails, or its cluster has no quorum: free space, then restart the nats-server. "
    "After 50 s new requests get 503, and what is not confirmed after 100 s, or at a stop, is lost (docs/failures.md, disk full)."
)
A = TypeVar("A", bound=Command)
T = TypeVar("T")


class NoAnswerError(click.ClickException):
    """The message names the process that did not answer."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@asynccontextmanager
async def connected_link(
    settings: FleetSettings,
    *,
    name: str,
    error: type[click.ClickException] = NoAnswerError,
    advice: str = "check it, or name another fleet with --from",
) -> AsyncIterator[Link]:
    """A link to the fleet's nats-server that writes nothing into the log. Raises `error`."""
    configure_logging("error", "text")
    user, board = person(settings), HealthBoard()
    async with open_link(settings, ScaledClock(settings.speed), board, name=name, user=user) as link:
        deadline = time.monotonic() + CONNECT_SECONDS_MAX
        while not link.commands.connected:
            if time.monotonic() > deadline:
                raise error(f"no connection to {settings.nats_shown}: {board.missing_parts.get(NATS_PART)}; {advice}")
            await asyncio.sleep(POLL_SECONDS)
        yield link


def person(settings: FleetSettings) -> BusUser:
    """Whoever uses a command, by the name of the credentials."""
    if settings.actor in (BusRole.READER, BusRole.CONSOLE):
        return BusUser(BusRole(settings.actor))
    return BusUser(BusRole.OPERATOR, settings.actor)


async def ask(
    commands: Commands, subject: str, command: AnyCommand, answer: type[A], *, absent: str, hint: str = ""
) -> A:
    """Returns the reply. `absent`: message if nothing serves the command. `hint`: what to look at if no answer comes; by
    default whether the command was carried out. Raises NoAnswerError."""
    try:
        answered = await commands.request(subject, command, timeout=WallSeconds(ANSWER_SECONDS))
    except (ForbiddenError, CommandUnsendableError) as error:
        raise NoAnswerError(str(error)) from error
    except CommandRefusedError as error:
        raise NoAnswerError(f"{error}; the fleet runs another release than this command (docs/upgrades.md)") from error
    except NoResponderError as error:
        raise NoAnswerError(absent) from error
    except (CommandTimeoutError, LogUnavailableError) as error:
        hint = hint or f"'pointsman fleet{as_given()}' shows whether it was done"
        raise NoAnswerError(f"no answer within {ANSWER_SECONDS:g} s; {hint}") from error
    if not isinstance(answered, answer):
        raise NoAnswerError(f"the answer is a {type(answered).__name__}; is the fleet of this version?")
    return answered


async def described(commands: Commands, settings: FleetSettings) -> FleetDescribed:
    """Raises NoAnswerError."""
    subject = command_subject(PoolName(settings.pool), "fleet")
    hint = "the leading scheduler hangs, or cannot be reached: look at its log and its /readyz"
    return await ask(commands, subject, DescribeFleet(), FleetDescribed, absent=no_scheduler(settings), hint=hint)


def no_scheduler(settings: FleetSettings) -> str:
    return f"no scheduler serves the pool '{settings.pool}' on {settings.nats_shown}; look at its log, or name the pool with --pool"


def stalled_log(fleet: FleetDescribed | None) -> str:
    """Says that the log takes no writes: what is read from it is old then. Empty if it takes them, or if nobody told."""
    if fleet is None or fleet.unconfirmed_seconds < STALLED_SECONDS:
        return ""
    seconds, count = fleet.unconfirmed_seconds, plural(fleet.unconfirmed_writes, "write")
    return (
        f"the log has taken no writes for {seconds:.0f} s: {count} of the leader wait, and what is newer is not in it"
    )


async def wait_until(
    refresh: Callable[[], Awaitable[T]], done: Callable[[T], bool], progress: Callable[[T], str], *, quiet: bool
) -> tuple[T, bool]:
    deadline, shown = time.monotonic() + WAIT_SECONDS_MAX, ""
    while True:
        answer = await refresh()
        if not quiet and (text := progress(answer)) != shown:
            shown = text
            print_line(text)
        if done(answer) or time.monotonic() > deadline:
            return answer, done(answer)
        await asyncio.sleep(WATCH_SECONDS)
