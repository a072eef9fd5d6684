"""The fleet that a module's own fixture `up` runs, and a connection to it; a PostgreSQL server."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pointsman.ports import Link
from pointsman_cli.discovery import FleetFile, find_fleet
from tests.support.log_reading import link_to
from tests.support.postgres import running_postgres
from tests.support.up import RunningUp


@pytest.fixture
def fleet(up: RunningUp) -> FleetFile:
    return find_fleet(data=up.data)


@pytest.fixture
async def link(fleet: FleetFile) -> AsyncIterator[Link]:
    async with link_to(fleet) as opened:
        yield opened


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """One server for all tests."""
    with running_postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a database for an archive, of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/archive.sqlite"
    return str(request.getfixturevalue("postgres"))
