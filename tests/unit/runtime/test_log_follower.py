"""The services that only watch: they fold the whole log, say when they have caught up, and survive a reset."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import LeaderElected
from pointsman.ports import EventLog, Fence, LogEntry, LogExtent, LogReset, LogUnavailableError, OnStored
from pointsman.primitives import Sequence, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_follower import LogFollower
from pointsman.state.fleet import Status
from pointsman.state.state import PoolSettings
from pointsman_lab.memory.stores import MemoryCheckpoints
from pointsman_scaler.size_report import pool_sizes
from tests.support.events import joined, reported

Step = LogEntry | LogReset


class ScriptedLog(EventLog):
    """A log that is read exactly as a test wrote it, once, then stays silent."""

    def __init__(self, *steps: Step, last: Sequence, first: Sequence = 1, refusals: int = 0) -> None:
        self._steps = iter(steps)
        self._first = first
        self._last = last
        self._refusals = refusals
        self.read_to_the_end = asyncio.Event()

    @override
    async def extent(self) -> LogExtent:
        if self._refusals:
            self._refusals -= 1
            raise LogUnavailableError("not now")
        return LogExtent("log", self._first, self._last)

    @override
    async def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Step]:
        for step in self._steps:
            yield step
        self.read_to_the_end.set()
        await asyncio.Event().wait()

    @override
    async def append(self, event: LogEvent) -> Sequence:
        raise AssertionError("a follower writes nothing")

    @override
    def append_soon(self, event: LogEvent, fence: Fence | None = None, on_stored: OnStored | None = None) -> None:
        raise AssertionError("a follower writes nothing")

    @override
    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        raise AssertionError("a follower writes nothing")

    @override
    async def flush(self, timeout: WallSeconds) -> bool:
        return True


def entry(sequence: Sequence, event: LogEvent) -> LogEntry:
    return LogEntry(sequence, "pm.p.fleet.x", encode(event), event)


async def follow(log: ScriptedLog) -> tuple[LogFollower, HealthBoard]:
    """A follower that has read all that the script says."""
    board = HealthBoard()
    checkpoints = MemoryCheckpoints(lambda: True)
    follower = LogFollower(log, checkpoints, clock=ScaledClock(), board=board, settings=PoolSettings())
    folding = asyncio.ensure_future(follower.run())
    await asyncio.wait_for(log.read_to_the_end.wait(), 5)
    folding.cancel()
    with suppress(asyncio.CancelledError):
        await folding
    return follower, board


async def test_it_is_ready_once_it_has_read_what_there_was_when_it_came() -> None:
    early = ScriptedLog(entry(1, joined("engine-1")), last=2)
    late = ScriptedLog(entry(1, joined("engine-1")), entry(2, joined("engine-2")), last=2)

    assert not (await follow(early))[1].ready
    assert (await follow(late))[1].ready


async def test_an_empty_log_is_read_at_once() -> None:
    assert (await follow(ScriptedLog(last=0)))[1].ready


async def test_a_log_whose_entries_have_all_expired_is_read_at_once() -> None:
    assert (await follow(ScriptedLog(first=8, last=7)))[1].ready


async def test_it_waits_for_a_log_that_does_not_answer_yet() -> None:
    follower, board = await follow(ScriptedLog(entry(1, joined("engine-1")), last=1, refusals=2))

    assert board.whole
    assert follower.state.sequence == 1


async def test_after_a_reset_nothing_old_is_left() -> None:
    log = ScriptedLog(entry(1, joined("engine-1")), LogReset(5, "recreated"), entry(5, joined("engine-2")), last=5)

    follower, _ = await follow(log)

    assert [instance.id for instance in follower.state.fleet.instances] == ["engine-2"]


async def test_what_does_not_decode_is_passed_over() -> None:
    broken = LogEntry(1, "pm.p.fleet.x", b"{", None, "truncated")

    follower, board = await follow(ScriptedLog(broken, entry(2, joined("engine-1")), last=2))

    assert board.whole
    assert follower.state.sequence == 2


async def test_the_scaler_counts_instances_by_status() -> None:
    log = ScriptedLog(
        entry(1, joined("engine-1")),
        entry(2, joined("engine-2")),
        entry(3, reported("engine-2", 0, [], serving=False)),
        last=3,
    )

    follower, _ = await follow(log)

    assert pool_sizes(follower.state) == {Status.READY: 1, Status.DOWN: 1}
