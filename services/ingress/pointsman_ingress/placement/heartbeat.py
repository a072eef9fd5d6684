"""Tells the leader once a second which requests this ingress has (`cmd.follow`), and acts on the answer.

A leader that hears no more of a request for some seconds ends it in its books: the ingress that had it is gone. The answer
says which requests are to go to another engine (`rebinding`), and which their engine has not got any more. One that is lost is
given again with the next.
"""

import asyncio
from collections.abc import Callable, Iterator

from pointsman.contracts.commands import FollowAnswered, FollowRequests, SentRequest
from pointsman.contracts.subjects import follow_subject
from pointsman.ports import Clock, Commands, CommandTimeoutError, NoResponderError
from pointsman.primitives import PoolName, Seconds, Term
from pointsman_ingress.placement.in_flight import InFlightRequests
from pointsman_ingress.placement.rebinding import Rebinding

HEARTBEAT_WALL_SECONDS: Seconds = 1.0
"""How often the leader is told, and how long it may take to answer."""
NAMED_AT_ONCE_MAX = 1_000
"""Requests in one command; further ones go into further commands."""


class Heartbeat:
    """Of one pool."""

    def __init__(
        self,
        *,
        commands: Commands,
        pool: PoolName,
        clock: Clock,
        under_way: InFlightRequests,
        rebinding: Rebinding,
        newest_term: Callable[[], Term],
    ) -> None:
        """`newest_term`: what an earlier leader says is void."""
        self._commands = commands
        self._subject = follow_subject(pool)
        self._clock = clock
        self._under_way = under_way
        self._rebinding = rebinding
        self._newest_term = newest_term

    async def beat(self) -> None:
        """Name every request that waits or is at an engine, for ever."""
        while True:
            pause = self._clock.sleep_wall(HEARTBEAT_WALL_SECONDS)  # the same while no answer comes
            await asyncio.gather(pause, *(self._follow(command) for command in self._due()))

    def _due(self) -> Iterator[FollowRequests]:
        sent = [
            SentRequest(request=grant.request, attempt=grant.attempt, instance=grant.instance)
            for grant in self._under_way.grants
        ]
        waiting = self._under_way.waiting
        for start in range(0, max(len(sent), len(waiting)), NAMED_AT_ONCE_MAX):
            part = slice(start, start + NAMED_AT_ONCE_MAX)
            yield FollowRequests(requests=sent[part], waiting=waiting[part])

    async def _follow(self, command: FollowRequests) -> None:
        try:
            answer = await self._commands.request(self._subject, command, timeout=HEARTBEAT_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError):
            return  # said again in a second
        if isinstance(answer, FollowAnswered) and answer.term >= self._newest_term():
            for grant in answer.rebound:
                self._rebinding.move(grant)
            for request in answer.given_up:
                self._under_way.lost(request)
