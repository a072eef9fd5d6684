import os
import signal
import sys
from typing import NoReturn

import pytest

from pointsman.adapters.child_process import described_exit, end, spawn


def test_what_has_ended_but_was_not_waited_for_is_killed_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS answers EPERM for a process group of which only ended processes are left."""

    def refused(*_: object) -> NoReturn:
        raise PermissionError

    process = spawn([sys.executable, "-c", ""])
    monkeypatch.setattr(os, "killpg", refused)
    end(process, signal.SIGTERM, 30.0)

    assert process.returncode is not None


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by SIGKILL"), (-37, "was killed by signal 37")])
def test_most_real_time_signals_have_no_name(code: int, how: str) -> None:
    assert described_exit(code) == how
