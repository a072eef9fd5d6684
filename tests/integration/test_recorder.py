"""The recorder over a real nats-server and a real SQLite file or PostgreSQL server: everything once, whatever happens in
between."""

import asyncio
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa
import structlog
from msgspec.structs import replace
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import greenlet_spawn

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.requests import RequestArrived
from pointsman.ports import EventLog
from pointsman.primitives import InstanceId, PoolName, RequestId, Term, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_cli.history.archive import ArchiveHistory
from pointsman_lab.background import background
from pointsman_lab.memory.log import MemoryBroker
from pointsman_recorder import archive as archive_module
from pointsman_recorder import service as service_module
from pointsman_recorder.archive import Archive, Batch, Branch, open_archive
from pointsman_recorder.database_errors import UnusableDatabaseError
from pointsman_recorder.service import Recorder
from tests.support.archives import archive_at, ask
from tests.support.events import arrived, finished, first_token, joined, placed, stored
from tests.support.nats import running_nats
from tests.support.poison import bad_utf8, deep
from tests.support.postgres import way_to
from tests.support.waiting import eventually

POOL = PoolName("default")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made" / "archive.sqlite"


@asynccontextmanager
async def recording(log: EventLog, file: Path, board: HealthBoard | None = None) -> AsyncIterator[Recorder]:
    """A recorder for the length of the context, which ends as a crash would: with nothing flushed."""
    async with (
        open_archive(f"sqlite+aiosqlite:///{file}") as archive,
        recording_into(archive, log, board or HealthBoard()) as recorder,
    ):
        yield recorder


@asynccontextmanager
async def recording_into(archive: Archive, log: EventLog, board: HealthBoard) -> AsyncIterator[Recorder]:
    recorder = Recorder(log, archive, ScaledClock(), board, batch_events=50, batch_seconds=WallSeconds(0.02))
    async with background(recorder.collect(), recorder.archive()):
        yield recorder


def rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    if not file.exists():
        return []
    with closing(sqlite3.connect(file)) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:  # the tables are not there yet
            return []


def put_a_directory_where_the_file_should_be(file: Path) -> None:
    file.mkdir(parents=True)


def remove_directory(file: Path) -> None:
    file.rmdir()


def move(file: Path, to: Path | None = None) -> Path:
    return file.rename(to or file.with_name("moved"))


async def run(archive: Archive, statement: str) -> None:
    async with archive.engine.begin() as connection:
        await connection.execute(sa.text(statement))


async def until(file: Path, query: str, expected: object) -> None:
    await eventually(lambda: rows(file, query) == expected)


async def test_every_entry_is_archived_once_across_crashes(tmp_path: Path, file: Path) -> None:
    async with running_nats(tmp_path) as url, jetstream.connect(url, POOL, ScaledClock(), name="test") as link:
        for number in range(1, 101):
            link.log.append_soon(stored("engine-1", number, [number]))
        async with recording(link.log, file):
            await until(file, "SELECT count(*) > 0 FROM events", [(1,)])
        for number in range(101, 201):
            link.log.append_soon(stored("engine-1", number, [number]))
        async with recording(link.log, file):
            await until(file, "SELECT count(*), count(DISTINCT sequence), max(sequence) FROM events", [(200, 200, 200)])

    assert rows(file, "SELECT type, instance, request FROM events WHERE sequence = 7") == [
        ("BlocksStored", "engine-1", None)
    ]
    assert rows(file, "SELECT count(*) FROM gaps") == [(0,)]


async def test_what_was_read_is_flushed_at_the_end(file: Path) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    async with open_archive(f"sqlite+aiosqlite:///{file}") as archive:
        recorder = Recorder(
            log, archive, ScaledClock(), HealthBoard(), batch_events=1000, batch_seconds=WallSeconds(0.3)
        )
        tasks = [asyncio.create_task(recorder.collect()), asyncio.create_task(recorder.archive())]
        await until(file, "SELECT count(*) FROM logs", [(1,)])
        await log.append(joined("engine-1"))
        await eventually(lambda: recorder._queued_bytes or recorder.archived_sequence)
        await recorder.finish()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert rows(file, "SELECT type FROM events") == [("InstanceJoined",)]


