"""Arguments that no file, host or process can have get one sentence and an exit code, not a traceback."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pointsman.runtime.health import HealthBoard, health_server
from pointsman_cli.main import main
from pointsman_engine_sim.main import main as engine_sim
from pointsman_ingress.main import main as ingress
from pointsman_lab.main import main as lab
from tests.support.commands import written
from tests.support.served_log import ServedLog

LONG = "n" * 300
NOTHING_THERE = ("--nats", "nats://127.0.0.1:1", "--no-console")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "--config", LONG), "File name too long"),
        (("up", "--data", LONG, *NOTHING_THERE), "File name too long"),
        (("up", "--tokenizer", LONG, *NOTHING_THERE), "File name too long"),
        (("up", "--host", "日本\u202e", *NOTHING_THERE), "that is no host name"),
        (("up", "--host", "a..b", *NOTHING_THERE), "cannot listen on a..b"),
        (("up", "--data", "\udcff", *NOTHING_THERE), "its name is not UTF-8"),
        (("fleet", "--from", LONG), "File name too long"),
        (("simulate", "--workload", "chat", "--out", ""), "must not be empty"),
    ],
    ids=lambda value: "",
)
def test_an_odd_argument_is_refused_in_one_sentence(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    told = CliRunner().invoke(main, arguments)

    assert isinstance(told.exception, SystemExit)
    assert told.exit_code in (1, 2)
    assert said in told.output
    assert told.output.count("Error:") == 1


@pytest.mark.parametrize("host", [LONG, "日本\u202e", "\udcff"])
async def test_no_process_listens_on_what_is_no_host(host: str) -> None:
    with pytest.raises(click.ClickException, match=r"cannot listen on .*choose another with --host and --port"):
        await health_server(HealthBoard(), host, 0).serve()


@pytest.mark.parametrize(
    ("process", "arguments", "said"),
    [
        (engine_sim, ("--tokenizer", LONG), "give the directory of the model"),
        (
            engine_sim,
            ("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "gopher://x"}'),
            "gopher://x",
        ),
        (ingress, ("--tokenizer", LONG), "give the directory of the model"),
    ],
    ids=lambda value: "",
)
def test_a_process_that_cannot_start_with_its_settings_says_why(
    process: click.Command, arguments: tuple[str, ...], said: str
) -> None:
    told = CliRunner().invoke(process, [*arguments, "--port", "0"])

    assert told.exit_code == 1
    assert told.output.splitlines()[-1].startswith("Error:")
    assert said in told.output.splitlines()[-1]


@pytest.mark.parametrize(("pool", "code"), [("default", 0), ("another", 2)])
def test_a_bundle_of_another_pool_is_not_shown_as_the_one_asked_for(pool: str, code: int, tmp_path: Path) -> None:
    bundle = written(ServedLog(requests=3).entries, tmp_path)

    told = CliRunner().invoke(main, ["state", "--from", str(bundle), "--pool", pool])

    assert told.exit_code == code
    assert ("is a log of the pool default, not of another" in told.output) == bool(code)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_behind_the_output_is_told(tmp_path: Path) -> None:
    bundle = written(ServedLog(requests=3).entries, tmp_path)
    program = "from pointsman_cli.main import main; main()"

    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", program, "state", "--from", str(bundle)]
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)

    assert (told.returncode, told.stderr) == (1, "Error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [("following", "--seconds", "nan"), ("following", "--batches", "-1")],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_measurement_of_nothing_is_refused(arguments: tuple[str, ...]) -> None:
    told = CliRunner().invoke(lab, arguments)

    assert told.exit_code == 2
    assert f"Invalid value for '{arguments[1]}'" in told.output
