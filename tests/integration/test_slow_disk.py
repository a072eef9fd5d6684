"""A nats-server whose disk takes 300 ms for each write, for ten seconds: real processes, delays put into its system calls by
strace. Clients are served on, nobody else is elected, nothing is lost, and the log replays."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from pointsman.contracts.decisions import LeaderElected, RequestRejected, WritesLost
from pointsman.contracts.fleet import InstanceLeft, InstanceSuspected
from pointsman.ports import Link
from pointsman_cli.discovery import FleetFile
from tests.integration.test_failover import Clients, assert_each_request_has_one_end, assert_terms_are_in_order
from tests.support.log_reading import events_in
from tests.support.up import POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

STRACE = shutil.which("strace")
WRITE_MICROSECONDS = 300_000
SLOW_SECONDS = 5.0
GROWTH_BYTES_MAX = 64 * 1024**2
"""A full window, and what Python keeps."""
LOAD = re.compile(r'^pointsman_log_write_load_ratio\{pool="default"\} (\S+)', re.MULTILINE)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    if STRACE is None:
        pytest.skip("strace is not installed")
    arguments = ("--instances", "2", "--schedulers", "2", "--speed", "10", "--set", "nats.sync_interval=always")
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *arguments) as running:
        running.wait_for("Try it")
        yield running
        running.stop()


@contextmanager
def slow_disk(pid: int) -> Iterator[None]:
    assert STRACE is not None
    calls = "fsync,fdatasync"
    command = [
        STRACE,
        "-f",
        "-o",
        "/dev/null",
        "-p",
        str(pid),
        "-e",
        f"trace={calls}",
        "-e",
        f"inject={calls}:delay_exit={WRITE_MICROSECONDS}",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            if "attached" not in said:
                pytest.skip(f"strace cannot attach here: {said}")
            yield
        finally:
            process.terminate()


def nats_pid(fleet: FleetFile, up: RunningUp) -> int:
    return int((up.data / "nats" / "nats-server.owner").read_text().split()[1])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def write_loads(fleet: FleetFile) -> list[float]:
    urls = [f"{process.url}/metrics" for process in fleet.processes if process.role == "scheduler"]
    async with aiohttp.ClientSession() as session:
        pages = [await (await session.get(url)).text() for url in urls]
    return [float(found[1]) for page in pages if (found := LOAD.search(page))]


@pytest.mark.timeout(180)
async def test_a_slow_disk_costs_neither_a_term_nor_a_decision_and_clients_are_served(
    fleet: FleetFile, link: Link, up: RunningUp
) -> None:
    schedulers = [process.pid for process in fleet.processes if process.role == "scheduler"]
    before = {pid: resident_bytes(pid) for pid in schedulers}
    clients = Clients(fleet)
    running = asyncio.create_task(clients.run(at_once=3))
    await asyncio.sleep(1.0)
    quick = len(clients.answers)
    with slow_disk(nats_pid(fleet, up)):
        await asyncio.sleep(SLOW_SECONDS)
        highest = max(await write_loads(fleet))
        answered_slowly = len(clients.answers) - quick
    await asyncio.sleep(1.0)
    clients.stopped = True
    await running
    await eventually(lambda: up.process.poll() is None)

    async def caught_up() -> bool:
        return max(await write_loads(fleet)) < 0.001

    await eventually(caught_up, seconds=60)
    await assert_each_request_has_one_end(link, clients.answers)

    events = await events_in(link.log)
    growth = max(resident_bytes(pid) - before[pid] for pid in schedulers)
    print(f"{answered_slowly} answered while the disk was slow, load {highest:.2f}, memory +{growth / 1e6:.0f} MB")
    assert highest > 0.02
    assert answered_slowly > 10
    assert set(clients.answers.values()) == {200}
    assert [
        type(e) for e in events if isinstance(e, WritesLost | InstanceSuspected | InstanceLeft | RequestRejected)
    ] == []
    assert len([e for e in events if isinstance(e, LeaderElected)]) == 1
    assert_terms_are_in_order(events)
    assert growth < GROWTH_BYTES_MAX
    replayed = await asyncio.to_thread(
        subprocess.run,
        [POINTSMAN, "replay", "--verify", "--json", "--from", str(up.data)],
        capture_output=True,
        text=True,
        check=False,
    )
    verdict = json.loads(replayed.stdout)["verdict"]
    assert (verdict["different"], verdict["problems"]) == (0, [])