async def test_requests_shows_one_row_for_each_request(file: Path) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    request, instance = RequestId("r1"), InstanceId("engine-2")
    await log.append(_arrived(request, prompt_tokens=640))
    await log.append(placed("r1", "engine-2", at=10.5, predicted_ttft=0.45, policy="dualmap"))
    await log.append(RequestGranted(at=10.6, request=request, instance=instance))
    await log.append(first_token("r1", "engine-2", at=11.0))
    await log.append(replace(finished("r1", "engine-2", at=12.0), ttft=11.0, prompt_tokens=640))
    await log.append(joined("engine-2"))

    async with recording(log, file):
        await until(file, "SELECT count(*) FROM events", [(6,)])

    columns = "request, tenant, arrived_at, prompt_tokens, policy, predicted_ttft, instance, ttft, end_type, ended_at"
    assert rows(file, f"SELECT {columns}, placements, ends FROM requests") == [
        ("r1", "acme", 10.25, 640, "dualmap", 0.45, "engine-2", 11.0, "RequestFinished", 12.0, 1, 1)
    ]


def _arrived(request: str, *, prompt_tokens: int) -> RequestArrived:
    return arrived(request, at=10.5, tenant="acme", arrived_at=10.25, prompt_tokens=prompt_tokens)


async def test_requests_shows_what_was_measured_and_not_what_a_leader_assumed(url: str) -> None:
    """Of an answer that is not streamed a leader assumes when its first token came, and its ingress may guess how long its
    prompt is; -1 is no number of tokens."""
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    stamp = Stamp(term=Term(1), number=1, as_of=0)
    told: list[LogEvent] = [
        replace(first_token("r1", "engine-2", at=11.0), stamp=stamp),
        _arrived("r1", prompt_tokens=640),
        replace(finished("r1", "engine-2", at=10.0), prompt_tokens=700, cached_tokens=-1),
        _arrived("r2", prompt_tokens=320),
        first_token("r2", "engine-2", at=5.0),
    ]

    async with archive_at(url) as archive:
        async with recording_into(archive, log, HealthBoard()) as recorder:
            for event in told:
                await log.append(event)
            await eventually(lambda: recorder.archived_sequence == len(told))

        columns = "request, first_token_at, ttft, prompt_tokens, cached_tokens"
        assert await ask(archive, f"SELECT {columns} FROM requests ORDER BY request") == [
            ("r1", None, 10.0, 700, None),
            ("r2", 5.0, 5.0, 320, None),
        ]


async def test_what_does_not_decode_is_kept_as_a_dead_letter(file: Path) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    broker.store_raw("pm.default.scale", b"\xff nonsense")
    await log.append(joined("engine-1"))

    async with recording(log, file):
        await until(file, "SELECT sequence FROM events", [(2,)])

    assert rows(file, "SELECT sequence, subject, payload FROM dead_letters") == [
        (1, "pm.default.scale", b"\xff nonsense")
    ]


async def test_any_bytes_on_any_subject_are_kept_with_their_place_and_stop_no_recorder(file: Path) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    good = encode(finished("r-1", "engine-1", at=1.0))
    on_good = "pm.default.request.r-1"
    poison = [
        (on_good, deep(good)), (on_good, bad_utf8(good)), (on_good, good[:-1] + b',"x":"\\u0000"}'), (on_good, b"\x00"),
        ("pm.default.request." + "x" * 300, good), ("pm.default.fleet.\x00\x1b", good), (on_good, b"["),
    ]  # fmt: skip
    for subject, payload in poison:
        broker.store_raw(subject, payload)
    broker.store_raw(on_good, good)

    async with recording(log, file):
        await until(file, "SELECT sequence FROM events", [(8,)])
    await log.append(joined("engine-1"))
    async with recording(log, file):
        await until(file, "SELECT sequence FROM events", [(8,), (9,)])

    kept = rows(file, "SELECT sequence, payload FROM dead_letters ORDER BY sequence")
    assert kept == [(sequence, payload) for sequence, (_, payload) in enumerate(poison, start=1)]
    assert rows(file, "SELECT max(length(subject)), max(length(problem)) <= 200 FROM dead_letters") == [(255, 1)]
    assert rows(file, "SELECT request, end_type, ends FROM requests") == [("r-1", "RequestFinished", 1)]
    assert rows(file, "SELECT * FROM gaps") == []


