"""Memory of a long-running process: large blocks return to the system, and what is made at the start is not collected."""

import ctypes
import gc
from contextlib import suppress

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MAPPED_BYTES_MIN = 1024 * 1024
ARENAS_MAX = 2


def map_large_blocks() -> None:
    """Blocks of MAPPED_BYTES_MIN or more are mapped each by itself and returned when freed. glibc by default raises its
    threshold to the largest block it has freed, and then keeps the memory of large bodies. Other C libraries: no effect."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        libc.mallopt(M_ARENA_MAX, ARENAS_MAX)


def freeze_started() -> None:
    """What is there at the start is never collected. A full collection stops the process, some ten milliseconds for what
    is imported alone."""
    gc.collect()
    gc.freeze()
