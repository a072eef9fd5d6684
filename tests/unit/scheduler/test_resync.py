"""Who is asked for a snapshot or to join anew, and when: workers that hang delay no other, and are asked ever more rarely."""

import asyncio
from itertools import pairwise
from typing import cast

import pytest

from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import ResyncAnswered, ResyncCache
from pointsman.contracts.fleet import InstanceReported
from pointsman.ports import Commands, CommandTimeoutError
from pointsman.primitives import Epoch, PoolName, WallSeconds
from pointsman.state.parts import PoolSettings
from pointsman.state.state import State
from pointsman_scheduler.leader import Candidacy
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.resync import AT_ONCE_MAX, PERIOD_WALL_SECONDS, RETRY_WALL_SECONDS_MAX, Resync
from tests.support.events import joined, reported, stored
from tests.support.settable_clock import StandingClock

REFUSED = Epoch(99)


class Workers:
    """Those whose name begins with `hung` answer when `released`, with a timeout; others at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.epochs: list[int] = []
        self.open_max = 0
        self.released = asyncio.Event()
        self._open = 0

    async def request(self, subject: str, command: AnyCommand, *, timeout: WallSeconds) -> AnyCommand:
        assert isinstance(command, ResyncCache)
        self.asked.append(command.instance)
        self.epochs.append(command.epoch)
        if command.instance.startswith("broken"):
            raise ValueError(command.instance)
        if command.instance.startswith("hung"):
            self._open += 1
            self.open_max = max(self.open_max, self._open)
            await self.released.wait()
            self._open -= 1
            raise CommandTimeoutError("no answer")
        return ResyncAnswered(instance=command.instance, accepted=True)


class ResyncBench:
    def __init__(self, *in_doubt: str) -> None:
        self.state = State(PoolSettings())
        for name in in_doubt:
            self.apply(joined(name), stored(name, 1, [1]), stored(name, 3, [2]))
        self.workers = Workers()
        self.clock = StandingClock()
        self.resync = Resync(
            leader=cast(Candidacy, None),
            replica=cast(Replica, self),
            commands=cast(Commands, self.workers),
            clock=self.clock,
            pool=PoolName("default"),
            is_refused=lambda _instance, epoch: epoch == REFUSED,
        )

    def apply(self, *events: LogEvent) -> None:
        for event in events:
            self.state.apply(event, self.state.sequence + 1)
            if isinstance(event, InstanceReported):
                self.resync.note_report(event)

    async def round(self) -> list[str]:
        """Who is asked in it."""
        self.workers.asked.clear()
        await self.resync._resync_doubtful(self.state)
        return list(self.workers.asked)


async def test_workers_that_hang_delay_no_other_and_a_bounded_number_is_asked_at_once() -> None:
    few = ResyncBench(*(f"hung-{n}" for n in range(10)), "well")
    going = asyncio.ensure_future(few.round())
    await asyncio.sleep(0.05)
    assert "well" in few.workers.asked
    few.workers.released.set()
    await going

    many = ResyncBench(*(f"hung-{n}" for n in range(3 * AT_ONCE_MAX)))
    going = asyncio.ensure_future(many.round())
    await asyncio.sleep(0.05)
    many.workers.released.set()
    assert len(await going) == 3 * AT_ONCE_MAX
    assert many.workers.open_max == AT_ONCE_MAX


async def test_who_does_not_answer_is_asked_ever_more_rarely_and_who_answers_each_time() -> None:
    bench = ResyncBench("hung", "well")
    bench.workers.released.set()
    asked_at = []
    for _ in range(120):
        asked = await bench.round()
        assert "well" in asked
        asked_at += [bench.clock.wall()] * ("hung" in asked)
        bench.clock.at += float(PERIOD_WALL_SECONDS)

    waits = [later - earlier for earlier, later in pairwise(asked_at)]
    assert waits[0] <= 2 * PERIOD_WALL_SECONDS
    assert all(
        0.5 * RETRY_WALL_SECONDS_MAX < wait <= RETRY_WALL_SECONDS_MAX + PERIOD_WALL_SECONDS for wait in waits[4:]
    )


async def test_an_unexpected_error_of_one_question_keeps_no_other_from_being_asked() -> None:
    bench = ResyncBench("broken", "well")

    assert await bench.round() == ["broken", "well"]


async def test_an_unregistered_instance_is_asked_once_for_each_report_and_forgotten_when_it_joined() -> None:
    bench = ResyncBench()
    bench.apply(reported("late", 0, [], at=1.0))
    assert [await bench.round() for _ in range(3)] == [["late"], [], []]
    bench.apply(reported("late", 0, [], at=2.0))
    assert [await bench.round() for _ in range(2)] == [["late"], []]

    bench.apply(joined("late"))
    assert await bench.round() == []
    assert bench.resync._reported == {}


async def test_of_two_workers_with_one_name_only_the_one_that_was_not_refused_is_asked() -> None:
    bench = ResyncBench()
    bench.apply(reported("twice", 0, [], at=1.0, epoch=7), reported("twice", 0, [], at=1.1, epoch=REFUSED))
    assert await bench.round() == ["twice"]
    assert bench.workers.epochs == [7]

    bench.apply(reported("twice", 0, [], at=2.0, epoch=REFUSED))
    assert await bench.round() == []


@pytest.mark.parametrize("hung", ["hung", "well"])
async def test_nothing_is_remembered_of_names_that_are_gone(hung: str) -> None:
    bench = ResyncBench()
    bench.workers.released.set()
    for number in range(3000):  # more than a State keeps
        bench.apply(reported(f"{hung}-{number}", 0, [], at=1.0))
        if number % 500 == 0:
            await bench.round()
    await bench.round()

    for memory in (bench.resync._reported, bench.resync._unanswered):
        assert set(memory) <= set(bench.state.unregistered)