@pytest.mark.parametrize(
    ("escaped", "is_dead"),
    [
        (rb"\u0000", True),
        (rb"\\u0000", False),
        (rb"\\\u0000", True),
        (rb"\\u0000\n\u0000", True),
        (rb"\n\\u0000", False),
    ],
)
async def test_only_a_nul_makes_a_dead_letter_and_not_the_letters_that_write_one(
    url: str, escaped: bytes, *, is_dead: bool
) -> None:
    """A client may put such letters into its `x-request-id`."""
    broker = MemoryBroker(POOL)
    payload = encode(finished("r-1", "engine-1", at=1.0))
    assert ("\x00" in json.loads(b'"' + escaped + b'"')) is is_dead
    broker.store_raw("pm.default.request.r-1", payload[:-1] + b',"x":"' + escaped + b'"}')
    async with archive_at(url) as archive:
        log = broker.client(ScaledClock(), name="test").log
        async with recording_into(archive, log, HealthBoard()) as recorder:
            await eventually(lambda: recorder.archived_sequence == 1)

        assert await ask(archive, "SELECT sequence FROM dead_letters") == [(1,)] * is_dead
        assert await ask(archive, "SELECT request, end_type FROM requests") == [("r-1", "RequestFinished")] * (
            not is_dead
        )


async def test_entries_missed_leave_a_gap_and_a_log_that_went_back_another_history(file: Path) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    for number in range(1, 6):
        await log.append(joined(f"engine-{number}"))
    async with recording(log, file):
        await until(file, "SELECT count(*) FROM events", [(5,)])
    for number in range(6, 11):
        await log.append(joined(f"engine-{number}"))
    broker.drop_before(9)
    with structlog.testing.capture_logs() as logs:
        async with recording(log, file):
            await until(file, "SELECT count(*) FROM events", [(7,)])
            broker.lose_after(9)
            await log.append(joined("engine-11"))
            await until(
                file, "SELECT log, sequence FROM events WHERE log LIKE '%#2'", [("memory-1#2", 9), ("memory-1#2", 10)]
            )
            broker.recreate()
            await log.append(joined("engine-12"))
            await until(file, "SELECT sequence FROM events WHERE log = 'memory-2'", [(1,)])

    assert rows(file, "SELECT log, sequence, after_log, after_sequence FROM gaps ORDER BY log, sequence") == [
        ("memory-1", 9, "memory-1", 5),
        ("memory-1#2", 9, "memory-1", 10),
        ("memory-2", 1, "memory-1#2", 10),
    ]
    assert [entry for entry in logs if entry["event"] == "archive_set_back"] == []


async def test_a_log_that_went_back_while_the_recorder_was_away_is_noticed(file: Path) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    await log.append(joined("engine-1"))
    await log.append(joined("engine-2"))
    async with recording(log, file):
        await until(file, "SELECT count(*) FROM events", [(2,)])
    broker.lose_after(1)
    for number in range(3, 6):
        await log.append(joined(f"engine-{number}"))

    async with recording(log, file):
        await until(file, "SELECT sequence FROM events WHERE log = 'memory-1#2'", [(1,), (2,), (3,), (4,)])

    assert rows(file, "SELECT instance FROM events WHERE log = 'memory-1'") == [("engine-1",), ("engine-2",)]


async def test_a_database_that_does_not_answer_delays_and_loses_nothing(file: Path) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    board = HealthBoard()
    put_a_directory_where_the_file_should_be(file)
    await log.append(joined("engine-1"))

    async with recording(log, file, board):
        await asyncio.sleep(0.3)
        assert not board.whole
        remove_directory(file)
        await until(file, "SELECT count(*) FROM events", [(1,)])

        assert board.whole


async def test_an_event_that_the_server_refuses_becomes_a_dead_letter_and_the_others_are_archived(
    postgres: str,
) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for name in ("a", "longer-than-the-column", "b"):
        await log.append(joined(name))
    async with archive_at(postgres) as archive:
        await run(archive, "ALTER TABLE events ALTER COLUMN instance TYPE varchar(8)")
        async with recording_into(archive, log, HealthBoard()) as recorder:
            await eventually(lambda: recorder.archived_sequence == 3)

        assert await ask(archive, "SELECT sequence, instance FROM events ORDER BY 1") == [(1, "a"), (3, "b")]
        ((sequence, payload, problem),) = await ask(archive, "SELECT sequence, payload, problem FROM dead_letters")
    assert (sequence, payload) == (2, encode(joined("longer-than-the-column")))
    assert "the database refused it" in problem
    assert "value too long" in problem


