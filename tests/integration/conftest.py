"""The fleet that a module's own fixture `up` runs, and a connection to it."""

from collections.abc import AsyncIterator

import pytest

from pointsman.ports import Link
from pointsman_cli.discovery import FleetFile, find_fleet
from tests.support.log_reading import link_to
from tests.support.up import RunningUp


@pytest.fixture
def fleet(up: RunningUp) -> FleetFile:
    return find_fleet(data=up.data)


@pytest.fixture
async def link(fleet: FleetFile) -> AsyncIterator[Link]:
    async with link_to(fleet) as opened:
        yield opened
