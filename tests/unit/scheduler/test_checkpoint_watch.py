"""Whether no checkpoints are taken though the log goes on: told by a scheduler that stays ready."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.ports import CheckpointLabel, LogExtent, StoreUnavailableError
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_lab.memory.stores import MemoryCheckpoints
from pointsman_scheduler.checkpoint_watch import CHECKPOINTS_PART, CheckpointWatch

OURS = "11.ours"
LOOKS = 60
HALF_MINUTES = {"a minute": 2, "an hour": 120}


class Checkpoints(MemoryCheckpoints):
    def __init__(self) -> None:
        super().__init__(lambda: True)
        self.away = False

    @override
    async def labels(self) -> list[CheckpointLabel]:
        if self.away:
            raise StoreUnavailableError
        return await super().labels()


class WatchedLog:
    """A log that goes on by 100 entries between two looks, which are 30 s apart."""

    def __init__(self, *, half_minutes: int = 2) -> None:
        self.board = HealthBoard(pool="watched")
        self.checkpoints = Checkpoints()
        self.extent = LogExtent("log", 1, 0)
        self.watch = CheckpointWatch(
            event_log=SimpleNamespace(extent=self._extent),
            checkpoints=self.checkpoints,
            clock=ScaledClock(),
            board=self.board,
            form=OURS,
            every=WallSeconds(30.0 * half_minutes),
        )

    async def look(self, *, first: int | None = None, grows: int = 100) -> bool:
        """Returns whether it is told that none are taken."""
        begins = self.extent.first if first is None else first
        self.extent = LogExtent("log", begins, self.extent.last + grows)
        await self.watch.look()
        assert self.board.ready
        return CHECKPOINTS_PART in self.board.degraded_parts

    async def save(self, *, form: str = OURS, identity: str = "log") -> None:
        label = CheckpointLabel(identity=identity, as_of=self.extent.last, entry="", form=form)
        await self.checkpoints.save(label, b"")

    @property
    def age(self) -> float | None:
        return REGISTRY.get_sample_value("pointsman_checkpoint_age_entries", {"pool": "watched"})

    async def _extent(self) -> LogExtent:
        return self.extent


@pytest.fixture
def watched() -> WatchedLog:
    return WatchedLog()


async def test_a_log_with_a_checkpoint_each_interval_or_three_has_what_it_needs(watched: WatchedLog) -> None:
    for look in range(LOOKS):
        assert not await watched.look()
        if look % 6 == 0:
            await watched.save()

    assert watched.age == 100 * ((LOOKS - 1) % 6)


@pytest.mark.parametrize("interval", HALF_MINUTES)
async def test_a_log_that_goes_on_for_five_intervals_without_one_is_told_until_there_is_one(interval: str) -> None:
    watched = WatchedLog(half_minutes=HALF_MINUTES[interval])
    await watched.look()
    await watched.save()
    told = [await watched.look() for _ in range(6 * HALF_MINUTES[interval])]
    assert watched.age == 100 * len(told)
    await watched.save()

    assert told.index(True) in range(5 * HALF_MINUTES[interval], 5 * HALF_MINUTES[interval] + 2)
    assert all(told[told.index(True) :])
    assert not await watched.look()
    assert watched.age == 100


async def test_a_log_that_stands_still_needs_no_checkpoint(watched: WatchedLog) -> None:
    await watched.look()
    await watched.save()
    for look in range(10 * LOOKS):
        assert not await watched.look(grows=1 if look < 5 else 0)


@pytest.mark.parametrize("wrong", [{"form": "10.theirs"}, {"identity": "another log"}])
async def test_checkpoints_that_this_scheduler_cannot_use_are_none(watched: WatchedLog, wrong: dict[str, str]) -> None:
    told = False
    for _ in range(LOOKS):
        told = await watched.look()
        await watched.save(**wrong)

    assert told
    assert watched.age == 100 * LOOKS


async def test_it_stays_told_where_the_log_dropped_the_newest_one_or_somebody_deleted_it(watched: WatchedLog) -> None:
    await watched.look()
    await watched.save()
    told = [await watched.look() for _ in range(LOOKS)]
    assert told[-1]
    assert await watched.look(first=1000)
    assert watched.age == watched.extent.entries
    watched.checkpoints._kept.clear()

    assert await watched.look()


async def test_a_store_that_does_not_answer_is_told(watched: WatchedLog) -> None:
    await watched.look()
    await watched.save()
    await watched.look()
    watched.checkpoints.away = True

    assert [await watched.look() for _ in range(LOOKS)][-1]
    assert watched.age == 100 * (LOOKS + 1)


async def test_a_log_that_soon_drops_the_newest_one_does_not_wait_for_five_long_intervals() -> None:
    watched = WatchedLog(half_minutes=HALF_MINUTES["an hour"])
    for _ in range(20):
        assert not await watched.look()
    await watched.save()
    for _ in range(10):
        assert not await watched.look(first=200)

    assert await watched.look(first=1900)


async def test_one_beyond_a_log_that_has_lost_its_tail_does_not_count_beside_new_ones(watched: WatchedLog) -> None:
    kept = watched.extent
    watched.extent = LogExtent("log", 1, 1_000_000)
    await watched.save()
    watched.extent = kept
    for _ in range(LOOKS):
        assert not await watched.look()
        await watched.save()
