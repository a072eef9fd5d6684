"""The fleet that a module's own fixture `up` runs, and a connection to it; a PostgreSQL server; one certificate instead of
all those of this machine."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pointsman.ports import Link
from pointsman_cli.discovery import FleetFile, find_fleet
from tests.support.certificates import Authority
from tests.support.log_reading import link_to
from tests.support.postgres import running_postgres
from tests.support.up import RunningUp


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "unused")


@pytest.fixture(scope="module", autouse=True)
def _one_certificate(authority: Authority) -> Iterator[None]:
    """Importing aiohttp reads all certificates of the machine, twice: a tenth of the CPU time of a process that starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority.file))
        yield


@pytest.fixture
def fleet(up: RunningUp) -> FleetFile:
    return find_fleet(data=up.data)


@pytest.fixture
async def link(fleet: FleetFile) -> AsyncIterator[Link]:
    async with link_to(fleet) as opened:
        yield opened


@pytest.fixture
def hang_ups_end_processes() -> Iterator[None]:
    """Also where whoever runs the tests ignores them, as under nohup: children inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
