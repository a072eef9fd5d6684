"""Settings: flag over environment over the service's table over the file's top over the default."""

from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pointsman.runtime.settings import FleetSettings, ProcessSettings, command, environment, setting


@dataclass(frozen=True, kw_only=True)
class OrchestraSettings(FleetSettings, ProcessSettings):
    tempo: int = setting(60, "Beats a minute.")
    key: str = setting("c", "What to play in.", choices=("c", "g"))
    players: tuple[str, ...] = setting((), "Who plays.")
    encore: bool = setting(False, "Play on.")
    conductor: str | None = setting(None, "Who leads.")
    ticket: str = setting("", "Lets in.", secret=True)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.toml"
    file.write_text('tempo = 70\npool = "blue"\nkv_endpoint = "of another service"\n[orchestra]\ntempo = 80\n')
    return file


def run(*arguments: str, **variables: str) -> tuple[Result, OrchestraSettings | None]:
    seen: list[OrchestraSettings] = []

    @command(OrchestraSettings, name="orchestra", table="orchestra")
    def main(settings: OrchestraSettings) -> None:
        """Play."""
        seen.append(settings)

    result = CliRunner(env=variables).invoke(main, list(arguments))
    return result, seen[0] if seen else None


def settled(*arguments: str, **variables: str) -> OrchestraSettings:
    result, settings = run(*arguments, **variables)
    assert settings is not None, result.output
    return settings


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--port", "65536", "must be at least 0 and at most 65535, not 65536"),
        ("--speed", "0", "must be above 0, not 0.0"),
        ("--block-tokens", "0", "must be at least 1 and at most 65536, not 0"),
        ("--block-tokens", "65537", "must be at least 1 and at most 65536, not 65537"),
        ("--speed", "1e31", "must be a finite number, not 1e+31"),
        ("--pool", "A b", "lower-case letters"),
        ("--secret", "s" * 65, "has 65 bytes, and may have 64"),
        ("--secret", "s\udcff", "is not UTF-8"),
        ("--nats", "nats://[::1:4222", "is no URL such as nats://host:4222"),
        ("--nats", "nats://a:4222,nats://b:port", "is no URL such as nats://host:4222"),
        ("--nats", "http://a:4222", "is no URL such as nats://host:4222"),
    ],
)
def test_what_no_process_could_run_with_is_refused_by_its_flag(flag: str, value: str, says: str) -> None:
    result, settings = run(flag, value)

    assert settings is None
    assert result.exit_code == 2
    assert flag in result.output
    assert says in result.output


def test_a_flag_wins_over_the_environment_the_table_the_top_and_the_default(config: Path) -> None:
    file = ("--config", str(config))

    assert settled().tempo == 60
    assert settled(*file).tempo == 80
    assert settled(*file, POINTSMAN_TEMPO="90").tempo == 90
    assert settled(*file, "--tempo", "100", POINTSMAN_TEMPO="90").tempo == 100


