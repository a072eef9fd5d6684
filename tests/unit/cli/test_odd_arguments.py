"""Arguments that no file, host or process can have get one sentence and an exit code, not a traceback."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pointsman.runtime.health import HealthBoard, health_server
from pointsman_cli.main import main

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