@pytest.mark.parametrize("tiny", [b"1e-400", b"1e-20000", b"0." + b"0" * 400 + b"1", b"1" + b"0" * 500 + b"e-500"])
async def test_a_number_that_sql_cannot_hold_is_missing_in_requests_and_all_others_are_there(
    postgres: str, tiny: bytes
) -> None:
    """Such an event is as good as any other to the codec."""
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    await log.append(first_token("r1", "engine-1", at=0.25))
    odd = encode(first_token("r2", "engine-1", at=0.25)).replace(b'"ttft":0.25', b'"ttft":' + tiny)
    broker.store_raw("pm.default.request.r2", odd)
    async with archive_at(postgres) as archive:
        async with recording_into(archive, log, HealthBoard()) as recorder:
            await eventually(lambda: recorder.archived_sequence == 2)

        assert await ask(archive, "SELECT sequence FROM dead_letters") == []
        assert await ask(archive, "SELECT request, ttft FROM requests ORDER BY 1") == [("r1", 0.25), ("r2", None)]


@pytest.mark.parametrize(
    "number", [b"0", b"-1", b"-0.5", b"1e30", b"1E+2", b"12.5e-7", b"2.5e-99", b"1790000000.123456"]
)
async def test_ordinary_numbers_are_in_requests_as_they_were_written(postgres: str, number: bytes) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    event = encode(first_token("r1", "engine-1", at=0.25)).replace(b'"ttft":0.25', b'"ttft":' + number)
    broker.store_raw("pm.default.request.r1", event)
    async with archive_at(postgres) as archive:
        async with recording_into(archive, log, HealthBoard()) as recorder:
            await eventually(lambda: recorder.archived_sequence == 1)

        assert await ask(archive, "SELECT ttft FROM requests") == [(float(number),)]


