"""Finding a fleet: by data directory, by NATS URL, or because it is the only one here."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from pointsman_cli import discovery
from pointsman_cli.discovery import (
    FLEET_FILE,
    FleetFile,
    FleetInUseError,
    FleetProcess,
    NoFleetError,
    SeveralFleetsError,
    announce,
    data_dir_held,
    find_fleet,
    fleet_settings,
    read_fleet_file,
    running_fleets,
)
from pointsman_cli.options import as_given, fleet_options

StartFleet = Callable[[str], FleetFile]


@pytest.fixture(autouse=True)
def own_state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[StartFleet]:
    """Starts fleets that hold their data directory as `pointsman up` does, until the test ends."""
    with ExitStack() as stack:

        def start(name: str) -> FleetFile:
            data = tmp_path / name
            stack.enter_context(data_dir_held(data))
            fleet = fleet_in(data)
            announce(fleet)
            return fleet

        yield start


def fleet_in(data: Path) -> FleetFile:
    secret = data / "secret"
    secret.write_text(f"secret of {data.name}\n")
    return FleetFile(
        nats=f"nats://127.0.0.1/{data.name}",
        ingress="http://127.0.0.1:8080",
        pool="default",
        model="m",
        policy="dualmap",
        speed=20.0,
        slo_ttft=5.0,
        block_tokens=32,
        secret_file=str(secret),
        data=str(data),
        pid=1,
        started_at=1.0,
        processes=[FleetProcess("engine-1", "engine", 2, "http://127.0.0.1:8000")],
    )


def test_the_only_fleet_on_this_machine_needs_no_name(started: StartFleet) -> None:
    fleet = started("a")

    assert find_fleet() == fleet


@pytest.mark.parametrize("place", ["-", "sqlite:///archive.sqlite", "incident.pmlog"])
def test_a_recorded_log_is_no_fleet_and_the_error_says_what_reads_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "incident.pmlog").touch()

    with pytest.raises(click.BadParameter, match=r"is a recorded log.*explain") as refused:
        fleet_settings(place)

    assert refused.value.exit_code == 2


def test_a_pool_that_the_credentials_do_not_open_is_refused_with_those_there_are(started: StartFleet) -> None:
    fleet = msgspec.structs.replace(started("a"), credentials="credentials", further={"small": "s"})

    with pytest.raises(click.BadParameter, match="no pool nonsense; this fleet has: default, small"):
        fleet.settings("nonsense")


def test_without_a_fleet_the_error_names_the_one_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_NATS", "nats://user:password@10.0.0.5")

    with pytest.raises(NoFleetError) as missing:
        find_fleet()

    assert '--from "$POINTSMAN_NATS"' in missing.value.message
    assert "password" not in missing.value.message


def test_advised_commands_name_the_fleet_as_given() -> None:
    @click.command("look")
    @fleet_options
    def look(place: str | None, pool: str | None) -> None:
        print(f"pointsman fleet{as_given()} of {place} {pool}")

    run = CliRunner().invoke(look, ["--from", "my data", "--pool", "small"])

    assert run.output.startswith("pointsman fleet --from 'my data' --pool small of")
    assert as_given() == ""


def test_a_fleet_is_found_by_its_data_directory_and_by_its_nats(started: StartFleet, tmp_path: Path) -> None:
    first, second = started("a"), started("b")

    assert find_fleet(data=tmp_path / "a") == first
    assert find_fleet(nats=second.nats) == second


def test_a_pointer_that_cannot_be_read_hides_no_other_fleet(started: StartFleet, tmp_path: Path) -> None:
    fleet = started("a")
    pointers = tmp_path / "state" / "pointsman" / "fleets"
    (pointers / "0.path").mkdir()
    (pointers / "1.path").write_bytes(b"\xff")
    (pointers / "2.path").write_bytes(b"/x\0")

    assert find_fleet() == fleet


def test_a_data_directory_of_somebody_else_is_told_by_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_running(_data: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(discovery, "is_running", is_running)
    with pytest.raises(NoFleetError, match=f"{tmp_path} belongs to {tmp_path.owner()}"):
        find_fleet(data=tmp_path)


def test_several_fleets_are_listed_with_what_to_type(started: StartFleet, tmp_path: Path) -> None:
    started("a")
    started("b")

    with pytest.raises(SeveralFleetsError) as caught:
        find_fleet()

    assert f"--from {tmp_path / 'a'}" in caught.value.message
    assert f"--from {tmp_path / 'b'}" in caught.value.message


def test_without_a_fleet_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(NoFleetError, match="pointsman up"):
        find_fleet()
    with pytest.raises(NoFleetError, match=f"pointsman up --data {tmp_path}"):
        find_fleet(data=tmp_path)


def test_a_recorded_log_is_no_fleet(tmp_path: Path) -> None:
    recorded = tmp_path / "fleet.pmlog"
    recorded.touch()

    with pytest.raises(NoFleetError, match="no fleet runs"):
        find_fleet(data=recorded)


def test_a_fleet_that_died_without_a_word_is_not_found_and_its_pointer_goes(tmp_path: Path) -> None:
    data = tmp_path / "a"
    data.mkdir()
    announce(fleet_in(data))

    assert running_fleets() == []
    assert not list((tmp_path / "state").rglob("*.path"))


def test_a_data_directory_serves_one_fleet_at_a_time(started: StartFleet, tmp_path: Path) -> None:
    started("a")

    with pytest.raises(FleetInUseError, match="in use by the fleet that pid 1 runs"), data_dir_held(tmp_path / "a"):
        pass


def test_a_fleet_that_ends_takes_its_traces_away(tmp_path: Path) -> None:
    with data_dir_held(tmp_path):
        announce(fleet_in(tmp_path))

    assert not (tmp_path / FLEET_FILE).exists()
    with data_dir_held(tmp_path):
        pass


def test_the_fleet_file_names_the_secret_but_does_not_hold_it(started: StartFleet, tmp_path: Path) -> None:
    fleet = started("a")

    assert "secret of a" not in (tmp_path / "a" / FLEET_FILE).read_text()
    assert fleet.settings().secret == "secret of a"
    assert read_fleet_file(tmp_path / "a") == fleet


def test_the_keys_of_a_further_pool_are_of_its_own_size(started: StartFleet, tmp_path: Path) -> None:
    announce(
        msgspec.structs.replace(
            started("a"), further={"coder": "m2", "poet": "m3"}, further_block_tokens={"coder": 128}
        )
    )

    told = [fleet_settings(tmp_path / "a", pool) for pool in (None, "coder", "poet")]
    assert [(settings.pool, settings.block_tokens) for settings in told] == [
        ("default", 32),
        ("coder", 128),
        ("poet", 32),
    ]


def test_a_fleet_elsewhere_is_joined_by_its_nats_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_SPEED", "7")

    settings = fleet_settings("nats://elsewhere:4222", "gpu")

    assert (settings.nats, settings.pool, settings.speed) == ("nats://elsewhere:4222", "gpu", 7.0)


def test_a_fleet_that_is_starting_is_said_to_be_starting(tmp_path: Path) -> None:
    with data_dir_held(tmp_path / "a"):
        for data in (None, tmp_path / "a"):
            with pytest.raises(NoFleetError, match=r"the fleet of .*/a is still starting; try again in a moment"):
                find_fleet(data=data)

    with pytest.raises(NoFleetError, match="start one with: pointsman up"):
        find_fleet()


def test_a_fleet_that_is_starting_hides_no_other(started: StartFleet, tmp_path: Path) -> None:
    fleet = started("b")

    with data_dir_held(tmp_path / "a"):
        assert find_fleet() == fleet


def test_what_a_killed_fleet_left_is_not_taken_for_the_one_that_starts(tmp_path: Path) -> None:
    data = tmp_path / "a"
    data.mkdir()
    announce(fleet_in(data))

    with data_dir_held(data), pytest.raises(NoFleetError, match="still starting"):
        find_fleet(data=data)


def test_an_empty_name_is_not_the_current_directory() -> None:
    with pytest.raises(click.BadParameter, match="is empty; name a data directory or a NATS URL"):
        fleet_settings("")
