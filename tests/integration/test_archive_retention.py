"""Retention of the archive, in SQLite and in a real PostgreSQL."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from random import randbytes
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from click.testing import CliRunner
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import encode
from pointsman.contracts.subjects import subject_of
from pointsman.primitives import PoolName, Sequence, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_cli.history.archive import ArchiveHistory
from pointsman_cli.main import main
from pointsman_lab.background import background
from pointsman_lab.memory.log import MemoryBroker
from pointsman_recorder import archive as archive_module
from pointsman_recorder import pruning as pruning_module
from pointsman_recorder.archive import Archive, Batch, Row
from pointsman_recorder.retention import BATCH_ROWS, DAY_SECONDS, NEWEST_ROWS, Retention, RetentionLimits
from pointsman_recorder.service import Recorder
from tests.support.archives import archive_at, ask
from tests.support.events import joined, stored
from tests.support.postgres import way_to
from tests.support.settable_clock import SettableClock
from tests.support.waiting import eventually

POOL = PoolName("default")


def row(log: str, sequence: Sequence, at: float, blocks: int = 3) -> Row:
    event = stored("engine-1", sequence, list(range(blocks)))
    return {"log": log, "sequence": sequence, "at": at, "type": type(event).__name__, "subject": subject_of(POOL, event),
            "instance": "engine-1", "request": None, "payload": encode(event).decode()}  # fmt: skip


def dead(log: str, sequence: Sequence) -> Row:
    return {
        "log": log,
        "sequence": sequence,
        "subject": "pm.default.scale",
        "payload": b"\xff",
        "problem": "it is wrong",
    }


async def fill(archive: Archive, log: str, rows: list[Row], dead_rows: list[Row] | None = None) -> None:
    stream, _, branch = log.partition("#")
    named = {"log": log, "identity": stream, "branch": int(branch or 1)}
    for start in range(0, len(rows), 500):
        await archive.store(Batch(logs=[named], events=rows[start : start + 500]))
    await archive.store(Batch(logs=[named], dead_letters=dead_rows or []))


async def fill_until_now(archive: Archive, log: str, first: Sequence = 1) -> None:
    now = ScaledClock().now()
    await fill(archive, log, [row(log, first + n, now) for n in range(NEWEST_ROWS)])


def retention(archive: Archive, *, clock: ScaledClock | None = None, **bounds: Any) -> Retention:
    clock = clock or ScaledClock()
    log = MemoryBroker(POOL).client(clock, name="test").log
    return Retention(archive, log, clock, HealthBoard(pool=POOL), RetentionLimits(**bounds))


async def test_what_is_older_than_the_bound_goes_and_nothing_else_not_even_the_dead_letters_between(url: str) -> None:
    now = ScaledClock().now()
    days = [now - DAY_SECONDS * (10 - 0.002 * number) for number in range(5000)]
    async with archive_at(url) as archive:
        await fill(archive, "2026-01-01", [row("2026-01-01", 1 + n, at) for n, at in enumerate(days) if n % 100],
                   [dead("2026-01-01", 1 + n) for n in range(0, 5000, 100)])  # fmt: skip
        before = set(await ask(archive, "SELECT sequence FROM events UNION SELECT sequence FROM dead_letters"))

        await retention(archive, age=5 * DAY_SECONDS).look()

        after = set(await ask(archive, "SELECT sequence FROM events UNION SELECT sequence FROM dead_letters"))
    first = min(sequence for (sequence,) in after)
    assert before - after == {(sequence,) for sequence in range(1, first)}
    young = next(n + 1 for n, at in enumerate(days) if at > now - 5 * DAY_SECONDS)
    assert abs(first - young) <= BATCH_ROWS // 2 + BATCH_ROWS // 100 + 1


async def test_the_oldest_log_goes_first_with_its_gaps_and_the_newest_entry_stays_for_recording_to_go_on(
    url: str,
) -> None:
    async with archive_at(url) as archive:
        for log in ("2026-01-01", "2026-01-01#2", "2026-02-01"):
            await fill(archive, log, [row(log, sequence, 1000.0) for sequence in range(1, 31)], [dead(log, 31)])
        gap = {"log": "2026-01-01#2", "sequence": 1, "after_log": "2026-01-01", "after_sequence": 30, "reason": "x"}
        await archive.store(Batch(gaps=[gap]))

        await retention(archive, bytes=1).look()

        assert await ask(archive, "SELECT log FROM logs") == [("2026-02-01",)]
        assert await ask(archive, "SELECT * FROM gaps") == []
        assert await ask(archive, "SELECT * FROM events") == []
        assert await ask(archive, "SELECT log, sequence FROM dead_letters") == [("2026-02-01", 31)]
        branch = await archive.latest_branch("2026-02-01")
        assert branch is not None
        assert (branch.last, branch.tail) == (31, b"\xff")


async def test_the_log_that_is_recorded_stays_and_is_read_though_another_stream_is_younger(tmp_path: Path) -> None:
    """The store of nats-server was lost, and restored from its backup later."""
    file, board = tmp_path / "archive.sqlite", HealthBoard(pool=POOL)
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    identity = (await log.extent()).identity
    for number in range(1, 31):
        await log.append(joined(f"engine-{number}", at=3000.0 + number))
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
        await fill(archive, "zz-between", [row("zz-between", n, 2000.0) for n in range(1, 31)])
        bounded = Retention(archive, log, ScaledClock(), board, RetentionLimits(bytes=1))
        recorder = Recorder(log, archive, ScaledClock(), board, batch_events=50, batch_seconds=WallSeconds(0.01))
        async with background(recorder.collect(), recorder.archive()):
            await eventually(lambda: recorder.archived_sequence == 30)
        assert ArchiveHistory(f"sqlite:///{file}").header.identity == identity

        await bounded.look()

        assert await ask(archive, "SELECT log FROM logs") == [(identity,)]
        assert await ask(archive, "SELECT log, sequence FROM events") == [(identity, 30)]


async def test_nothing_goes_before_it_is_known_which_log_is_recorded(url: str) -> None:
    async with archive_at(url) as archive:
        await fill(archive, "a", [row("a", n, 1000.0) for n in range(1, 31)])
        archive.followed = ""

        await retention(archive, bytes=1).look()

        assert await ask(archive, "SELECT count(*) FROM events") == [(30,)]


async def test_a_few_entries_with_a_time_far_ahead_hold_nothing_back(url: str) -> None:
    now = ScaledClock().now()
    async with archive_at(url) as archive:
        ahead = [row("a", n, now + 9 * DAY_SECONDS if n % 7 == 0 else 1000.0) for n in range(1, 3001)]
        await fill(archive, "a", ahead)
        await fill_until_now(archive, "a", 3001)

        await retention(archive, age=DAY_SECONDS).look()

        assert await ask(archive, "SELECT min(sequence), count(*) FROM events") == [(3001, NEWEST_ROWS)]


async def test_a_recorder_whose_date_is_wrong_deletes_nothing_that_is_young_by_the_log(url: str) -> None:
    now, clock = ScaledClock().now(), SettableClock()
    young = [row("a", n, now - 3 * DAY_SECONDS * (1 - n / 3000)) for n in range(1, 3001)]
    young[-2]["at"] = now + 90 * DAY_SECONDS  # one event of a worker whose date is wrong, too
    async with archive_at(url) as archive:
        await fill(archive, "a", young)
        kept = retention(archive, clock=clock, age=2 * DAY_SECONDS)
        clock.set_by = 30 * DAY_SECONDS
        await kept.look()
        after = (await ask(archive, "SELECT count(*) FROM events"))[0][0]
        clock.set_by = 0.0
        await kept.look()

        assert await ask(archive, "SELECT count(*) FROM events") == [(after,)]
    assert 2000 - BATCH_ROWS // 2 <= after <= 2000 + BATCH_ROWS


async def test_entries_grow_old_though_no_others_come(url: str) -> None:
    now, clock = ScaledClock().now(), SettableClock()
    async with archive_at(url) as archive:
        await fill(archive, "a", [row("a", n, now - 5 * DAY_SECONDS) for n in range(1, 201)])
        kept = retention(archive, clock=clock, age=2 * DAY_SECONDS)
        await kept.look()
        before = (await ask(archive, "SELECT count(*) FROM events"))[0][0]
        clock.waited = WallSeconds(2.1 * DAY_SECONDS)
        await kept.look()

        assert (before, await ask(archive, "SELECT sequence FROM events")) == (200, [(200,)])


async def test_the_archive_stays_below_its_bound_in_bytes_and_keeps_what_fits(url: str) -> None:
    async with archive_at(url) as archive:
        await fill(archive, "a", [row("a", n, ScaledClock().now(), blocks=40) for n in range(1, 12_001)])
        kept = retention(archive)
        whole = (await kept._pruning.size()).used
        bound = whole // 2

        await retention(archive, bytes=bound).look()

        used = (await kept._pruning.size()).used
        (entries,) = (await ask(archive, "SELECT count(*) FROM events"))[0]
        assert used <= bound
        assert 0.35 * 12_000 < entries < 0.6 * 12_000


async def test_without_bounds_nothing_goes(url: str) -> None:
    async with archive_at(url) as archive:
        await fill(archive, "a", [row("a", n, 1.0) for n in range(1, 101)])

        await retention(archive).look()

        assert await ask(archive, "SELECT count(*) FROM events") == [(100,)]


async def test_the_estimate_of_a_servers_bytes_is_near_what_full_tables_take(postgres: str) -> None:
    """Rows of two lengths: the estimate must follow the payloads, not only count."""
    for blocks in (3, 60):
        async with archive_at(postgres) as archive:
            await fill(archive, "a", [row("a", n, float(n), blocks) for n in range(1, 8001)])
            size = await retention(archive)._pruning.size()
            (total,) = (await ask(archive, "SELECT pg_total_relation_size('events')"))[0]
            assert 0.7 * total < size.used <= total * 1.05


async def test_only_as_much_goes_as_the_bound_asks_though_the_log_dropped_millions_of_entries_in_between(
    url: str,
) -> None:
    after_hole = 3_000_000
    gap = {"log": "a", "sequence": after_hole, "after_log": "a", "after_sequence": 12_000, "reason": "dropped"}
    async with archive_at(url) as archive:
        await fill(archive, "a", [row("a", n, 1000.0, blocks=40) for n in range(1, 12_001)])
        await archive.store(Batch(gaps=[gap]))
        await fill(archive, "a", [row("a", n, 2000.0, blocks=40) for n in range(after_hole, after_hole + 1000)])
        bound = (await retention(archive)._pruning.size()).used * 8 // 10

        await retention(archive, bytes=bound).look()

        (entries,) = (await ask(archive, "SELECT count(*) FROM events"))[0]
        assert 0.65 * 13_000 < entries < 0.9 * 13_000


async def test_rows_that_somebody_deleted_by_hand_are_not_counted_in_a_servers_bytes(postgres: str) -> None:
    async with archive_at(postgres) as archive:
        await fill(archive, "a", [row("a", n, 1000.0) for n in range(1, 8001)])
        before = (await retention(archive)._pruning.size()).used
        async with archive.engine.begin() as connection:
            await connection.execute(sa.text("DELETE FROM events WHERE sequence % 4 > 0"))

        assert 0.2 * before < (await retention(archive)._pruning.size()).used < 0.35 * before


async def test_dead_letters_count_in_a_servers_bytes(postgres: str) -> None:
    async with archive_at(postgres) as archive:
        await fill(archive, "a", [row("a", n, 1000.0) for n in range(1, 2001)])
        events_alone = (await retention(archive)._pruning.size()).used
        letters = [dead("a", 2000 + n) | {"payload": randbytes(50_000)} for n in range(1, 401)]
        await fill(archive, "a", [], letters)

        size = await retention(archive)._pruning.size()
        assert size.used - events_alone > 400 * 50_000
        async with archive.engine.begin() as connection:
            await connection.execute(sa.text("DELETE FROM events WHERE sequence < 2000"))

        assert 400 * 50_000 < (await retention(archive)._pruning.size()).used < 0.99 * size.used


async def test_a_new_sqlite_file_shrinks_and_an_old_one_uses_its_space_again(tmp_path: Path) -> None:
    shrinks, old = tmp_path / "new.sqlite", tmp_path / "old.sqlite"
    with closing(sqlite3.connect(old)) as made:
        made.execute(
            "CREATE TABLE logs (log VARCHAR(96) PRIMARY KEY, identity VARCHAR(80) NOT NULL, branch INTEGER NOT NULL)"
        )
    sizes = {}
    for file in (shrinks, old):
        async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
            await fill(archive, "a", [row("a", n, 1000.0, blocks=40) for n in range(1, 8001)])
            before = (await retention(archive)._pruning.size()).disk
            await retention(archive, bytes=1).look()
            await fill(archive, "b", [row("b", n, 1000.0, blocks=40) for n in range(1, 4001)])
            size = await retention(archive)._pruning.size()
            sizes[file] = (before, size.disk, size.used)
    assert sizes[shrinks][1] < 0.8 * sizes[shrinks][0]
    assert sizes[old][1] < 1.2 * sizes[old][0]
    for file in sizes:
        wal = file.with_name(file.name + "-wal")
        assert not wal.exists() or wal.stat().st_size <= 64 * 1024**2


class RestsCounted(ScaledClock):
    rests: int = 0

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        self.rests += 1
        await super().sleep_wall(seconds)


async def half_empty(archive: Archive) -> None:
    await fill(archive, "a", [row("a", n, 1000.0, blocks=40) for n in range(1, 12_001)])
    async with archive.engine.begin() as connection:
        await connection.execute(sa.text("DELETE FROM events WHERE sequence < 9000"))


async def test_sqlite_pages_are_given_back_in_parts_with_a_rest_after_each(tmp_path: Path) -> None:
    clock, log = RestsCounted(), MemoryBroker(POOL).client(ScaledClock(), name="test").log
    async with archive_at(f"sqlite+aiosqlite:///{tmp_path}/archive.sqlite") as archive:
        await half_empty(archive)
        pages = (await ask(archive, "PRAGMA page_count"))[0][0]

        await Retention(archive, log, clock, HealthBoard(pool=POOL), RetentionLimits()).look()

        freed = pages - (await ask(archive, "PRAGMA page_count"))[0][0]
    assert freed > 1000
    assert clock.rests >= 2


async def test_a_locked_sqlite_file_delays_giving_pages_back_and_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "archive.sqlite"
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
        await half_empty(archive)
        await ask(archive, "PRAGMA busy_timeout=50")  # of the only connection, which the pool keeps
        with closing(sqlite3.connect(file)) as other, structlog.testing.capture_logs() as logs:
            other.execute("BEGIN IMMEDIATE")
            async with background(retention(archive).run()) as (running,):
                await eventually(lambda: any("database is locked" in entry.get("reason", "") for entry in logs))
                assert not running.done()


async def test_a_reader_that_keeps_retention_from_removing_anything_is_told_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (archive_module, pruning_module):
        monkeypatch.setattr(module, "WAL_BYTES_KEPT", 10_000_000)  # more than one step of retention writes
    file, board = tmp_path / "archive.sqlite", HealthBoard(pool=POOL)
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
        bounded = Retention(archive, log, ScaledClock(), board, RetentionLimits(bytes=1))
        await fill(archive, "a", [row("a", 1, 1000.0)])
        with closing(sqlite3.connect(file)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,)
            await fill(archive, "a", [row("a", n, 1000.0, blocks=600) for n in range(2, 1501)])
            await bounded.look()
            assert await ask(archive, "SELECT count(*) FROM events") == [(1500,)]
            assert "a reader holds the write-ahead log back" in board.degraded_parts["archive retention"]
        for number in (1501, 1502):  # the first moves all into the file, the second begins anew
            await fill(archive, "a", [row("a", number, 1000.0)])
        await bounded.look()

        assert await ask(archive, "SELECT sequence FROM events") == [(1502,)]
        assert board.whole


async def test_retention_that_the_database_refuses_is_told(postgres: str) -> None:
    board = HealthBoard(pool=POOL)
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    async with archive_at(postgres) as archive:
        await fill(archive, "a", [row("a", n, 1000.0) for n in range(1, 31)])
        async with archive.engine.begin() as connection:
            await connection.execute(sa.text("CREATE RULE keep AS ON DELETE TO events DO INSTEAD SELECT 1 / 0"))
        async with background(Retention(archive, log, ScaledClock(), board, RetentionLimits(bytes=1)).run()):
            await eventually(lambda: "division by zero" in board.degraded_parts.get("archive retention", ""))


async def test_retention_does_not_wait_without_end_for_a_server_that_vanished(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with way_to(postgres) as (url, reachable), archive_at(url) as archive:
        await retention(archive).look()
        reachable.clear()
        with monkeypatch.context() as impatient:
            impatient.setattr(archive_module, "STEP_SECONDS_MAX", 0.3)
            with pytest.raises(TimeoutError, match=r"did not answer within 0\.3 s"):
                await asyncio.wait_for(retention(archive).look(), 20)
        reachable.set()
        await retention(archive).look()


async def test_recording_goes_on_while_a_backlog_is_pruned(url: str) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    async with archive_at(url) as archive:
        await fill(archive, "2000-01-01", [row("2000-01-01", n, 1000.0) for n in range(1, 20_001)])
        await fill_until_now(archive, "2000-01-02")
        recorder = Recorder(
            log, archive, ScaledClock(), HealthBoard(), batch_events=50, batch_seconds=WallSeconds(0.01)
        )
        bounded = retention(archive, age=DAY_SECONDS)
        async with background(recorder.collect(), recorder.archive()) as tasks:
            recorded_during = 0
            for number in range(1, 10_000):
                await log.append(joined(f"engine-{number}", at=ScaledClock().now()))
                if number == 1:  # nothing is removed before it is known which log is recorded
                    await eventually(lambda: recorder.archived_sequence)
                    tasks.append(asyncio.create_task(bounded.look()))
                await asyncio.sleep(0.005)
                if tasks[2].done():
                    break
                recorded_during = recorder.archived_sequence
            await asyncio.wait_for(tasks[2], 60)
            await eventually(lambda: recorder.archived_sequence == number)

        assert recorded_during > 10
        assert await ask(archive, "SELECT log, count(*) FROM events GROUP BY log ORDER BY log") == [
            ("2000-01-02", NEWEST_ROWS),
            ("memory-1", number),
        ]


async def test_an_archive_that_begins_behind_the_log_is_reported(url: str) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for number in range(1, 41):
        await log.append(joined(f"engine-{number}", at=1000.0 if number < 30 else ScaledClock().now()))
    board = HealthBoard(pool=POOL)
    async with archive_at(url) as archive:
        identity = (await log.extent()).identity
        await fill(archive, identity, [row(identity, n, ScaledClock().now()) for n in range(1, 41)])
        await Retention(archive, log, ScaledClock(), board, RetentionLimits()).look()
        assert board.whole

        async with archive.engine.begin() as connection:
            await connection.execute(sa.text("DELETE FROM events WHERE sequence < 30"))
        await Retention(archive, log, ScaledClock(), board, RetentionLimits()).look()

        assert "begins at entry 30, the log itself at 1" in board.degraded_parts["archive retention"]
        assert board.ready


def test_readers_of_a_pruned_archive_are_told_where_it_begins_and_why(tmp_path: Path) -> None:
    file = tmp_path / "archive.sqlite"

    async def make() -> None:
        async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
            now = ScaledClock().now()
            await fill(archive, "a", [row("a", n, 1000.0 if n <= 1000 else now) for n in range(1, 2001)])
            await retention(archive, age=DAY_SECONDS).look()

    asyncio.run(make())
    for command in (["state"], ["doctor"], ["replay", "--verify"]):
        told = CliRunner().invoke(main, [*command, "--from", str(file)])
        assert "the archive begins at entry 1,001" in " ".join(told.output.split()), told.output
        assert "its retention removed what came before" in " ".join(told.output.split())
    unknown = CliRunner().invoke(main, ["explain", "r-500", "--from", str(file)])
    assert "no request r-500 in this log; the archive begins at entry 1,001" in " ".join(unknown.output.split())
    refused = CliRunner().invoke(main, ["state", "--until", "500", "--from", str(file)])
    assert refused.exit_code == 2
    assert "the archive begins at entry 1,001" in " ".join(refused.output.split())


def test_readers_are_told_of_holes_with_what_the_recorder_said_and_of_other_logs(tmp_path: Path) -> None:
    file = tmp_path / "archive.sqlite"
    gap = {"log": "b", "sequence": 51, "after_log": "b", "after_sequence": 30, "reason": "the log dropped them"}

    async def make() -> None:
        async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
            await fill(archive, "a", [row("a", 1, 1000.0)])
            await fill(archive, "b", [row("b", n, 2000.0 + n) for n in range(1, 81) if not 30 < n < 51])
            await archive.store(Batch(gaps=[gap]))

    asyncio.run(make())
    for command in (["usage"], ["hit-rate"], ["replay"], ["doctor"], ["state"]):
        told = " ".join(CliRunner().invoke(main, [*command, "--from", str(file)]).output.split())
        assert "entries 31 to 50 are missing: the log dropped them" in told, told
        assert "the archive has 1 other log, the one before is a" in told
        assert "what was known before" not in told
        assert "damaged" not in told
    assert "The recorder found them gone" in CliRunner().invoke(main, ["doctor", "--from", str(file)]).output