async def test_a_database_that_cannot_hold_every_character_is_refused_with_what_to_do(postgres: str) -> None:
    options = "ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    server = create_async_engine(postgres, isolation_level="AUTOCOMMIT")
    async with server.connect() as connection:
        await connection.execute(sa.text("DROP DATABASE IF EXISTS latin"))
        await connection.execute(sa.text(f"CREATE DATABASE latin {options}"))
    await server.dispose()
    board = HealthBoard()
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    async with (
        open_archive(postgres.rpartition("/")[0] + "/latin") as archive,
        recording_into(archive, log, board),
    ):
        await eventually(lambda: "encoding LATIN1" in board.lacks.get("archive", ""))

        assert "create one with ENCODING 'UTF8'" in board.lacks["archive"]
        assert await ask(archive, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []


async def test_a_server_that_takes_no_writes_is_left_for_the_one_to_which_its_address_leads_next(postgres: str) -> None:
    """As a connection to a replica does, one keeps what it began with."""
    log, board = MemoryBroker(POOL).client(ScaledClock(), name="test").log, HealthBoard()
    async with archive_at(postgres) as archive, recording_into(archive, log, board) as recorder:
        await log.append(joined("engine-1"))
        await eventually(lambda: recorder.archived_sequence == 1)
        try:
            await run(archive, "ALTER DATABASE postgres SET default_transaction_read_only = on")
            await archive.engine.dispose()
            await log.append(joined("engine-2"))
            await eventually(lambda: "read-only transaction" in board.missing_parts.get("archive", ""))
            assert "engine-2" not in board.missing_parts["archive"]
        finally:
            async with open_archive(postgres) as other, other.engine.begin() as connection:
                await connection.execute(sa.text("SET TRANSACTION READ WRITE"))
                await connection.execute(sa.text("ALTER DATABASE postgres RESET default_transaction_read_only"))
        await eventually(lambda: recorder.archived_sequence == 2)

        assert board.whole


async def test_a_server_that_vanishes_is_reported_and_loses_nothing(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    board = HealthBoard()
    async with way_to(postgres) as (url, reachable), archive_at(url) as archive:
        monkeypatch.setattr(archive_module, "STEP_SECONDS_MAX", 0.3)
        async with recording_into(archive, log, board) as recorder:
            await log.append(joined("engine-1"))
            await eventually(lambda: recorder.archived_sequence == 1)
            reachable.clear()
            await log.append(joined("engine-2"))
            await eventually(lambda: not board.whole)
            assert "the database did not answer within 0.3 s" in board.lacks["archive"]
            reachable.set()
            await eventually(lambda: recorder.archived_sequence == 2)
            assert board.whole

        assert await ask(archive, "SELECT instance FROM events ORDER BY sequence") == [("engine-1",), ("engine-2",)]


async def test_what_the_database_lost_though_it_had_confirmed_it_is_read_again_before_all_else(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that was behind took over, or a backup was restored. Many entries are read by the time that shows."""
    monkeypatch.setattr(service_module, "QUEUE_BYTES_MAX", 20_000)
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    async with archive_at(url) as archive:
        store, last = archive.store, 0

        async def in_order(batch: Batch, after: Branch | None) -> None:
            await store(batch, after)
            if batch.events:
                first = batch.events[0]["sequence"]
                assert await ask(archive, f"SELECT count(*) FROM events WHERE sequence < {first}") == [(first - 1,)]

        monkeypatch.setattr(archive, "store", in_order)
        async with recording_into(archive, log, HealthBoard()) as recorder:
            for kept in (30, 20, 99, 0):
                for number in range(last, last + 100):
                    last = await log.append(joined(f"engine-{number}"))
                await eventually(lambda last=last: recorder.archived_sequence == last)  # type: ignore[misc]
                await run(archive, f"DELETE FROM events WHERE sequence > {kept}")
                for number in range(last, last + 120):
                    last = await log.append(joined(f"engine-{number}"))
                await eventually(lambda last=last: recorder.archived_sequence == last)  # type: ignore[misc]

                kept_now = await ask(archive, "SELECT count(*), min(sequence), max(sequence) FROM events")
                assert kept_now == [(last, 1, last)]
        assert await ask(archive, "SELECT * FROM gaps") == []


async def test_what_the_database_lost_and_the_log_no_longer_has_is_told_as_a_gap(url: str) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    async with archive_at(url) as archive, recording_into(archive, log, HealthBoard()) as recorder:
        for number in range(1, 11):
            await log.append(joined(f"engine-{number}"))
        await eventually(lambda: recorder.archived_sequence == 10)
        broker.drop_before(9)
        await run(archive, "DELETE FROM events WHERE sequence > 6")
        await log.append(joined("engine-11"))
        await eventually(lambda: recorder.archived_sequence == 11)

        assert await ask(archive, "SELECT sequence FROM events WHERE sequence > 5 ORDER BY 1") == [
            (6,),
            (9,),
            (10,),
            (11,),
        ]
        assert await ask(archive, "SELECT log, sequence, after_log, after_sequence FROM gaps") == [
            ("memory-1", 9, "memory-1", 6)
        ]


async def test_a_log_of_which_the_database_lost_all_is_recorded_from_its_beginning(url: str) -> None:
    broker = MemoryBroker(POOL)
    log = broker.client(ScaledClock(), name="test").log
    async with archive_at(url) as archive, recording_into(archive, log, HealthBoard()) as recorder:
        await log.append(joined("engine-1"))
        await eventually(lambda: recorder.archived_sequence == 1)
        broker.recreate()
        await eventually(lambda: archive.followed == "memory-2")
        await run(archive, "DELETE FROM logs WHERE log = 'memory-2'")
        await log.append(joined("engine-2"))
        await log.append(joined("engine-3"))
        await eventually(lambda: recorder.archived_sequence == 2)

        assert await ask(archive, "SELECT log FROM logs ORDER BY 1") == [("memory-1",), ("memory-2",)]
        assert await ask(archive, "SELECT sequence, instance FROM events WHERE log = 'memory-2'") == [
            (1, "engine-2"),
            (2, "engine-3"),
        ]


@pytest.mark.parametrize("lost", ["events", "dead_letters", "events, dead_letters, logs, gaps"])
async def test_tables_that_were_dropped_are_made_again_and_what_they_held_is_read_again(url: str, lost: str) -> None:
    """As after a failover to a database that was made anew."""
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    async with archive_at(url) as archive, recording_into(archive, log, HealthBoard()) as recorder:
        for number in range(1, 11):
            await log.append(joined(f"engine-{number}"))
        await eventually(lambda: recorder.archived_sequence == 10)
        await run(archive, "DROP VIEW requests")
        for table in lost.split(", "):
            await run(archive, f"DROP TABLE {table}")
        await log.append(joined("engine-11"))
        await eventually(lambda: recorder.archived_sequence == 11)

        assert await ask(archive, "SELECT count(*), min(sequence), max(sequence) FROM events") == [(11, 1, 11)]
        assert await ask(archive, "SELECT log FROM logs") == [("memory-1",)]
        assert await ask(archive, "SELECT * FROM dead_letters, gaps, requests") == []


@asynccontextmanager
async def slow_inserts(file: Path, wait: Callable[[], object]) -> AsyncIterator[Archive]:
    """Of events. `wait`: by each, in the thread of the database."""
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
        sa.event.listen(
            archive.engine.sync_engine, "checkout", lambda connection, *_: connection.create_function("wait", 0, wait)
        )
        await run(archive, "CREATE TRIGGER slow AFTER INSERT ON events BEGIN SELECT wait(); END")
        yield archive


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_nothing_is_recorded_into_a_file_that_was_deleted_or_replaced(file: Path, *, is_replaced: bool) -> None:
    log, board = MemoryBroker(POOL).client(ScaledClock(), name="test").log, HealthBoard()
    async with archive_at(f"sqlite+aiosqlite:///{file.with_name('other')}"):
        pass
    async with recording(log, file, board) as recorder:
        await log.append(joined("engine-1"))
        await eventually(lambda: recorder.archived_sequence == 1)
        moved = move(file)
        if is_replaced:
            move(file.with_name("other"), file)
        await log.append(joined("engine-2"))
        await eventually(lambda: "was deleted or replaced" in board.missing_parts.get("archive", ""))
        move(moved, file)
        await eventually(lambda: recorder.archived_sequence == 2)

        assert board.whole
    assert rows(file, "SELECT instance FROM events ORDER BY sequence") == [("engine-1",), ("engine-2",)]


async def test_a_batch_that_takes_too_long_is_stored_in_parts_and_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for number in range(1, 101):
        await log.append(joined(f"engine-{number}"))
    async with slow_inserts(tmp_path / "archive.sqlite", lambda: time.sleep(0.02)) as archive:
        monkeypatch.setattr(archive_module, "STEP_SECONDS_MAX", 0.5)
        with structlog.testing.capture_logs() as logs:
            async with recording_into(archive, log, HealthBoard()) as recorder:
                await eventually(lambda: recorder.archived_sequence == 100)

        assert await ask(archive, "SELECT count(*) FROM events") == [(100,)]
    reasons = [entry["reason"] for entry in logs if entry["event"] == "archive_unavailable"]
    assert reasons
    assert all("the database did not answer within 0.5 s" in reason for reason in reasons)


async def test_a_statement_that_took_too_long_ends_no_later_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same connection, which the pool keeps."""
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:

        async def counted(rows: int) -> int:
            counting = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows}) SELECT count(*) FROM n"
            async with archive.reading() as connection:
                return int((await connection.execute(sa.text(counting))).scalar() or 0)

        with monkeypatch.context() as soon:
            soon.setattr(archive_module, "STEP_SECONDS_MAX", 0.05)
            with pytest.raises(TimeoutError):
                await counted(10**12)

        assert await counted(10_000) == 10_000


def is_locked(file: Path) -> bool:
    with closing(sqlite3.connect(file, timeout=0)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


async def test_the_end_of_the_recorder_ends_an_endless_statement(file: Path) -> None:
    """A trigger of somebody's had it killed after ten seconds."""
    async with open_archive(f"sqlite+aiosqlite:///{file}") as archive:
        await archive.prepare()
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
        await run(archive, f"CREATE TRIGGER endless AFTER INSERT ON logs BEGIN {endless}; END")
        row = {"log": "l", "identity": "l", "branch": 1}
        storing = asyncio.create_task(archive.store(Batch(logs=[row])))
        await eventually(lambda: is_locked(file))
        pool = archive.engine.sync_engine.pool

    with pytest.raises(OperationalError, match="interrupted"):
        await asyncio.wait_for(storing, 30)
    await greenlet_spawn(pool.dispose)


async def test_a_disk_that_hangs_is_reported_meanwhile_and_recorded_to_as_soon_as_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, board, answers = MemoryBroker(POOL).client(ScaledClock(), name="test").log, HealthBoard(), threading.Event()
    await log.append(joined("engine-1"))
    async with slow_inserts(tmp_path / "archive.sqlite", lambda: answers.wait(30)) as archive:
        for module in (archive_module, service_module):
            monkeypatch.setattr(module, "STEP_SECONDS_MAX", 0.3)
        with structlog.testing.capture_logs() as logs:
            async with recording_into(archive, log, board) as recorder:
                await eventually(lambda: "has not answered for 0.3 s" in board.missing_parts.get("archive", ""))
                answers.set()
                await eventually(lambda: recorder.archived_sequence == 1)

        assert board.whole
        assert not any("locked" in str(entry) for entry in logs)


async def test_a_reader_that_holds_the_write_ahead_log_back_is_told_of_and_fills_no_volume(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "WAL_BYTES_MAX", 100_000)
    log, board = MemoryBroker(POOL).client(ScaledClock(), name="test").log, HealthBoard()
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive, recording_into(archive, log, board) as recorder:
        await log.append(joined("engine-1"))
        await eventually(lambda: recorder.archived_sequence == 1)
        await ask(archive, "PRAGMA busy_timeout=50")  # of the only connection, which the pool keeps
        with closing(sqlite3.connect(file)) as reader:
            assert reader.execute("SELECT log FROM events").fetchone()
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,)
            sequence = 1
            while "holds the write-ahead log back" not in board.missing_parts.get("archive", ""):
                sequence = await log.append(joined(f"engine-{sequence + 1}"))
                await asyncio.sleep(0.02)
                assert sequence < 1000
            assert archive.wal_bytes() < 300_000
        await eventually(lambda: recorder.archived_sequence == sequence)
        assert board.whole


async def test_a_volume_needs_room_for_what_is_in_the_write_ahead_log(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
        with closing(sqlite3.connect(file)) as reader:
            await archive.store(Batch(logs=[{"log": "a", "identity": "a", "branch": 1}]))
            reader.execute("BEGIN")
            assert reader.execute("SELECT * FROM logs").fetchall() == [("a", "a", 1)]
            await archive.store(Batch(logs=[{"log": "b", "identity": "b", "branch": 1}]))
            await ask(archive, "PRAGMA busy_timeout=50")
            usage = shutil.disk_usage(file.parent)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=archive.wal_bytes() - 1))
            with pytest.raises(OSError, match="a reader holds the write-ahead log back"):
                await archive.store(Batch(logs=[{"log": "c", "identity": "c", "branch": 1}]))
        await archive.store(Batch(logs=[{"log": "c", "identity": "c", "branch": 1}]))


