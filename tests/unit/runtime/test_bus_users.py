"""Credentials as files: made once, private, and written down for nats-server."""

import re
import stat
from pathlib import Path

import pytest

from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import ROUTES_FILE, USERS_FILE, Credentials, valid_operator

POOL = PoolName("default")


def worker(name: str) -> BusUser:
    return BusUser(BusRole.WORKER, name, POOL)


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.rglob("*.nk")}


def test_one_more_worker_changes_no_other(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path / "c")
    credentials.make([POOL], workers=[worker("engine-1")], operators=["alice"])
    before = contents(tmp_path)

    credentials.make(workers=[worker("engine-2")])

    after = contents(tmp_path)
    assert set(after) - set(before) == {"engine-2.nk"}
    assert {name: after[name] for name in before} == before
    assert "worker default engine-1" in (tmp_path / "c" / USERS_FILE).read_text()


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    credentials.make([POOL], workers=[worker("engine-1")])
    written = (tmp_path / USERS_FILE).read_text(), contents(tmp_path)
    credentials.make([POOL], workers=[worker("engine-1")])
    credentials.make()

    assert ((tmp_path / USERS_FILE).read_text(), contents(tmp_path)) == written


def test_a_deleted_seed_ends_its_user(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    credentials.make([POOL], workers=[worker("engine-1"), worker("engine-2")])
    credentials.file(worker("engine-1")).unlink()
    credentials.make()

    assert worker("engine-1") not in credentials.users()
    assert "engine-1" not in (tmp_path / USERS_FILE).read_text()


@pytest.mark.parametrize("text", ["", "SU", "no seed at all", "SUAM" * 20])
def test_a_seed_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    credentials.make([POOL], workers=[worker("engine-1")])
    file = credentials.file(worker("engine-1"))
    file.write_text(text)

    with pytest.raises(ValueError, match=f"{file} holds no seed"):
        credentials.make()


def test_no_seed_is_in_the_servers_file_and_all_files_are_private(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path / "c")
    credentials.make([POOL], workers=[worker("engine-1")])
    written = (tmp_path / "c" / USERS_FILE).read_text()

    assert not any(seed.strip() in written for seed in contents(tmp_path).values())
    found = [path for path in (tmp_path / "c").rglob("*") if path.name != USERS_FILE]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o700, 0o600}


def test_a_seed_that_others_could_read_is_closed(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    credentials.make([POOL])
    seed = credentials.file(BusUser(BusRole.SCHEDULER))
    seed.chmod(0o644)
    credentials.make()

    assert stat.S_IMODE(seed.stat().st_mode) == 0o600


def test_another_router_is_named_with_its_pool(tmp_path: Path) -> None:
    credentials, router = Credentials(tmp_path), BusUser(BusRole.ROUTER, "smg", POOL)
    credentials.make([POOL], routers=[router])

    assert credentials.file(router) == tmp_path / "routers" / "default" / "smg.nk"
    assert router in credentials.users()
    assert "router default smg" in (tmp_path / USERS_FILE).read_text()


def test_an_admin_is_made_only_for_who_asks_and_stays(tmp_path: Path) -> None:
    credentials, admin = Credentials(tmp_path), BusUser(BusRole.ADMIN, "root")
    credentials.make([POOL])
    before = credentials.users()
    credentials.make([POOL], admins=["root"])
    credentials.make([POOL])

    assert not any(user.role is BusRole.ADMIN for user in before)
    assert credentials.file(admin) == tmp_path / "admins" / "root.nk"
    assert set(credentials.users()) == {*before, admin}


@pytest.mark.parametrize(
    ("name", "valid"), [("alice", True), ("admin", True), ("reader", False), ("A b", False), ("a.b", False)]
)
def test_an_operator_is_called_like_no_role(name: str, *, valid: bool) -> None:
    assert valid_operator(name) is valid


def test_the_password_of_a_cluster_is_made_once_and_private(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path / "c")
    credentials.make_routes(["nats-1:6222", "[fd00::5]:6222"])
    file = tmp_path / "c" / ROUTES_FILE
    first = file.read_text()
    credentials.make_routes(["nats-1:6222", "[fd00::5]:6222", "nats-3:7000"])
    again = file.read_text()
    Credentials(tmp_path / "other").make_routes(["nats-1:6222"])

    password = re.findall(r'password: "(.+)"', first)
    assert len(password[0]) == 64
    assert re.findall(r"nats://route:(\w+)@(\S+)\"", again) == [
        (password[0], server) for server in ("nats-1:6222", "[fd00::5]:6222", "nats-3:7000")
    ]
    assert password[0] not in (tmp_path / "other" / ROUTES_FILE).read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
