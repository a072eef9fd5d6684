"""A scheduler that does as a test says: grants the first engine that is not excluded, rejects, or holds back.

It keeps the promises that an ingress relies on: a repeated command is answered like the first, and a cancelled
request that was still held back is ended by the scheduler.
"""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from pointsman.contracts import subjects
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    DescribeFleet,
    FleetDescribed,
    FollowAnswered,
    FollowRequests,
    HandOverRequest,
    RouteGranted,
    RouteRejected,
    RouteRequest,
)
from pointsman.contracts.tenants import RateLimits
from pointsman.ports import Commands, Reply
from pointsman.primitives import InstanceId, PoolName, RequestId, Term


class FakeScheduler:
    """Serves the commands while its context is open. `engines`: URL by instance, in order of preference."""

    def __init__(self, commands: Commands, pool: PoolName, engines: dict[InstanceId, str]) -> None:
        self.engines = engines
        self.holds_back = False
        self.rejection: tuple[int, str, float] | None = None
        """Status, reason and retry-after (engine seconds) for every request, or None to grant."""
        self.limits: RateLimits | None = None
        """Of the tenant, as grants and rejections tell them."""
        self.knowledge = "exact"
        self.grant_fields: dict[str, Any] = {}
        """What grants say beyond the usual."""
        self.decoders: dict[InstanceId, str] = {}
        """Who decodes what the others prefill: URL by instance, in order of preference; none where nothing is split."""
        self.hand_over_rejection: tuple[int, str, float] | None = None
        self.silent_at_hand_over = False
        self.handed_over: list[HandOverRequest] = []
        self.rebinds: dict[InstanceId, InstanceId] = {}
        """Where requests are to go that are at an instance."""
        self.idle: set[InstanceId] = set()
        """Instances that say that nothing runs there: what is sent there is given up."""
        self.term = Term(1)
        """Of its answers."""
        self.silent_follows = 0
        """So many more questions about them are not answered."""
        self.followed: list[FollowRequests] = []
        self.ends_first = 0
        """So many next requests have ended already."""
        self.asked: list[RouteRequest] = []
        self.cancelled: list[CancelRequest] = []
        self.silent_cancels = 0
        """So many more of them are lost."""
        self.granted: set[RequestId] = set()
        self._grants: dict[RequestId, RouteGranted] = {}
        self._commands = commands
        self._pool = pool
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for subject, handler in (
            (subjects.command_subject(self._pool, "route"), self._route),
            (subjects.command_subject(self._pool, "handover"), self._hand_over),
            (subjects.command_subject(self._pool, "follow"), self._follow),
            (subjects.command_subject(self._pool, "cancel"), self._cancel),
            (subjects.command_subject(self._pool, "fleet"), self._describe),
        ):
            await self._open.enter_async_context(self._commands.serve(subject, handler))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def _route(self, command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, RouteRequest)
        self.asked.append(command)
        if not self.holds_back:
            await reply(self._decide(command))

    def _decide(self, command: RouteRequest) -> RouteGranted | RouteRejected:
        if self.ends_first:
            self.ends_first -= 1
            return self._reject(command, 503, "already_ended", 0.0)
        if self.rejection is not None:
            return self._reject(command, *self.rejection)
        left = [instance for instance in self.engines if instance not in command.excluded]
        if not left:
            return self._reject(command, 503, "no_instance", 1.0)
        self.granted.add(command.request)
        granted = RouteGranted(
            request=command.request,
            attempt=command.attempt,
            instance=left[0],
            url=self.engines[left[0]],
            hit_tokens=128,
            predicted_ttft=0.25,
            knowledge=self.knowledge,
            term=self.term,
            limits=self.limits,
        )
        decoder = next((instance for instance in self.decoders if instance not in command.excluded), None)
        if decoder is not None:
            granted = msgspec.structs.replace(granted, decode=decoder, decode_url=self.decoders[decoder])
        elif self.decoders:
            return self._reject(command, 503, "no_instance", 1.0)
        granted = msgspec.structs.replace(granted, **self.grant_fields)
        self._grants[command.request] = granted
        return granted

    async def _hand_over(self, command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, HandOverRequest)
        self.handed_over.append(command)
        if self.silent_at_hand_over:
            return
        if self.hand_over_rejection is not None:
            await reply(self._reject(command, *self.hand_over_rejection))
            return
        planned = self._grants[command.request]
        fields = {"decode": InstanceId(""), "decode_url": "", "prefilled_by": planned.instance}
        await reply(msgspec.structs.replace(planned, instance=planned.decode, url=planned.decode_url, **fields))

    async def _follow(self, command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, FollowRequests)
        self.followed.append(command)
        if self.silent_follows:
            self.silent_follows -= 1
            return
        moved = [(sent, self.rebinds[sent.instance]) for sent in command.requests if sent.instance in self.rebinds]
        rebound = [
            msgspec.structs.replace(self._grants[sent.request], instance=to, url=self.engines[to], rebind=False)
            for sent, to in moved
        ]
        given_up = [sent.request for sent in command.requests if sent.instance in self.idle]
        await reply(FollowAnswered(rebound=rebound, given_up=given_up, term=self.term))

    def _reject(
        self, command: RouteRequest | HandOverRequest, status: int, reason: str, retry_after: float
    ) -> RouteRejected:
        return RouteRejected(
            request=command.request,
            attempt=command.attempt,
            status=status,
            reason=reason,
            detail="the test says so",
            retry_after=retry_after,
            term=self.term,
            limits=self.limits,
        )

    async def _cancel(self, command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, CancelRequest)
        self.cancelled.append(command)
        if self.silent_cancels:
            self.silent_cancels -= 1
            return
        await reply(CancelAnswered(request=command.request, ended=command.request not in self.granted))

    async def _describe(self, command: AnyCommand, reply: Reply) -> None:
        assert isinstance(command, DescribeFleet)
        await reply(
            FleetDescribed(
                instances=[],
                pool=self._pool,
                policy="fake",
                admission="none",
                ordering="fcfs",
                scheduler="fake",
                term=Term(1),
                as_of=0,
                speed=1.0,
            )
        )
