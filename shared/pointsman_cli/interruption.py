"""Ctrl-C in a command: its exit code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED_EXIT_CODE = 130


@contextmanager
def interruptible(*, endless: bool = False) -> Iterator[None]:
    """Ctrl-C ends the process with INTERRUPTED_EXIT_CODE; with 0 if it runs until then anyway (`endless`)."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(0 if endless else INTERRUPTED_EXIT_CODE)
