"""What commands read and say, in the test's own process."""

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pointsman.ports import LogEntry
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.entries import Header
from pointsman_cli.main import main


def written(entries: Sequence[LogEntry], directory: Path, name: str = "log.pmlog") -> Path:
    """A bundle of the whole log."""
    header = Header(pool="default", last=entries[-1].sequence, entries=len(entries))
    write_bundle(directory / name, header, entries)
    return directory / name


def told_by(*command: str, exit_codes: Container[int] = (0,)) -> dict[str, Any]:
    """What a command says with `--json`. `exit_codes`: it ends with one of these; 1 is a doctor's that finds something
    serious."""
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code in exit_codes, result.output[-3000:]
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
