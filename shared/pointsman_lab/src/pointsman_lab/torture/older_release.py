"""The ports of a process of the release before, by what that release lacks: its workers tell no heartbeats and its schedulers
hear none, it does not know how loaded its log is, names no wire version, takes events that are new for garbage, and does
not answer commands that it cannot read. Limit: otherwise it works as this release, whose fold is the same but
for what redispatched requests say of their engines (decision 82); `make test-upgrade` has the real one."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

import msgspec
from typing_extensions import override

from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import CommandRefused, NoteHeartbeat
from pointsman.contracts.decisions import LeaderElected, RequestsRefused
from pointsman.ports import CommandHandler, Fence, LogEntry, LogReset, NoResponderError, Reply
from pointsman.primitives import Sequence, WallSeconds
from pointsman_lab.torture.link import Link
from pointsman_lab.torture.simulated_ports import SimulatedCommands, SimulatedLog

NEW_EVENTS = (RequestsRefused,)


def make_older(link: Link) -> None:
    link.ports = replace(link.ports, log=OlderLog(link), commands=OlderCommands(link))


class OlderLog(SimulatedLog):
    @property
    @override
    def write_load(self) -> float:
        return 0.0

    @override
    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        return await super().elect(msgspec.structs.replace(event, wire=0), after=after)

    @override
    async def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LogEntry | LogReset]:
        async for found in super().read(start, kinds=kinds, at_end=at_end):
            if isinstance(found, LogEntry) and isinstance(found.event, NEW_EVENTS):
                yield LogEntry(found.sequence, found.subject, found.payload, None, "no event of this release")
            else:
                yield found


class OlderCommands(SimulatedCommands):
    @override
    async def request(self, subject: str, command: AnyCommand, *, timeout: WallSeconds) -> AnyCommand:
        if isinstance(command, NoteHeartbeat):
            raise NoResponderError("this release sends none")
        return await super().request(subject, command, timeout=timeout)

    @override
    def serve(self, subject: str, handler: CommandHandler) -> AbstractAsyncContextManager[None]:
        async def readable(command: AnyCommand, reply: Reply) -> None:
            if not isinstance(command, CommandRefused):
                await handler(command, reply)

        if self._link.network.is_heartbeat(subject):
            return nullcontext()
        return super().serve(subject, readable)
