"""A running fleet gets poison of every kind on every subject of its log and its commands, and goes on."""

import asyncio
import json
import re
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path

from nats.aio.client import Client

from pointsman.contracts.codec import encode
from pointsman.contracts.commands import DescribeFleet
from tests.golden.samples import COMMANDS, EVENTS
from tests.support.poison import bad_fields, bad_utf8, deep
from tests.support.up import POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

LOG_KINDS = ("kv.engine-1", "fleet.engine-1", "request.r-1", "scale", "leader", "lost")
COMMAND_KINDS = ("route", "handover", "follow", "cancel", "migrate", "drain", "scale", "fleet", "resync.engine-1")
STRANGE_SUBJECTS = (b"pm.default.fleet.\xff\xfe", b"pm.default.kv.[/red]", b"pm.default.request.\xc3\x28")


def garbage() -> list[bytes]:
    """Every kind of message that nobody may believe, but for those that are merely wrong."""
    events = [encode(event) for event in EVENTS]
    made = [b"", b"\xff\xfe", b"{", b"[" * 50_000, b'{"type":"Unknown"}', b"null"]
    made += [deep(event) for event in events[::4]] + [bad_utf8(event) for event in events[::4]]
    for event in EVENTS[::2]:
        made += [
            payload for where, payload in bad_fields(event) if re.search(r"keys|at =|epoch|sequence|digest", where)
        ]
    return [payload for payload in made if len(payload) < 100_000]


async def poison(url: str) -> int:
    """Publish all of it; returns how many messages the log has got."""
    client = Client()
    await client.connect(url, max_reconnect_attempts=2)
    bad = garbage()
    for payload in bad:
        for kind in LOG_KINDS:
            await client.publish(f"pm.default.{kind}", payload)
    for kind in COMMAND_KINDS:
        for payload in (
            *bad[:20],
            *(encode(command) for command in COMMANDS if not isinstance(command, DescribeFleet)),
        ):
            await client.publish(f"pm.default.cmd.{kind}", payload)
    await client.flush()
    await client.close()
    host, port = url.removeprefix("nats://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    for subject in STRANGE_SUBJECTS:
        writer.write(b"PUB %s 2\r\n{}\r\n" % subject)
    header = b"NATS/1.0 \xff\xfe\r\nName\xff: \xff\r\n\r\n"
    writer.write(b"HPUB pm.default.fleet.engine-1 %d %d\r\n%s{}\r\n" % (len(header), len(header) + 2, header))
    writer.write(b"PING\r\n")
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    return len(bad) * len(LOG_KINDS) + len(STRANGE_SUBJECTS) + 1


def ask(up: RunningUp, text: str) -> int:
    body = {"model": "pointsman-sim", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{up.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def process_ids(up: RunningUp) -> dict[int, str]:
    """Every process that `up` has started, by its id."""
    listed = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().replace("\x00", " ") for pid in listed}


async def tool(up: RunningUp, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        POINTSMAN, *arguments, "--from", str(up.data), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def test_a_fleet_that_is_poisoned_serves_on_with_the_same_processes(tmp_path: Path) -> None:
    with pointsman_up(tmp_path, "--instances", "2") as up:
        url = up.wait_for(r"nats://127\.0\.0\.1:\d+")[0]
        up.wait_for(r"curl ")
        before = process_ids(up)
        assert [await asyncio.to_thread(ask, up, f"before {n}") for n in range(2)] == [200] * 2

        poisons = await poison(url)

        async def serves() -> bool:
            return await asyncio.to_thread(ask, up, "after") == 200

        await eventually(serves, what="an answer after the poison")
        assert [await asyncio.to_thread(ask, up, f"after {n} " * 50) for n in range(4)] == [200] * 4
        fleet, doctor, verified = await asyncio.gather(
            tool(up, "fleet"), tool(up, "doctor"), tool(up, "replay", "--verify")
        )
        assert process_ids(up) == before, up.output
        assert "started again" not in up.output
        assert fleet[0] == 0, fleet
        assert re.search(rf"{poisons:,} entries do not decode", doctor[1]), doctor
        assert "could not be applied" not in doctor[1]
        assert "different 0" in verified[1], verified
        assert f"{poisons:,} entries do not decode" in verified[1]
        kept = "SELECT count(*) FROM dead_letters"
        await eventually(lambda: archived(up, kept) == poisons, what="the dead letters in the archive")


def archived(up: RunningUp, query: str) -> int:
    with closing(sqlite3.connect(up.data / "archive.sqlite")) as connection:
        return int(connection.execute(query).fetchone()[0])
