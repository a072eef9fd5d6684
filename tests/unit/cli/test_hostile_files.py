"""Bundles, archives and traces of strangers: refused with one line, in bounded memory, without a traceback."""

import gzip
import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.codec import encode
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.subjects import subject_of
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import PoolName, RequestId, Tenant
from pointsman.runtime.checkpoint_fingerprint import entry_digest
from pointsman.simulation.replay import BaseState, fold
from pointsman.state.checkpoint import encode_state
from pointsman_cli.history import archive as archive_reader
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.checkpoint import ExportedCheckpoint, _form
from pointsman_cli.history.sources import Header, open_history
from pointsman_cli.main import main
from tests.support.hostile import hostile_log
from tests.support.recorded_log import RecordedFleet
from tests.unit.cli.test_history import archived

MEBIBYTE = 1024**2
RSS_BYTES_MAX = 330 * MEBIBYTE
"""`pointsman replay` of a small log takes 75 MiB."""
MEASURED = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
from pointsman_cli.main import main
for command in json.load(sys.stdin):
    ran = CliRunner().invoke(main, command)
    print(json.dumps([repr(ran.exception), ran.exit_code, ran.output]))
status = Path("/proc/self/status").read_text()  # ru_maxrss is at least that of the process that started this one
print(status[status.index("VmHWM") :].split()[1])
"""


def run(*commands: list[str], rss_max: int = RSS_BYTES_MAX) -> list[str]:
    """Runs commands in one process. Returns what each printed."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED], input=json.dumps(commands), capture_output=True, text=True, check=True, timeout=100
    )  # fmt: skip
    *lines, measured = ran.stdout.splitlines()
    assert int(measured) * 1024 < rss_max, measured
    results = [json.loads(line) for line in lines]
    assert all(raised == "None" or raised.startswith("SystemExit") for raised, _, _ in results), results
    return [output for _, _, output in results]


def assert_refused(names: Iterable[str], outputs: Iterable[str]) -> None:
    for name, output in zip(names, outputs, strict=True):
        assert "Error: " in output, (name, output[:1000])
        assert len(output) < 1000, (name, output[:1000])


def bomb(file: Path, chunks: Iterable[bytes]) -> str:
    with gzip.open(file, "wb", compresslevel=9) as packed:
        for chunk in chunks:
            packed.write(chunk)
    assert file.stat().st_size < 2 * MEBIBYTE
    return str(file)


def arrivals(count: int, keys: int) -> Iterator[bytes]:
    packed = b64encode(bytes(8 * keys)).decode()
    for number in range(count):
        event = {
            "type": "RequestArrived", "at": 1.0, "request": f"r-{number}", "arrived_at": 1.0, "ingress": "i", "tenant": "",
            "keys": packed, "prompt_tokens": 1, "max_output_tokens": 1, "slo_ttft": 1.0, "slo_tpot": 1.0,
        }  # fmt: skip
        line = {"sequence": number + 1, "subject": f"pm.default.request.r-{number}", "event": event}
        yield json.dumps(line).encode() + b"\n"


ENTRY = b'{"sequence":1,"subject":"x","payload":"%s"}\n' % (b"A" * 4000)
HEAD = b'{"format":"pointsman-log","version":1,"header":'
BOMBS: dict[str, Callable[[], Iterable[bytes]]] = {
    "an endless line": lambda: [b" " * MEBIBYTE] * 200,
    "an endless header": lambda: [HEAD + b'{"pool":"', *([b"x" * MEBIBYTE] * 60)],
    "a deep header": lambda: [HEAD + b'{"x":', b"[" * 9 * MEBIBYTE],
    "an endless checkpoint": lambda: [HEAD + b'{},"checkpoint":{"content":"', *([b"A" * MEBIBYTE] * 60)],
    "endless entries": lambda: [HEAD + b"{}}\n", *([ENTRY * 1000] * 12)],
    "endless arrivals": lambda: [HEAD + b"{}}\n", *arrivals(20, 400_000)],
    "an endless subject": lambda: [HEAD + b'{}}\n{"sequence":1,"payload":"","subject":"' + b"s" * 12 * MEBIBYTE + b'"}\n'],
}  # fmt: skip


