"""Children that do not outlive their parent, however it ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def lifeline(last_word: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """What to give as `preexec_fn` to a child that the kernel shall end when the thread that started it ends.

    `last_word`: SIGTERM for a child that has children of its own and ends them, as an engine does. None where the
    kernel cannot do that (it is Linux that can). Start such children from a thread that stays, in a process that has no
    other: between fork and exec the child must not meet a lock that another thread holds.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def hold() -> None:
        prctl(_PR_SET_PDEATHSIG, last_word)
        if os.getppid() != parent:  # it ended before it could be asked for
            os._exit(1)

    return hold
