"""Where a process logs to: nobody reads it, somebody reads again, or it was closed."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

LOGS = "from pointsman.runtime.structured_logs import configure_logging; configure_logging('info', 'text')\n"
LINES = 2_000
SECONDS_MAX = 30


def started(says: str, **options: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", LOGS + says], **options)  # type: ignore[call-overload, no-any-return]


def test_a_log_that_nobody_reads_holds_nothing_up_and_tells_what_was_lost_when_it_is_read_again() -> None:
    floods = (
        f"import structlog; log = structlog.get_logger()\nfor n in range({LINES}): log.info(str(n), text='ö' * 100)\n"
    )
    goes_on = "print('went on', flush=True); input(); log.info('read_again')"
    with ExitStack() as opened:
        process = opened.enter_context(
            started(floods + goes_on, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        opened.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"went on\n"
        kept = os.read(process.stderr.fileno(), 1 << 20)
        process.stdin.write(b"\n")
        process.stdin.flush()
        rest = process.stderr.read().decode()

    whole = kept.decode().count("\n")
    assert 0 < whole < LINES
    assert "read_again" in rest
    assert f"lost={LINES - whole}\n" in rest


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_were_closed_are_no_sockets_later(closed: str) -> None:
    opens = "import os, sys; number = os.open('/dev/zero', os.O_RDONLY); print('out'); sys.exit(number)"
    command = f'exec "$0" -c "$1" {closed}'

    assert subprocess.run(["sh", "-c", command, sys.executable, LOGS + opens], check=False).returncode == 3