async def test_a_command_that_reads_an_archive_holds_no_write_ahead_log_back(file: Path) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for number in range(5000):
        await log.append(joined(f"engine-{number}"))
    async with recording(log, file):
        await until(file, "SELECT count(*) FROM events", [(5000,)])
        read = iter(ArchiveHistory(f"sqlite:///{file}"))
        sequences = [next(read).sequence for _ in range(10)]
        with closing(sqlite3.connect(file)) as other:
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        sequences += [entry.sequence for entry in read]

    assert sequences == list(range(1, 5001))


async def test_what_is_held_and_what_is_stored_at_once_is_bounded_in_bytes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "QUEUE_BYTES_MAX", 20_000)
    monkeypatch.setattr(service_module, "BATCH_BYTES_MAX", 5_000)
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for number in range(1, 41):
        await log.append(stored("engine-1", number, list(range(1000 * number, 1000 * number + 200))))
    entry_bytes = 2300
    async with archive_at(f"sqlite+aiosqlite:///{file}") as archive:
        recorder = Recorder(log, archive, ScaledClock(), HealthBoard(), batch_events=50, batch_seconds=WallSeconds(0.0))
        batches: list[int] = []
        store = archive.store

        async def counted(batch: Batch, after: Branch | None) -> None:
            batches.append(sum(len(row["payload"]) for row in batch.events))
            await store(batch, after)

        monkeypatch.setattr(archive, "store", counted)
        collecting = asyncio.create_task(recorder.collect())
        await eventually(lambda: recorder._queue.qsize() > 5)
        await asyncio.sleep(0.2)
        assert recorder._queue.qsize() < 2 + 20_000 / 2000
        storing = asyncio.create_task(recorder.archive())
        await eventually(lambda: recorder.archived_sequence == 40)
        for task in (collecting, storing):
            task.cancel()
        await asyncio.gather(collecting, storing, return_exceptions=True)

    assert sum(batches) > 40 * 2000
    assert max(batches) < 5_000 + entry_bytes


