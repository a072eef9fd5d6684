"""A log whose disk is full: a nats-server on a tiny file system, which is filled while we write."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import producer
from pointsman.contracts.decisions import WritesLost
from pointsman.ports import NONE_UNCONFIRMED, Link, LogUnavailableError
from pointsman.primitives import PoolName, Term, WallSeconds
from pointsman.runtime.embedded_nats import start_nats
from tests.support.events import stored
from tests.support.log_reading import events_in
from tests.support.log_worlds import RememberingListener
from tests.support.waiting import eventually

POOL = PoolName("default")
DISK_BYTES = 8 * 1024**2
SPARE_BYTES = 4 * 1024**2
KEYS_EACH = list(range(1, 20_001))
"""Of one event: some 160 kB."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, half of it taken by a file that can be deleted."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    try:
        (directory / "spare").write_bytes(bytes(SPARE_BYTES))
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=False)


async def test_a_full_disk_is_said_aloud_stops_nothing_but_the_log_and_leaves_a_mark(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "UNCONFIRMED_SECONDS_MAX", 5.0)
    listener = RememberingListener()
    server = await start_nats(disk / "nats")
    port = int(server.url.rpartition(":")[2])
    try:
        async with jetstream.connect(server.url, POOL, ScaledClock(), name="test", listener=listener) as link:
            assert await appended_until_full(link) > 5
            link.log.append_soon(stored("engine-2", 1, KEYS_EACH))
            await eventually(lambda: listener.stalled_now)

            held = await link.lease.put("one", Term(1), after=0)
            assert await link.lease.look() == held
            await eventually(lambda: listener.losses)
            link.log.append_soon(stored("engine-2", 2, [1]))
            after_losses = link.log.unconfirmed

            (disk / "spare").unlink()
            await server.kill()
            server = await start_nats(disk / "nats", port)
            await eventually(lambda: link.commands.connected)
            link.log.append_soon(stored("engine-3", 1, [1]))
            assert await link.log.flush(WallSeconds(10))

            assert after_losses.count == 1
            assert after_losses.wait_seconds >= WallSeconds(5.0), (
                "the log has been full for longer than the newest write waits"
            )
            assert link.log.unconfirmed == NONE_UNCONFIRMED
            assert not listener.stalled_now
            events = await events_in(link.log)
            lost = [event for event in events if isinstance(event, WritesLost)]
            assert sum(event.count for event in lost) == len(listener.losses) >= 1
            assert stored("engine-3", 1, [1]) in events
    finally:
        with contextlib.suppress(ProcessLookupError):
            await server.kill()


async def appended_until_full(link: Link) -> int:
    """How many events were confirmed before one was not."""
    number = 0
    with contextlib.suppress(LogUnavailableError):
        while True:
            await link.log.append(stored("engine-1", number + 1, KEYS_EACH))
            number += 1
    return number