def test_bundles_that_unpack_to_far_more_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    files = [bomb(tmp_path / f"{number}.pmlog", chunks()) for number, chunks in enumerate(BOMBS.values())]

    outputs = run(*(["replay", "--from", file] for file in files))
    assert_refused(BOMBS, outputs)
    for name, output in zip(BOMBS, outputs, strict=True):
        expected = "unpacks to more than 300 times" if name.startswith("endless") else "Error"
        assert expected in output, (name, output)


def test_a_real_log_unpacks_within_the_bounds(tmp_path: Path) -> None:
    entries = RecordedFleet(policy_set(prefill_window_tokens=900), seed=3).live(2000).write_all().entries
    write_bundle(tmp_path / "log.pmlog", Header(last=entries[-1].sequence), entries)

    (output,) = run(["replay", "--from", str(tmp_path / "log.pmlog")], rss_max=130 * MEBIBYTE)

    assert "Error" not in output


def test_a_log_of_long_shared_prompts_is_read_again(tmp_path: Path) -> None:
    """1,500 keys are of 100,000 tokens. They repeat within the 32 KiB in which deflate finds what it knows."""
    chance, file = Random(1), tmp_path / "log.pmlog"
    shared = [chance.getrandbits(64) for _ in range(1500)]
    arrived = [
        RequestArrived(at=1.0, request=RequestId(f"{chance.getrandbits(96):024x}"), arrived_at=1.0, ingress="i",
            tenant=Tenant(""), keys=pack_keys([*shared, chance.getrandbits(64)]), prompt_tokens=100_000,
            max_output_tokens=5, slo_ttft=2.0, slo_tpot=0.1)
        for _ in range(2500)
    ]  # fmt: skip
    written = [LogEntry.read(n, subject_of(PoolName("a"), event), encode(event)) for n, event in enumerate(arrived, 1)]

    write_bundle(file, Header(last=2500), written)

    unpacked = sum(len(entry.payload) for entry in written)
    assert unpacked > max(32 * MEBIBYTE, 50 * file.stat().st_size)
    with open_history(str(file)) as history:
        assert len(list(history)) == 2500


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    return RecordedFleet(policy_set(prefill_window_tokens=900), seed=11).live(200).write_all().entries


def test_a_checkpoint_with_impossible_values_is_no_traceback(entries: list[LogEntry], tmp_path: Path) -> None:
    state, policies = fold(entries[:50]), policy_set(prefill_window_tokens=900)
    form = _form(state, policies)
    state.last_at = "\x1b[2J"  # type: ignore[assignment]
    state.fleet._instances = None  # type: ignore[assignment]
    proper = BaseState(state, policies)
    claims = b"\x82\xa5nodes\xdd\xff\xff\xff\xff\xa7indexes\x90"
    for content in (encode_state(proper.state), claims):
        kept = ExportedCheckpoint(as_of=50, entry=entry_digest(entries[49]), form=form, content=content)
        file = tmp_path / f"{len(content)}.pmlog"
        write_bundle(file, Header(first=50), entries[49:], kept)
        for command in ("replay", "state", "doctor"):
            ran = CliRunner().invoke(main, [command, "--from", str(file)])

            assert isinstance(ran.exception, SystemExit) or ran.exception is None
            assert "\x1b" not in ran.output


NODES = b"\x81\xa5nodes\xdd"
SETS = b"\x91\xa3set"
CHECKPOINTS = {
    "many nodes": NODES + (400_000).to_bytes(4, "big") + SETS * 400_000,
    "many nodes behind others": NODES + (1).to_bytes(4, "big") + SETS + NODES[1:] + (10**6).to_bytes(4, "big") + SETS * 10**6,
    "deep slots": NODES + (1).to_bytes(4, "big") + b"\x93\xa3set\xa0\xdd" + (5 * 10**6).to_bytes(4, "big") + b"\x91\x90" * 5 * 10**6,
}  # fmt: skip


def test_a_checkpoint_that_would_become_far_larger_is_refused_before_it_does(
    entries: list[LogEntry], tmp_path: Path
) -> None:
    files = []
    for name, content in CHECKPOINTS.items():
        kept = ExportedCheckpoint(as_of=50, entry=entry_digest(entries[49]), form="", content=content)
        files.append(tmp_path / f"{name}.pmlog")
        write_bundle(files[-1], Header(first=50), entries[49:], kept)

    outputs = run(*(["replay", "--from", str(file)] for file in files), rss_max=150 * MEBIBYTE)

    assert_refused(CHECKPOINTS, outputs)
    assert all("has a checkpoint of more than 1 MiB" in output for output in outputs)


