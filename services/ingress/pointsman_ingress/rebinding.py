"""Requests that may still be taken out of their engine: the leader is asked, until the engine answers, where they belong.

Only requests whose grant says `rebind` are watched. One command a second asks for all of them, so an answer that is lost is
given with the next, and a leader that comes answers like the one before. Where a request is to go elsewhere, whoever waits
for its engine is interrupted there: the connection is closed, which is how the engine learns to stop. From the first bytes of
the answer on the request stays, whatever is said: the log then tells by its PrefillFinished, or its end, where it was served.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

import structlog

from pointsman.chassis.telemetry import REBINDS_FOLLOWED
from pointsman.contracts.commands import FollowAnswered, FollowRequests, RouteGranted, SentRequest
from pointsman.contracts.subjects import follow_subject
from pointsman.ports import Clock, Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import PoolName, RequestId, Seconds, Term

log = structlog.get_logger()

ASK_WALL_SECONDS: Seconds = 1.0
"""How often the leader is asked, and how long it may take to answer."""
ASKED_AT_ONCE_MAX = 1_000
"""Requests in one question, those that wait longest; the others' turn comes as these are answered."""


@dataclass(slots=True, eq=False)
class Watch:
    """One request at an engine that has not answered. `onward`: where it is to go instead."""

    grant: RouteGranted
    wait: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    onward: RouteGranted | None = None


class Rebinding:
    """The requests of one pool that may be re-bound."""

    def __init__(self, *, commands: Commands, pool: PoolName, clock: Clock, newest_term: Callable[[], Term]) -> None:
        """`newest_term`: what an earlier leader says is void."""
        self._commands = commands
        self._subject = follow_subject(pool)
        self._clock = clock
        self._newest_term = newest_term
        self._watched: dict[RequestId, Watch] = {}
        self._any = asyncio.Event()

    @asynccontextmanager
    async def watch(self, grant: RouteGranted) -> AsyncIterator[Watch]:
        """Interrupts what is done inside when the request is to go elsewhere: then `onward` says where."""
        watch = Watch(grant)
        self._watched[grant.request] = watch
        self._any.set()
        try:
            async with watch.wait:
                yield watch
        except TimeoutError:
            if watch.onward is None:
                raise
            REBINDS_FOLLOWED.inc()
            log.info("rebound", request=grant.request, source=grant.instance, instance=watch.onward.instance)
        finally:
            self._watched.pop(grant.request, None)

    def answered(self, grant: RouteGranted) -> None:
        """Its engine has begun to answer: it stays, even where the leader has said otherwise in this very moment."""
        watch = self._watched.pop(grant.request, None)
        if watch is not None:
            watch.onward = None
            watch.wait.reschedule(None)

    async def ask(self) -> None:
        """Ask for as long as anything is watched, for ever."""
        while True:
            await self._any.wait()
            await self._clock.sleep_wall(ASK_WALL_SECONDS)
            if self._watched:
                await self._ask_once()
            else:
                self._any.clear()

    async def _ask_once(self) -> None:
        asked = islice(self._watched.values(), ASKED_AT_ONCE_MAX)
        command = FollowRequests(
            requests=[
                SentRequest(request=w.grant.request, attempt=w.grant.attempt, instance=w.grant.instance) for w in asked
            ]
        )
        try:
            answer = await self._commands.request(self._subject, command, timeout=ASK_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError):
            return  # asked again: nothing is lost but a second
        if isinstance(answer, FollowAnswered) and answer.term >= self._newest_term():
            for grant in answer.rebound:
                self._interrupt(grant)

    def _interrupt(self, onward: RouteGranted) -> None:
        watch = self._watched.get(onward.request)
        if watch is None or watch.onward is not None:
            return
        if watch.grant.attempt == onward.attempt and watch.grant.instance != onward.instance:
            watch.onward = onward
            watch.wait.reschedule(0.0)
