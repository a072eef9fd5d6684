"""Files that commands write."""

from pathlib import Path

import click
import pytest

from pointsman_cli.output_file import OUTPUT_FILE, write_json


def test_the_directory_of_a_report_is_made(tmp_path: Path) -> None:
    write_json(tmp_path / "made" / "report.json", {"found": [1]})

    assert (tmp_path / "made" / "report.json").read_text() == '{\n  "found": [\n    1\n  ]\n}\n'


@pytest.mark.parametrize("name", ["report.json", "deep/report.json"])
def test_what_cannot_be_written_is_said_and_not_thrown(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(click.ClickException, match=r"cannot write .*: Not a directory"):
        write_json(tmp_path / "file" / name, {})


def test_a_file_that_could_not_be_written_is_refused_before_the_work_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert OUTPUT_FILE(str(tmp_path / "new" / "report.json")) == tmp_path / "new" / "report.json"
    with pytest.raises(click.BadParameter, match="file is no directory that can be written to"):
        OUTPUT_FILE(str(tmp_path / "file" / "report.json"))
