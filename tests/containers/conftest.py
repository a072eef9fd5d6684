"""The image, a clean copy of this tree, and the table of faults at the end."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.containers.fleet import IMAGE, ContainerFleet, clean_copy, docker_engine
from tests.containers.judge import Row
from tests.containers.trial import Observer, observing

TABLE = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> list[Row]:
    return request.config.stash.setdefault(TABLE, [])


@pytest.fixture(scope="session", autouse=True)
def _own_settings() -> Iterator[None]:
    """Nothing of the caller's environment reaches a compose file."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith(("POINTSMAN_", "COMPOSE_", "NATS_"))]:
            environment.delenv(name)
        yield


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    docker_engine()
    return clean_copy(tmp_path_factory.mktemp("copy") / "pointsman")


@pytest.fixture(scope="session")
def image(copy: Path) -> str:
    subprocess.run(
        ["docker", "build", "-q", "-f", "deploy/Dockerfile", "-t", IMAGE, "."], cwd=copy, check=True, timeout=600
    )
    return IMAGE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observer(fleet: ContainerFleet, table: list[Row]) -> AsyncIterator[Observer]:
    """Of the module's `fleet`."""
    async with observing(fleet) as observer:
        yield observer
        table += observer.rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(TABLE, [])
    if rows:
        terminalreporter.section("faults of containers")
        terminalreporter.write_line(HEAD)
        terminalreporter.write_line("|---" * HEAD.count(" | ") + "|---|")
    for row in rows:
        terminalreporter.write_line(_line(row))


HEAD = "| fault | requests | failed as it must | lost | doubled | no service | well again | replay |"


def _line(row: Row) -> str:
    well = "never" if row.well_s is None else f"{row.well_s:.1f} s"
    cells = (row.requests, row.failed, row.lost, row.doubled, f"{row.unserved_s:.1f} s", well, row.replay)
    return f"| {row.fault} | " + " | ".join(map(str, cells)) + " |"