async def test_a_vanished_server_does_not_hold_up_the_end(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "CLOSE_SECONDS_MAX", 0.3)
    async with way_to(postgres) as (url, reachable), asyncio.timeout(20), open_archive(url) as archive:
        await archive.prepare()
        reachable.clear()


async def test_a_start_leaves_the_grants_on_the_view_and_the_views_that_depend_on_it(postgres: str) -> None:
    async with archive_at(postgres) as archive:
        await run(archive, "GRANT SELECT ON requests TO PUBLIC")
        await run(archive, "CREATE VIEW late AS SELECT request FROM requests WHERE ttft > slo_ttft")
        try:
            await archive.prepare()

            granted = "SELECT grantee FROM information_schema.role_table_grants WHERE table_name = 'requests'"
            assert ("PUBLIC",) in await ask(archive, granted)
            assert await ask(archive, "SELECT * FROM late") == []
        finally:
            await run(archive, "DROP VIEW late")


async def test_a_start_waits_for_no_transaction_that_has_read_the_view_unless_it_is_another_now(postgres: str) -> None:
    async with archive_at(postgres) as archive, archive.engine.connect() as reader:
        await reader.execute(sa.text("SELECT count(*) FROM requests"))
        await asyncio.wait_for(archive.prepare(), 20)
        await reader.rollback()

        await run(archive, "ALTER VIEW requests RENAME COLUMN ends TO endings")
        await reader.execute(sa.text("SELECT endings FROM requests"))
        with pytest.raises(UnusableDatabaseError, match="a transaction that has read it is open: end it"):
            await archive.prepare()
        assert await asyncio.wait_for(ask(archive, "SELECT endings FROM requests"), 20) == []
        await reader.rollback()
        await archive.prepare()

        assert await ask(archive, "SELECT ends FROM requests") == []


