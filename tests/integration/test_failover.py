"""A slow disk of the log, and leaders that die or stand still, as people would see it: real processes, a real nats-server,
requests over HTTP.

Two schedulers lead and follow; a stream of clients sends all the while. Every client gets its one answer, every request
has its one end in the log, and no decision of a deposed leader counts. While the disk is slow (300 ms for each write, put into
the server's system calls by strace), nobody else is elected and nothing is lost; the log replays.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import DescribeFleet, FleetDescribed
from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestPlaced, RequestRejected, WritesLost
from pointsman.contracts.fleet import InstanceLeft, InstanceSuspected
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from pointsman.contracts.subjects import command_subject
from pointsman.ports import CommandTimeoutError, Link, NoResponderError
from pointsman.primitives import PoolName, WallSeconds
from pointsman_cli.discovery import FleetFile
from tests.support.log_reading import events_in
from tests.support.up import POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

SPEED = 20.0
ENDS = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)
PATIENT = {"x-slo-ttft-ms": "3600000"}
RESUMES_SECONDS_MAX = 10.0
"""Five times what is promised, on a machine that does other things as well."""
STRACE = shutil.which("strace")
WRITE_MICROSECONDS = 300_000
SLOW_SECONDS = 5.0
GROWTH_BYTES_MAX = 64 * 1024**2
"""A full window, and what Python keeps."""
LOAD = re.compile(r'^pointsman_log_write_load_ratio\{pool="default"\} (\S+)', re.MULTILINE)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    arguments = ("--instances", "2", "--schedulers", "2", "--speed", str(SPEED), "--set", "nats.sync_interval=always")
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *arguments) as running:
        running.wait_for("Try it")
        yield running
        running.stop()


async def described(link: Link) -> FleetDescribed | None:
    """What the leader says of itself; None while nobody does."""
    try:
        answer = await link.commands.request(
            command_subject(PoolName("default"), "fleet"), DescribeFleet(), timeout=WallSeconds(0.3)
        )
    except (NoResponderError, CommandTimeoutError):
        return None
    assert isinstance(answer, FleetDescribed)
    return answer


async def leading(link: Link, *, after: int = 0) -> FleetDescribed:
    """Who leads, as soon as somebody does in a term after this one."""
    async with asyncio.timeout(20):
        while (found := await described(link)) is None or found.term <= after:  # noqa: ASYNC110 - asking is how one knows
            await asyncio.sleep(0.05)
    return found


def pid_of(leader: FleetDescribed) -> int:
    return int(leader.scheduler.split("-")[1])


async def both_are_ready(fleet: FleetFile) -> None:
    """One to lead, one that follows and has caught up."""
    urls = [f"{process.url}/readyz" for process in fleet.processes if process.role == "scheduler"]
    assert len(urls) == 2
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        for url in urls:
            while not await _answers(session, url):  # noqa: ASYNC110 - asking is how one knows
                await asyncio.sleep(0.1)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


class Clients:
    """Some clients that ask one after the other until told to stop."""

    def __init__(self, fleet: FleetFile) -> None:
        self._fleet = fleet
        self._numbers = count(1)
        self.answers: dict[str, int] = {}
        self.answered_at: list[tuple[float, float]] = []
        """When each was asked and when it was answered."""
        self.stopped = False

    async def run(self, at_once: int = 6) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(self._one(session))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        while not self.stopped:
            number = next(self._numbers)
            body: dict[str, Any] = {
                "model": self._fleet.model,
                "prompt": [500 + number % 7] * 200 + [1000 + number % 3000],
                "max_tokens": 5 + number % 40,
                "stream": number % 3 > 0,
            }
            asked_at = time.monotonic()
            url = f"{self._fleet.ingress}/v1/completions"
            async with session.post(url, json=body, headers=PATIENT) as answer:
                await answer.read()
            request = answer.headers["x-pointsman-request-id"]
            assert request not in self.answers
            self.answers[request] = answer.status
            self.answered_at.append((asked_at, time.monotonic()))

    async def served_after(self, moment: float) -> None:
        """Wait until a request that was asked after this moment is answered, and a second longer."""
        deadline = moment + 2 * RESUMES_SECONDS_MAX
        while time.monotonic() < deadline and not any(asked >= moment for asked, _ in self.answered_at):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    def silence_after(self, moment: float) -> float:
        """Seconds from a moment to the first answer to a request that was asked after it."""
        return min(answered for asked, answered in self.answered_at if asked >= moment) - moment


async def assert_each_request_has_one_end(link: Link, answers: dict[str, int]) -> None:
    """As soon as the log is complete."""
    ends: Counter[str] = Counter()
    events: list[LogEvent] = []
    async with asyncio.timeout(10):
        while set(ends) != set(answers):
            events = await events_in(link.log)
            ends = Counter(e.request for e in events if isinstance(e, ENDS) and e.request in answers)
            await asyncio.sleep(0.2)

    assert set(ends.values()) == {1}
    arrived = Counter(e.request for e in events if isinstance(e, RequestArrived) and e.request in answers)
    assert set(arrived.values()) <= {1}


def assert_terms_are_in_order(events: list[LogEvent]) -> None:
    """At most one leader writes in each term, and nothing that counts comes from an earlier one."""
    term, numbers = 0, set[int]()
    for event in events:
        if isinstance(event, LeaderElected):
            assert event.term > term
            term, numbers = event.term, set()
        elif event.stamp is not None:
            assert event.stamp.term == term, "the server has stored a decision of a deposed leader"
            assert event.stamp.number not in numbers
            numbers.add(event.stamp.number)
    if numbers:
        assert numbers == set(range(1, max(numbers) + 1))


@contextmanager
def slow_disk(pid: int) -> Iterator[None]:
    if STRACE is None:
        pytest.skip("strace is not installed")
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


async def test_a_killed_leader_is_followed_at_once_and_no_request_is_lost(fleet: FleetFile, link: Link) -> None:
    await both_are_ready(fleet)
    clients = Clients(fleet)
    running = asyncio.create_task(clients.run())
    await asyncio.sleep(1.0)
    pid = pid_of(await leading(link))
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await clients.served_after(killed_at)
    clients.stopped = True
    await running

    resumed = clients.silence_after(killed_at)
    slowest = max(answered - asked for asked, answered in clients.answered_at)
    print(f"resumed after {resumed:.2f} s, the slowest of {len(clients.answers)} took {slowest:.2f} s")
    assert resumed < RESUMES_SECONDS_MAX
    assert set(clients.answers.values()) == {200}
    await assert_each_request_has_one_end(link, clients.answers)
    assert_terms_are_in_order(await events_in(link.log))
    assert pid_of(await leading(link)) != pid


async def test_a_leader_that_stood_still_comes_back_as_a_follower(fleet: FleetFile, link: Link) -> None:
    await both_are_ready(fleet)
    clients = Clients(fleet)
    running = asyncio.create_task(clients.run())
    await asyncio.sleep(1.0)
    before = await leading(link)
    pid = pid_of(before)
    os.kill(pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    try:
        await clients.served_after(stopped_at)
        after = await leading(link, after=before.term)
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(2.0)
    clients.stopped = True
    await running

    print(f"resumed {clients.silence_after(stopped_at):.2f} s after the leader stood still")
    assert pid_of(after) != pid
    assert set(clients.answers.values()) == {200}
    await assert_each_request_has_one_end(link, clients.answers)
    events = await events_in(link.log)
    assert_terms_are_in_order(events)
    grants = Counter(
        (e.request, e.attempt)
        for e in events
        if isinstance(e, RequestGranted) and e.stamp is not None and e.request in clients.answers
    )
    placed = Counter((e.request, e.attempt) for e in events if isinstance(e, RequestPlaced))
    assert set(grants.values()) <= {1}
    assert set(placed.values()) == {1}
    assert pid_of(await leading(link)) != pid


async def test_a_leader_that_is_asked_to_stop_gives_the_lease_back(fleet: FleetFile, link: Link) -> None:
    await both_are_ready(fleet)
    before = await leading(link)
    pid = pid_of(before)
    os.kill(pid, signal.SIGTERM)
    asked_at = time.monotonic()
    after = await leading(link, after=before.term)

    print(f"another leads {time.monotonic() - asked_at:.2f} s after SIGTERM")
    assert pid_of(after) != pid