def test_keys_at_the_top_of_the_file_are_for_every_service_that_knows_them(config: Path) -> None:
    assert settled("--config", str(config)).pool == "blue"
    assert settled(POINTSMAN_CONFIG=str(config)).pool == "blue"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[orchestra]\ntemp = 1", "[orchestra] has no setting temp; did you mean tempo?"),
        ("[orchestra]\nconfig = 'a.toml'", "[orchestra] has no setting config"),
        ("[orchestr]\ntempo = 1", "there is no table [orchestr]; did you mean [orchestra]?"),
        ("[ingres]\nrequire_keys = true", "there is no table [ingres]; did you mean [ingress]?"),
        ("[xyz]\n", "there is no table [xyz]; there are [console], [engine-sim], [ingress]"),
        ("require_key = true", "no process has a setting require_key; did you mean require_keys?"),
        ("xyz = true", "no process has a setting xyz; see --help"),
        ("ingress = 3", "ingress is a table; write [ingress] on a line of its own"),
        ("[[ingress]]\nrequire_keys = true", "ingress is a table; write [ingress] on a line of its own"),
        ("[tempo]\n", "there is no table [tempo]"),
        ("tempo = ", "is not valid TOML"),
        ("[orchestra]\ntempo = 'fast'", "'fast' is not a valid integer"),
        ("[orchestra]\nkey = 'h'", "'h' is not one of 'c', 'g'"),
        ("encore = 1", "encore must be true or false"),
        ("encore = [true]", "encore must be true or false"),
        ("encore = 'nein'", "'nein' is not a valid boolean"),
        ("tempo = [60]", "tempo must be a number"),
        ("conductor = ['ann', 'bob']", "conductor must be a text in quotes"),
        ("conductor = true", "conductor must be a text in quotes"),
        ("conductor = 2026-11-29", "conductor must be a text in quotes"),
        ("pool = 1.5", "pool must be a text in quotes"),
        ("nats = [4222]", "nats must be a text in quotes, or a list of them"),
        ("players = 5", "players must be a list of texts in quotes"),
        ("players = ['ann', 5]", "players must be a list of texts in quotes"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_and_told_why(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(content)

    result, settings = run("--config", str(file))

    assert settings is None
    assert result.exit_code == click.UsageError.exit_code
    assert complaint in " ".join(result.output.replace("│", " ").split())


def test_of_a_directory_all_files_count_and_the_last_wins(config: Path) -> None:
    (config.parent / "a-image.toml").write_text('host = "0.0.0.0"\ntempo = 50\npool = "red"\n')
    (config.parent / "notes.txt").write_text("no TOML")

    settings = settled("--config", str(config.parent))

    assert (settings.host, settings.pool, settings.tempo) == ("0.0.0.0", "blue", 80)


def test_an_empty_directory_leaves_the_defaults(tmp_path: Path) -> None:
    assert settled("--config", str(tmp_path)).tempo == 60


def test_a_file_of_a_directory_that_cannot_be_followed_is_named(config: Path) -> None:
    (config.parent / "own.toml").write_text("[orchestra]\ntempi = 3\n")

    result, settings = run("--config", str(config.parent))

    assert settings is None
    assert "own.toml: [orchestra] has no setting tempi" in result.output


def test_a_file_that_is_not_there_is_refused() -> None:
    result, settings = run("--config", "/nonexistent/fleet.toml")

    assert settings is None
    assert "cannot read /nonexistent/fleet.toml" in result.output


def test_settings_handed_over_as_environment_arrive_unchanged() -> None:
    settings = OrchestraSettings(tempo=3, players=("ann", "bob"), encore=True, speed=20.0, conductor="cy")

    received = settled(**environment(vars(settings)))

    assert received == settings


def test_what_is_none_is_not_handed_over() -> None:
    assert environment({"conductor": None, "tempo": 3}) == {"POINTSMAN_TEMPO": "3"}


def test_help_teaches_every_setting_with_its_variable_and_hides_the_secret() -> None:
    output = run("--help", POINTSMAN_SECRET="hush")[0].output

    assert "POINTSMAN_TEMPO" in output
    assert "--encore / --no-encore" in output
    assert "pointsman-development" not in output
    assert "hush" not in output


def test_a_server_is_shown_without_what_proves_who_asks() -> None:
    settings = FleetSettings(nats="nats://pointsman:hunter2@a:4222,nats://s3cret@b:4222,tls://c:4222")

    assert settings.nats_shown == "nats://a:4222,nats://b:4222,tls://c:4222"


@pytest.mark.parametrize(
    "text",
    ["nats://u:hunter2/x@a:4222", "nats://u:hunter2,x@a:4222", "u:hunter2@a:4222", "nats://b:4222,hunter2,@a:4222"],
)
def test_nor_where_that_is_written_in_another_way(text: str) -> None:
    refusal, settings = run("--nats", text)

    assert "hunter2" not in FleetSettings(nats=text).nats_shown
    assert "a:4222" in FleetSettings(nats=text).nats_shown
    assert "hunter2" not in refusal.output
    assert settings is None or text.startswith("u:")


def test_a_list_may_be_one_text_in_the_file_and_a_text_a_whole_number(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('players = "ann"\npool = 5\nencore = "yes"\ntempo = "70"\n')

    settings = settled("--config", str(file))

    assert (settings.players, settings.pool, settings.encore, settings.tempo) == (("ann",), "5", True, 70)


def test_servers_may_be_a_list_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('nats = ["nats://a", "nats://b:4223"]\n')

    assert settled("--config", str(tmp_path / "fleet.toml")).nats == "nats://a,nats://b:4223"


def test_a_server_without_a_scheme_is_one_of_nats() -> None:
    assert settled("--nats", "a, b:4223").nats == "nats://a,nats://b:4223"


def test_a_secret_is_the_same_from_a_variable_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(" one \n")

    from_file = settled(POINTSMAN_SECRET_FILE=str(tmp_path / "secret")).secret
    assert from_file == settled(POINTSMAN_SECRET=" one \n").secret == "one"
    assert settled(POINTSMAN_SECRET="s" * 64).secret == "s" * 64


def test_a_secret_may_stand_in_a_file_and_the_variable_itself_wins(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from a file\n")

    assert settled(POINTSMAN_SECRET_FILE=str(file)).secret == "from a file"
    assert settled(POINTSMAN_SECRET_FILE=str(file), POINTSMAN_SECRET="given").secret == "given"
    assert settled(POINTSMAN_TEMPO_FILE=str(file)).tempo == 60


def test_a_secrets_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result, settings = run(POINTSMAN_SECRET_FILE=str(tmp_path / "nothing"))

    assert settings is None
    assert "POINTSMAN_SECRET_FILE" in result.output


@pytest.mark.parametrize("flag", ["--secret", "--config", "--host"])
def test_an_empty_secret_or_path_or_address_is_refused(flag: str) -> None:
    result, settings = run(f"{flag}=")

    assert settings is None
    assert result.exit_code == 2
    assert f"{flag}" in result.output


def test_an_empty_secret_is_refused_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("\n")
    (tmp_path / "fleet.toml").write_text('secret = ""\n')

    for result, settings in (
        run(POINTSMAN_SECRET_FILE=str(tmp_path / "secret")),
        run(POINTSMAN_TICKET_FILE=str(tmp_path / "secret")),
        run("--config", str(tmp_path / "fleet.toml")),
    ):
        assert settings is None
        assert result.exit_code == 2
        assert "empty" in result.output


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("tempo = 2.7", "2.7 is not a whole number"),
        ("tempo = true", "true is not a whole number"),
        ("speed = true", "true is not a number"),
        ("speed = nan", "must be a finite number, not nan"),
        ("speed = inf", "must be a finite number, not inf"),
        ('encore = " "', "must be true or false, not blank"),
    ],
)
def test_a_value_of_a_file_that_does_not_fit_is_refused_with_the_name_of_the_file(
    tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / "fleet.toml").write_text(content)

    result, settings = run("--config", str(tmp_path / "fleet.toml"))

    assert settings is None
    assert f"{tmp_path / 'fleet.toml'}: {content.split()[0]}: {complaint}" in result.output


@pytest.mark.parametrize(("given", "meant"), [("", False), ("on", True), ("0", False)])
def test_a_switch_in_the_environment_is_off_only_where_something_says_so(given: str, meant: bool) -> None:
    result, settings = run(POINTSMAN_ENCORE=" ")

    assert settled(POINTSMAN_ENCORE=given).encore == meant
    assert settings is None
    assert "'POINTSMAN_ENCORE'): must be true or false, not blank" in result.output