@pytest.mark.parametrize("temporary", [True, False], ids=["may make temporary views", "may not"])
async def test_a_start_mends_a_view_whose_columns_are_the_same(postgres: str, temporary: bool) -> None:
    url = postgres if temporary else await _without_temporary_views(postgres)
    async with archive_at(url) as archive:
        query = "SELECT pg_get_viewdef('requests')"
        made = await ask(archive, query)
        other = made[0][0].replace("IS NOT NULL", "IS NULL")
        await run(archive, f"CREATE OR REPLACE VIEW requests AS {other}".replace(":", "\\:"))
        assert await ask(archive, query) != made

        await archive.prepare()

        assert await ask(archive, query) == made


async def _without_temporary_views(postgres: str) -> str:
    """URL of a database for a user who may make none."""
    server = create_async_engine(postgres, isolation_level="AUTOCOMMIT")
    async with server.connect() as connection:
        for statement in (
            "DROP DATABASE IF EXISTS plain",
            "DROP ROLE IF EXISTS plain",
            "CREATE ROLE plain LOGIN",
            "CREATE DATABASE plain OWNER plain",
            "REVOKE TEMPORARY ON DATABASE plain FROM PUBLIC, plain",
        ):
            await connection.execute(sa.text(statement))
    await server.dispose()
    return str(make_url(postgres).set(username="plain", database="plain"))


async def test_a_view_with_other_columns_is_made_again_unless_others_depend_on_it(postgres: str) -> None:
    """As an earlier or later version made it."""
    async with archive_at(postgres) as archive:
        await run(archive, "DROP VIEW requests")
        await run(archive, "CREATE VIEW requests AS SELECT request, log, sequence FROM events")
        await run(archive, "CREATE VIEW late AS SELECT request FROM requests")
        try:
            with pytest.raises(UnusableDatabaseError, match="depend on it") as refused:
                await archive.prepare()
        finally:
            await run(archive, "DROP VIEW late")
        assert "view late depends on view requests" in str(refused.value)

        await archive.prepare()

        assert await ask(archive, "SELECT request, ends FROM requests") == []


async def test_a_url_with_a_port_that_is_none_is_refused_with_an_example() -> None:
    with pytest.raises(click.BadParameter, match=r"54x2.*; write for instance sqlite"):
        async with open_archive("postgresql+asyncpg://u@host:54x2/db"):
            pass
