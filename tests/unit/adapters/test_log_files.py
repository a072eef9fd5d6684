"""A child that writes without end cannot fill the disk with its log."""

import sys
from pathlib import Path

from pointsman.adapters import log_files
from pointsman.adapters.child_process import spawn
from pointsman.adapters.log_files import cut_if_large


def test_a_log_that_grows_too_large_is_cut_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    chatty = (
        "import sys\nfor n in range(60000): print('line', n, 'x' * 80); sys.stdout.flush() if n % 1000 == 0 else None"
    )
    process = spawn([sys.executable, "-c", chatty], output=log)
    largest = cuts = 0
    while process.poll() is None:
        largest = max(largest, log.stat().st_size)
        cuts += cut_if_large(log, 200_000)
    cuts += cut_if_large(log, 200_000)

    assert cuts > 2
    assert log.stat().st_size <= 200_000
    assert log.read_bytes()[:1] != b"\0"  # it appends: no hole where the old lines were
    assert (tmp_path / "x.log.1").stat().st_size <= log_files.KEPT_BYTES


def test_the_end_of_a_large_log_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"begin" + b"." * 300 + b"end")

    assert not cut_if_large(log, 1000)
    assert cut_if_large(log, 100)
    assert log.read_bytes() == b""
    assert (tmp_path / "x.log.1").read_bytes().endswith(b"end")
