"""What a fleet writes is its owner's alone, also where an earlier version left it open."""

import asyncio
import os
import stat
import sys
from pathlib import Path

import click
import pytest

from pointsman.adapters.child_process import spawn
from pointsman.adapters.owner_only import is_open_to_others, make_owner_only, tighten, write_whole
from pointsman.runtime.engine_command import engine_environment
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.public_secret import note_public_secret
from pointsman.runtime.settings import PUBLIC_SECRET
from pointsman_cli.discovery import LOCK_FILE, data_dir_held
from pointsman_recorder.archive import open_archive


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_and_what_is_in_it_are_taken_from_others(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "logs").mkdir(parents=True)
    (data / "secret").touch()
    for path, was in ((data, 0o755), (data / "logs", 0o775), (data / "secret", 0o644)):
        path.chmod(was)
    outside = tmp_path / "outside"
    outside.touch(mode=0o644)
    outside.chmod(0o644)
    (data / "link").symlink_to(outside)

    assert make_owner_only(data)

    assert [mode(path) for path in (data, data / "logs", data / "secret")] == [0o700, 0o700, 0o600]
    assert mode(outside) == 0o644
    assert not make_owner_only(data)


def test_a_file_is_replaced_whole_and_is_its_owners_alone(tmp_path: Path) -> None:
    file, left = tmp_path / "secret", tmp_path / f".secret.{os.getpid()}"
    for path in (file, left):  # `left`: by a process that was killed while it wrote
        path.write_text("before")
        path.chmod(0o644)

    write_whole(file, b"after")

    assert [(path.name, path.read_text(), mode(path)) for path in tmp_path.iterdir()] == [("secret", "after", 0o600)]


def test_a_data_directory_is_closed_and_one_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    new, earlier, shared = tmp_path / "new", tmp_path / "earlier", tmp_path / "shared"
    for directory in (earlier, shared):
        directory.mkdir()
        directory.chmod(0o755)
    (earlier / LOCK_FILE).touch()
    (earlier / LOCK_FILE).chmod(0o644)

    for directory, expected in ((new, 0o700), (earlier, 0o700), (shared, 0o755)):
        with data_dir_held(directory):
            assert mode(directory) == expected
            assert mode(directory / LOCK_FILE) == 0o600
    assert is_open_to_others(shared)


def test_a_second_start_leaves_what_others_have_in_the_directory_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "theirs").touch()
    (tmp_path / "theirs").chmod(0o664)

    for _start in range(2):
        with data_dir_held(tmp_path):
            pass

    assert [mode(path) for path in (tmp_path, tmp_path / "theirs", tmp_path / LOCK_FILE)] == [0o755, 0o664, 0o600]


def test_an_archive_is_its_owners_alone(tmp_path: Path) -> None:
    file, old = tmp_path / "made" / "archive.sqlite", tmp_path / "old.sqlite"
    old.touch()
    old.chmod(0o644)

    async def prepared(path: Path) -> list[int]:
        async with open_archive(f"sqlite+aiosqlite:///{path}") as archive:
            await archive.prepare()
            return [mode(found) for found in path.parent.glob(f"{path.name}*")]

    assert set(asyncio.run(prepared(file))) == {0o600}
    assert mode(file.parent) == 0o700
    assert set(asyncio.run(prepared(old))) == {0o600}
    assert not tighten(old)


def test_an_engine_inherits_no_setting_of_the_deployment(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"], "HF_TOKEN": "t", "POINTSMAN_SECRET": "s", "POINTSMAN_ENGINE_API_KEY": "k",
        "POINTSMAN_NATS": "nats://u:p@h", "POINTSMAN_VLLM_SEED": "1", "POINTSMAN_LOG_LEVEL": "debug",
    }  # fmt: skip
    shown = [sys.executable, "-c", "import os; print(sorted(n for n in os.environ if n[:3] in ('POI', 'HF_')))"]

    process = spawn(shown, output=tmp_path / "out", environment=engine_environment(environment))

    assert process.wait() == 0
    assert (tmp_path / "out").read_text().strip() == "['HF_TOKEN', 'POINTSMAN_LOG_LEVEL', 'POINTSMAN_VLLM_SEED']"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_public_secret_degrades_a_service_on_loopback(host: str) -> None:
    board = HealthBoard()

    note_public_secret(PUBLIC_SECRET, host, board)

    assert board.ready
    assert "public" in board.degraded_parts["secret"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway"])
def test_the_public_secret_is_refused_beyond_loopback(host: str) -> None:
    with pytest.raises(click.UsageError, match="a secret of your own"):
        note_public_secret(PUBLIC_SECRET, host, HealthBoard())
    own = HealthBoard()
    note_public_secret("own", host, own)
    assert own.whole
