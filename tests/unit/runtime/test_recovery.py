"""Where a fold begins: with the newest checkpoint that fits, and not without one that is only away for a moment."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.policies.policy_set import policy_set
from pointsman.ports import CheckpointLabel, LogEntry, StoreUnavailableError
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime import recovery
from pointsman.runtime.checkpoint_fingerprint import entry_digest
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.recovery import LogBrokenError, Recovery
from pointsman.state.checkpoint import encode_state
from pointsman.state.state import FOLD_VERSION, State
from pointsman_lab.memory.log import MemoryBroker
from pointsman_lab.memory.stores import MemoryCheckpoints
from pointsman_scheduler.settings import SchedulerSettings
from tests.support.events import joined

ENTRIES = 6
FOLDED_WHOLE = "pointsman_log_folded_whole_total"
SETTINGS, POLICIES = SchedulerSettings(), policy_set()


class TroubledCheckpoints(MemoryCheckpoints):
    """Away for the first looks, or replaced by a newer one between look and load."""

    def __init__(self, *, away: int = 0, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__(lambda: True)
        self.away = away
        self.meanwhile = meanwhile

    @override
    async def labels(self) -> list[CheckpointLabel]:
        self.away -= 1
        if self.away >= 0:
            raise StoreUnavailableError("the store is away")
        return await super().labels()

    @override
    async def load(self, label: CheckpointLabel) -> bytes | None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return await super().load(label)


async def _a_log_that_begins_late() -> tuple[MemoryBroker, list[tuple[LogEntry, State]]]:
    """Entries 1 to 6, each a new instance, with the State after each. The first three were dropped."""
    broker, state = MemoryBroker(PoolName("default")), SETTINGS.empty_state(POLICIES)
    log, passed = broker.client(ScaledClock(), name="test").log, []
    for number in range(1, ENTRIES + 1):
        await log.append(joined(f"engine-{number}"))
    async for entry in log.read():
        assert isinstance(entry, LogEntry)
        assert entry.event is not None
        state.apply(entry.event, entry.sequence)
        passed.append((entry, state))
        if entry.sequence == ENTRIES:
            break
    return broker, passed


def _following(broker: MemoryBroker, checkpoints: MemoryCheckpoints) -> Recovery:
    return Recovery(
        event_log=broker.client(ScaledClock(), name="starts").log,
        checkpoints=checkpoints,
        clock=ScaledClock(),
        board=HealthBoard(),
        part="fold",
        empty_state=lambda: SETTINGS.empty_state(POLICIES),
    )


async def _save(checkpoints: MemoryCheckpoints, broker: MemoryBroker, entry: LogEntry, state: State) -> None:
    form = _following(broker, checkpoints).form
    label = CheckpointLabel(identity=broker.extent.identity, as_of=entry.sequence, entry=entry_digest(entry), form=form)
    await checkpoints.save(label, encode_state(state))


@contextmanager
def _counted(reason: str) -> Iterator[Callable[[], float]]:
    """How many starts were counted with this reason since."""

    def value() -> float:
        return REGISTRY.get_sample_value(FOLDED_WHOLE, {"pool": "", "reason": reason}) or 0.0

    before = value()
    yield lambda: value() - before


async def test_a_start_waits_for_checkpoints_that_are_away_where_the_log_has_lost_its_beginning() -> None:
    broker, passed = await _a_log_that_begins_late()
    checkpoints = TroubledCheckpoints()
    await _save(checkpoints, broker, *passed[-1])
    broker.drop_before(4)
    checkpoints.away = 3

    beginning = await _following(broker, checkpoints).begin()

    assert InstanceId("engine-1") in beginning.state.fleet
    assert beginning.label is not None


async def test_a_start_from_the_whole_log_waits_for_no_checkpoint_where_the_log_is_short() -> None:
    broker, passed = await _a_log_that_begins_late()
    checkpoints = TroubledCheckpoints()
    await _save(checkpoints, broker, *passed[-1])
    checkpoints.away = 1
    with capture_logs() as logged, _counted("unavailable") as counted:
        beginning = await _following(broker, checkpoints).begin()

    assert (beginning.label, beginning.extent.first) == (None, 1)
    assert counted() == 1
    assert [entry["reason"] for entry in logged if entry["event"] == "log_folded_whole"] == ["unavailable"]


async def test_a_start_from_the_whole_log_waits_for_checkpoints_that_are_away_where_the_log_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "SHORT_LOG_ENTRIES", ENTRIES - 1)
    broker, passed = await _a_log_that_begins_late()
    checkpoints = TroubledCheckpoints()
    await _save(checkpoints, broker, *passed[-1])
    checkpoints.away = 3
    with _counted("unavailable") as counted:
        beginning = await _following(broker, checkpoints).begin()

    assert beginning.label is not None
    assert beginning.label.as_of == ENTRIES
    assert counted() == 0


async def test_a_start_takes_the_checkpoint_that_replaced_the_one_it_wanted() -> None:
    broker, passed = await _a_log_that_begins_late()
    checkpoints = TroubledCheckpoints()
    await _save(checkpoints, broker, *passed[3])
    broker.drop_before(4)
    replaced, newer = dict(checkpoints._kept), TroubledCheckpoints()
    await _save(newer, broker, *passed[5])

    def replace() -> None:
        for label in replaced:
            del checkpoints._kept[label]
        checkpoints._kept.update(newer._kept)

    checkpoints.meanwhile = replace
    beginning = await _following(broker, checkpoints).begin()

    assert beginning.label is not None
    assert beginning.label.as_of == ENTRIES


async def test_a_start_gives_up_on_checkpoints_that_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "CHECKPOINT_WAIT_WALL_SECONDS", 0.2)
    broker, _ = await _a_log_that_begins_late()
    broker.drop_before(4)

    async with asyncio.timeout(5.0):
        with _counted("unavailable") as counted:
            beginning = await _following(broker, TroubledCheckpoints(away=10_000)).begin()

    assert beginning.label is None
    assert beginning.state.sequence == 0
    assert counted() == 1


async def test_a_log_that_loses_its_beginning_before_it_is_read_is_begun_again_with_a_checkpoint() -> None:
    broker, passed = await _a_log_that_begins_late()
    checkpoints = TroubledCheckpoints()
    await _save(checkpoints, broker, *passed[-1])
    checkpoints.away = 1
    follower = _following(broker, checkpoints)
    beginning = await follower.begin()
    broker.drop_before(4)
    with pytest.raises(LogBrokenError):
        await anext(follower.entries(beginning))

    assert InstanceId("engine-1") in (await follower.begin()).state.fleet


async def test_checkpoints_of_another_fold_are_not_used_and_that_is_said_with_the_reason() -> None:
    broker, passed = await _a_log_that_begins_late()
    checkpoints, ours = MemoryCheckpoints(lambda: True), _following(broker, MemoryCheckpoints(lambda: True)).form
    entry, state = passed[-2]
    other = {
        "another fold version": f"5.{ours.partition('.')[2]}",
        "other policies or settings": f"{FOLD_VERSION}.{'0' * 32}",
        "an earlier release": "0" * 32,
    }
    for reason, form in other.items():
        label = CheckpointLabel(
            identity=broker.extent.identity, as_of=entry.sequence, entry=entry_digest(entry), form=form
        )
        checkpoints = MemoryCheckpoints(lambda: True)
        await checkpoints.save(label, encode_state(state))
        with _counted(reason) as counted:
            beginning = await _following(broker, checkpoints).begin()

        assert beginning.label is None
        assert beginning.state.sequence == 0
        assert counted() == 1


async def test_a_checkpoint_of_what_the_log_has_lost_and_written_anew_is_used_no_further() -> None:
    broker, passed = await _a_log_that_begins_late()
    checkpoints, (entry, state) = MemoryCheckpoints(lambda: True), passed[-2]
    lost = LogEntry.read(entry.sequence, entry.subject, entry.payload + b" ")
    await _save(checkpoints, broker, lost, state)
    follower = _following(broker, checkpoints)
    beginning = await follower.begin()
    with pytest.raises(LogBrokenError):
        await anext(follower.entries(beginning))

    assert beginning.label is not None
    assert (await follower.begin()).label is None