# --- Archives ---


@pytest.fixture
def archive(entries: list[LogEntry], tmp_path: Path) -> Path:
    return Path(archived(tmp_path / "archive.sqlite", ("2026", 1, entries, "")))


NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
ENDLESS = f"{NUMBERS} SELECT '2026' AS log, x AS sequence, 'pm.a.lost' AS subject, zeroblob(1000000) AS payload FROM n"
COPY = "DROP VIEW requests; CREATE TABLE e(log, sequence, subject, payload"
REPLACED = "DROP TABLE events; ALTER TABLE e RENAME TO events;"
HOSTILE_ARCHIVES = {
    "a view without end": f"DROP VIEW requests; DROP TABLE events; CREATE VIEW events AS {ENDLESS}",
    "a view as the list of logs": f"DROP TABLE logs; CREATE VIEW logs AS {NUMBERS} SELECT x AS log, 1 AS identity, 1 AS branch FROM n",
    "computed columns": f"{COPY} AS (zeroblob(900000000))); INSERT INTO e(log, sequence, subject) SELECT log, sequence, subject FROM events; {REPLACED}",
    "a huge value": "UPDATE events SET payload = zeroblob(100000000) WHERE sequence = 3",
    "no tables": "DROP VIEW requests; DROP TABLE events; DROP TABLE logs",
    "other columns": "DROP VIEW requests; ALTER TABLE events RENAME COLUMN payload TO load",
    "fractions as numbers": f"{COPY}); INSERT INTO e SELECT log, sequence + 0.5, subject, payload FROM events; {REPLACED}",
    "no keys": f"{COPY}); INSERT INTO e SELECT log, sequence, subject, payload FROM events; {REPLACED}",
    "no subject": f"{COPY}); INSERT INTO e SELECT log, sequence, x'00', payload FROM events; {REPLACED}",
    "bytes as names": "CREATE TABLE l(log, identity, branch); INSERT INTO l VALUES (x'1b5b', 1, 1); DROP TABLE logs; ALTER TABLE l RENAME TO logs",
}  # fmt: skip


def changed(archive: Path, script: str, name: str) -> Path:
    file = archive.with_name(f"{name}.sqlite")
    with sqlite3.connect(archive) as source, sqlite3.connect(file) as copy:
        source.backup(copy)
        copy.executescript(script)
    source.close()
    copy.close()
    return file


def test_hostile_archives_are_refused_in_bounded_memory_and_time(archive: Path) -> None:
    files = [changed(archive, script, name) for name, script in HOSTILE_ARCHIVES.items()]

    assert_refused(HOSTILE_ARCHIVES, run(*(["replay", "--from", str(file)] for file in files)))


def interior(page: int, *, child: int, keys: int = 55) -> tuple[int, bytes]:
    """An interior page of a table's tree, all of whose children are the same page."""
    cells = b"".join(struct.pack(">IB", child, keys - number) for number in range(keys))
    starts = [PAGE_BYTES - len(cells) + 5 * (keys - 1 - number) for number in range(keys)]
    head = struct.pack(">BHHHBI", 5, 0, keys, PAGE_BYTES - len(cells), 0, child)
    body = head + struct.pack(f">{keys}H", *starts)
    return page, body + bytes(PAGE_BYTES - len(body) - len(cells)) + cells


PAGE_BYTES = 512
EMPTY = f"""
PRAGMA page_size = {PAGE_BYTES};
CREATE TABLE logs(log PRIMARY KEY, identity, branch);
CREATE TABLE gaps(log, sequence, after_log, after_sequence, reason, PRIMARY KEY (log, sequence));
CREATE TABLE events(log, sequence, subject, payload, at);
CREATE TABLE dead_letters(log, sequence, subject, payload, PRIMARY KEY (log, sequence));
INSERT INTO logs VALUES ('2026', '2026', 1); INSERT INTO events VALUES ('2026', 1, 'pm.a.lost', '{{}}', 1.0);
INSERT INTO gaps VALUES ('2026', 1, '2025', 1, 'cut');
CREATE TABLE room(x); INSERT INTO room VALUES (zeroblob(4000));
"""


