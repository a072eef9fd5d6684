"""Following a log that is written, cut, recreated and out of reach."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.decisions import LeaderElected
from pointsman.policies.policy_set import policy_set
from pointsman.ports import CheckpointLabel, LogEntry
from pointsman.primitives import PoolName, Term
from pointsman.runtime.checkpoint_fingerprint import checkpoint_form, entry_digest
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import NATS_PART
from pointsman.simulation.replay import fold
from pointsman.state.checkpoint import encode_state, state_digest
from pointsman.state.state import PoolSettings, State
from pointsman_cli.console.log import following
from pointsman_cli.console.log.following import LiveLog
from pointsman_lab.memory.log import MemoryBroker
from tests.support.events import joined
from tests.support.log_reading import whole_log
from tests.support.recorded_log import SETTINGS, RecordedFleet
from tests.support.waiting import eventually


class FollowedLog:
    def __init__(self) -> None:
        self.broker = MemoryBroker(PoolName("default"))
        self.board = HealthBoard(pool="default")
        self.log = LiveLog(
            self.broker.client(ScaledClock(), name="console"),
            clock=ScaledClock(),
            board=self.board,
            pool=PoolName("default"),
            settings=PoolSettings(),
            origin="a log in memory",
        )

    def write(self, entries: list[LogEntry]) -> None:
        for entry in entries:
            self.broker.store_raw(entry.subject, entry.payload)

    async def stored(self) -> list[LogEntry]:
        return await whole_log(self.broker.client(ScaledClock(), name="reader").log)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[LiveLog]:
        running = asyncio.ensure_future(self.log.run())
        try:
            yield self.log
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


@pytest.fixture
def followed() -> FollowedLog:
    return FollowedLog()


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    return RecordedFleet(policy_set(), seed=5).live(200).write_all().entries


async def test_it_folds_what_is_there_and_what_comes(followed: FollowedLog, entries: list[LogEntry]) -> None:
    followed.write(entries[:100])
    async with followed.following() as log:
        await eventually(lambda: log.health == "live")
        assert log.observer.sequence == 100

        followed.write(entries[100:])
        await eventually(lambda: log.observer.sequence == len(entries))

    assert state_digest(log.observer.state) == state_digest(fold(await followed.stored(), settings=SETTINGS))
    assert followed.board.ready


async def test_a_log_into_which_no_worker_writes_is_silent(
    followed: FollowedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SILENT_WALL_SECONDS", 1.0)
    async with followed.following() as log:
        followed.broker.store(LeaderElected(at=1.0, term=Term(1), scheduler="s", as_of=0))
        followed.broker.store(joined("engine-1", at=1.0))
        await eventually(lambda: log.status(can_act=False, pools=[]).silent_seconds >= 1)

        followed.broker.store(joined("engine-1", at=2.0, epoch=2))
        await eventually(lambda: log.silent_seconds == 0)


async def test_the_pools_settings_are_those_that_its_leader_told(followed: FollowedLog) -> None:
    async with followed.following() as log:
        followed.broker.store(joined("engine-1"))
        elected = LeaderElected(at=1.0, term=Term(1), scheduler="s", as_of=1, pool={"block_tokens": 16, "speed": 4.0})
        followed.broker.store(elected)
        await eventually(lambda: log.observer.sequence == 2)

    assert (log.observer.state.settings.block_tokens, log.observer.state.settings.speed) == (16, 4.0)
    assert log.status(can_act=False, pools=[]).scheduler == "s"


async def test_after_a_reset_nothing_old_is_shown_and_people_are_told(
    followed: FollowedLog, entries: list[LogEntry]
) -> None:
    followed.write(entries)
    async with followed.following() as log:
        await eventually(lambda: log.health == "live")
        followed.broker.recreate()
        followed.write(entries[:20])
        await eventually(lambda: log.observer.sequence == 20)

        status = log.status(can_act=False, pools=[])
        assert any("starts again" in problem for problem in status.problems)
        assert len(log.observer.requests) < 20
        await eventually(lambda: log.health == "live")


async def test_without_nats_it_says_so_and_shows_what_it_knows(followed: FollowedLog, entries: list[LogEntry]) -> None:
    followed.write(entries)
    async with followed.following() as log:
        await eventually(lambda: log.health == "live")
        followed.board.degraded(NATS_PART, "connection refused")

        assert log.health == "disconnected"
        assert log.observer.sequence == len(entries)
        assert followed.board.ready, "a console that shows the past is of use"


async def test_an_empty_log_is_no_error(followed: FollowedLog) -> None:
    async with followed.following() as log:
        await eventually(lambda: log.health == "live")
        assert log.fleet_at(0).instances == []


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_log_that_is_long_is_read_from_a_proven_checkpoint(
    followed: FollowedLog, entries: list[LogEntry], damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HISTORY_ENTRIES_MAX", len(entries) - 100)
    followed.write(entries)
    state = State(SETTINGS, policy_set().trackers())
    for entry in (await followed.stored())[:150]:
        state.apply_entry(entry)
    label = CheckpointLabel(
        identity=followed.broker.extent.identity,
        as_of=150,
        entry="another entry's" if damaged else entry_digest(entries[149]),
        form=checkpoint_form(State(SETTINGS, policy_set().trackers())),
    )
    await followed.broker.checkpoints.save(label, encode_state(state))

    async with followed.following() as log:
        await eventually(lambda: log.health == "live")

    assert log.first == (1 if damaged else 151)
    whole = fold(await followed.stored(), settings=SETTINGS, trackers=() if damaged else policy_set().trackers())
    assert state_digest(log.observer.state) == state_digest(whole)
