"""A nats-server that demands certificates: right ones get in, others are told why not, and may be mended while running."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import Identity
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import Link
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import NATS_PART, open_link
from pointsman.runtime.settings import DeploymentSettings
from tests.integration.test_bus_users import IDS, subjects
from tests.support.bus import USERS, LockedBus, beyond, granted, start_bus
from tests.support.certificates import Authority, Certificate
from tests.support.waiting import eventually

SCHEDULER, READER = BusUser(BusRole.SCHEDULER), BusUser(BusRole.READER)


@dataclass(frozen=True, slots=True)
class Certificates:
    ours: Authority
    foreign: Authority
    right: Certificate
    expired: Certificate
    wrong: Certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    directory = tmp_path_factory.mktemp("certificates")
    ours, foreign = Authority(directory, "ours"), Authority(directory, "foreign")
    expired = ours.issue("expired", ends=-timedelta(days=1))
    return Certificates(ours, foreign, ours.issue("right"), expired, foreign.issue("wrong"))


@pytest.fixture(scope="module")
def bus(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedBus]:
    own = certificates.ours.issue("server")
    tls = f'tls {{cert_file: "{own.certificate}", key_file: "{own.key}", ca_file: "{certificates.ours.file}", verify: true}}\n'
    identity = identity_of(certificates.right, certificates.ours)
    started = asyncio.run(start_bus(tmp_path_factory.mktemp("bus"), tls=tls, identity=identity))
    yield started
    asyncio.run(started.server.stop())


def identity_of(certificate: Certificate | None, authority: Authority) -> Identity:
    if certificate is None:
        return Identity(ca=str(authority.file))
    return Identity(ca=str(authority.file), certificate=str(certificate.certificate), key=str(certificate.key))


@contextlib.asynccontextmanager
async def process(bus: LockedBus, identity: Identity, board: HealthBoard) -> AsyncIterator[Link]:
    """As a service connects, with settings."""
    settings = DeploymentSettings(
        nats=bus.url,
        nats_credentials=identity.credentials or str(bus.credentials.file(SCHEDULER)),
        nats_ca=identity.ca,
        nats_certificate=identity.certificate,
        nats_key=identity.key,
    )
    async with open_link(settings, ScaledClock(), board, name="test", user=SCHEDULER) as link:
        yield link


@pytest.mark.parametrize("user", USERS, ids=IDS)
async def test_rights_are_the_same_over_tls(bus: LockedBus, user: BusUser) -> None:
    async with bus.raw(user) as raw:
        assert await raw.refused_to_publish(subjects()) == beyond(granted(user).publish, subjects())
        assert await raw.refused_to_hear(subjects()) == beyond(granted(user).subscribe, subjects())


async def test_a_right_certificate_gets_in(bus: LockedBus, certificates: Certificates) -> None:
    board = HealthBoard()
    async with process(bus, bus.identity, board) as link:
        await eventually(lambda: link.commands.connected)
        await eventually(lambda: board.whole)


@pytest.mark.parametrize(
    ("which", "told"),
    [
        ("wrong", "does it accept our certificate?"),
        ("expired", "expired on "),
        ("none", "certificate required"),
        ("foreign server", "the nats-server's certificate is not accepted"),
        ("missing file", "cannot be used: "),
        ("no seed", "cannot be used: "),
        ("foreign seed", "refuses our credentials"),
    ],
)
async def test_another_identity_is_told_why_it_stays_out(
    bus: LockedBus, certificates: Certificates, tmp_path: Path, which: str, told: str
) -> None:
    other = certificates.foreign
    strange = tmp_path / "seed.nk"
    strange.write_text("not a seed\n" if which == "no seed" else _seed_of_another_deployment(tmp_path))
    identity = {
        "wrong": identity_of(certificates.wrong, certificates.ours),
        "expired": identity_of(certificates.expired, certificates.ours),
        "none": identity_of(None, certificates.ours),
        "foreign server": identity_of(certificates.right, other),
        "missing file": replace(bus.identity, key=str(tmp_path / "nothing")),
        "no seed": replace(bus.identity, credentials=str(strange)),
        "foreign seed": replace(bus.identity, credentials=str(strange)),
    }[which]
    board = HealthBoard()
    async with process(bus, identity, board) as link:
        await eventually(lambda: told in board.missing_parts[NATS_PART], what=told)
        assert not link.commands.connected
        assert not board.ready


def _seed_of_another_deployment(directory: Path) -> str:
    from pointsman.runtime.bus_users import Credentials

    another = Credentials(directory / "another")
    another.make()
    return another.file(SCHEDULER).read_text()


async def test_a_certificate_that_is_renewed_is_used_without_a_restart(
    bus: LockedBus, certificates: Certificates, tmp_path: Path
) -> None:
    files = Certificate(tmp_path / "own.pem", tmp_path / "own.key")
    shutil.copy(certificates.expired.certificate, files.certificate)
    shutil.copy(certificates.expired.key, files.key)
    board = HealthBoard()
    async with process(bus, identity_of(files, certificates.ours), board) as link:
        await eventually(lambda: "expired on" in board.missing_parts[NATS_PART])
        shutil.copy(certificates.right.key, files.key)
        shutil.copy(certificates.right.certificate, files.certificate)
        await eventually(lambda: link.commands.connected and board.whole)


async def test_a_server_without_tls_is_not_spoken_to_where_tls_is_demanded(
    certificates: Certificates, tmp_path: Path
) -> None:
    open_bus = await start_bus(tmp_path)
    try:
        board = HealthBoard()
        async with process(open_bus, identity_of(None, certificates.ours), board) as link:
            await eventually(lambda: "offers no TLS" in board.missing_parts[NATS_PART])
            assert not link.commands.connected
    finally:
        await open_bus.server.stop()