@pytest.mark.parametrize("table", ["logs", "gaps", "events"])
def test_an_archive_whose_pages_refer_to_each_other_without_end_is_refused(table: str, tmp_path: Path) -> None:
    file = tmp_path / "archive.sqlite"
    with sqlite3.connect(file) as made:
        keyed = EMPTY.replace("payload, at)", "payload, at, PRIMARY KEY (log, sequence))")
        made.executescript(EMPTY if table == "events" else keyed)  # its key leads past such pages
        (root,) = made.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    made.close()
    content = bytearray(file.read_bytes())
    pages = [root, *range(len(content) // PAGE_BYTES - 6, len(content) // PAGE_BYTES)]
    leaf = content[(root - 1) * PAGE_BYTES : root * PAGE_BYTES]
    for page, body in [(pages[-1], leaf), *(interior(page, child=child) for page, child in pairwise(pages))]:
        content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = body
    file.write_bytes(content)

    began = time.process_time()
    ran = CliRunner().invoke(main, ["replay", "--from", str(file)])

    assert (ran.exit_code, ran.output.count("\n")) == (2, 1), ran.output
    assert "not an archive of ours" in ran.output
    assert time.process_time() - began < 20


def test_an_archive_whose_values_share_their_pages_is_refused(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every entry had the same large payload."""
    file = changed(archive, "UPDATE events SET payload = zeroblob(3000000) WHERE sequence <= 4", "shared")
    monkeypatch.setattr(archive_reader, "_bytes_of", lambda _file: 5_000_000)

    ran = CliRunner().invoke(main, ["replay", "--from", str(file)])

    assert ran.exit_code == 2
    assert archive_reader.LARGER in ran.output


def test_many_large_values_are_not_held_at_once(archive: Path) -> None:
    large = f"INSERT INTO dead_letters {NUMBERS} SELECT '2026', 100000 + x, 'x', zeroblob(7000000), '' FROM n LIMIT 60"

    (output,) = run(["replay", "--from", str(changed(archive, large, "large"))], rss_max=250 * MEBIBYTE)

    assert "undecodable" in output


def test_an_archive_is_read_without_its_triggers_and_without_a_change(archive: Path) -> None:
    trigger = "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events; END"
    file = changed(archive, trigger, "trigger")
    before = file.read_bytes()

    ran = CliRunner().invoke(main, ["replay", "--from", str(file)])

    assert ran.exit_code == 0
    assert file.read_bytes() == before


def test_a_file_that_only_begins_like_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"SQLite format 3\0" + os.urandom(5000))

    ran = CliRunner().invoke(main, ["replay", "--from", str(tmp_path / "a.sqlite")])

    assert ran.exit_code == 2
    assert ran.output.startswith("Error: ")


# --- Traces ---

ROW = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
TRACES = {
    "an endless line": b" " * 300 * MEBIBYTE,
    "deep nesting": b'{"x":' + b"[" * MEBIBYTE,
    "no UTF-8": b'{"x":"\xff\x9b"}',
    "infinite times": json.dumps(ROW | {"timestamp": 1e300}).encode(),
    "endless answers": json.dumps(ROW | {"output_length": 2**62}).encode(),
    "endless prompts": json.dumps(ROW | {"input_length": 2**62}).encode(),
    "escapes": b'{"timestamp":"\\u001b[2J"}',
}


def test_hostile_traces_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    commands = []
    for number, content in enumerate(TRACES.values()):
        (tmp_path / f"{number}.jsonl").write_bytes(content + b"\n")
        commands.append(["simulate", "--trace", str(tmp_path / f"{number}.jsonl"), "--instances", "1"])

    assert_refused(TRACES, run(*commands))


def test_names_that_are_sql_are_stored_as_names(entries: list[LogEntry], tmp_path: Path) -> None:
    """Also in the choice of a log, which is a user's text."""
    injection = "2026'); DROP TABLE events; --"
    hostile = hostile_log(entries, policies_too=True)
    file = archived(tmp_path / "archive.sqlite", (injection, 1, hostile, ""), ("2025", 1, entries[:20], ""))

    with open_history(file, pool=injection) as history:
        assert [entry.payload for entry in history] == [entry.payload for entry in hostile]
    ran = CliRunner().invoke(main, ["replay", "--from", file, "--pool", "x' OR 1=1; DROP TABLE events; --"])
    assert ran.exit_code == 2
    with open_history(file, pool="2025") as history:
        assert len(list(history)) == 20
