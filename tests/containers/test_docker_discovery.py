"""Engines found by labels in a real Docker engine. Nothing is asked of the containers themselves."""

import asyncio
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from pointsman.adapters.discovery.docker import DockerDiscovery
from pointsman.ports import EngineTarget
from pointsman_lab.background import background
from tests.support.waiting import eventually

pytestmark = [pytest.mark.containers, pytest.mark.timeout(240)]

IMAGE = "python:3.11-slim-bookworm"
SECONDS_MAX = 60.0


@pytest.fixture
def prefix() -> Iterator[str]:
    """Of names; also the label's value."""
    prefix = f"disc{uuid.uuid4().hex[:8]}"
    docker("network", "create", prefix)
    yield prefix
    if left := docker("ps", "-aq", "--filter", f"label=pointsman.test={prefix}").split():
        docker("rm", "-f", *left)
    docker("network", "rm", prefix)


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_containers_are_followed_through_health_pause_restart_and_removal(prefix: str) -> None:
    lists: list[dict[str, EngineTarget]] = []
    one, two = f"{prefix}-1", f"{prefix}-2"
    labels = ["--label", f"pointsman.test={prefix}", "--label", "pointsman.io/port=8000"]
    health = ["--health-cmd", "test -f /tmp/ok", "--health-interval", "1s", "--health-retries", "1"]

    async def read() -> None:
        async for targets in DockerDiscovery(f"pointsman.test={prefix}").targets():
            lists.append({target.instance: target for target in targets})  # noqa: PERF401 - looked at while it grows

    async def until(**ready: bool) -> None:
        wanted = {name.replace("_", "-"): value for name, value in ready.items()}

        def told() -> dict[str, bool] | None:
            return {name: target.ready for name, target in lists[-1].items()} if lists else None

        await eventually(lambda: told() == wanted, seconds=SECONDS_MAX, what=f"{wanted}, not {told()},")

    async def run(*arguments: str) -> None:
        await asyncio.to_thread(docker, *arguments)

    async with background(read()):
        await run("run", "-d", "--name", one, "--network", prefix, *labels, *health, IMAGE, "sleep", "600")
        await until(**{one: False})
        await run("exec", one, "touch", "/tmp/ok")
        await until(**{one: True})
        first = lists[-1][one]
        await run("run", "-d", "--name", two, *labels, IMAGE, "sleep", "600")
        await until(**{one: True, two: True})
        on_bridge = lists[-1][two].url
        await run("pause", one)
        await until(**{one: False, two: True})
        paused = lists[-1][one]
        await run("unpause", one)
        await run("restart", "-t", "0", one)
        await eventually(lambda: one in lists[-1] and lists[-1][one].identity != first.identity, seconds=SECONDS_MAX)
        await run("rm", "-f", one, two)
        await until()

    assert first.url == f"http://{one}:8000"
    assert on_bridge.startswith("http://172.")
    assert paused.identity == first.identity
