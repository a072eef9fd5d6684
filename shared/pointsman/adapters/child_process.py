"""Starts child processes that end with their parent."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pointsman.primitives import Seconds

_PR_SET_PDEATHSIG = 1


def spawn(
    command: Sequence[str],
    *,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    session: bool = False,
    parent_death: signal.Signals | None = signal.SIGKILL,
) -> "subprocess.Popen[bytes]":
    """Both outputs are appended to `output` (None: inherited). `parent_death`: the signal when the starting thread
    ends; SIGTERM for a program that ends its own children, None for one that lives on. Raises OSError."""
    with ExitStack() as files:
        log = files.enter_context(output.open("ab")) if output is not None else None
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log is not None else None,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=session,
            process_group=None if session else 0,
            preexec_fn=None if parent_death is None else die_with_parent(parent_death),
        )


def end(process: "subprocess.Popen[bytes]", number: signal.Signals, seconds_max: Seconds) -> None:
    """Send the signal, kill after `seconds_max`, then kill the rest of the process group. Blocks."""
    process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds_max)
    kill_group(process)
    process.wait()


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only ended processes are left
        os.killpg(process.pid, signal.SIGKILL)


def described_exit(code: int, last_words: str = "") -> str:
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{how}: {last_words}" if last_words else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """Returns a `preexec_fn` that makes the kernel send `number` when the starting thread ends; None outside Linux.
    Call it from a thread that stays, in a process without other threads: the child could deadlock on their locks."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent ended before the request
            os._exit(1)

    return request_signal
