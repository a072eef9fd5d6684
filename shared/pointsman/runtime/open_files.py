"""Limit of open files and sockets of this process."""

import contextlib
import resource

import structlog

log = structlog.get_logger()

OWN_FILES = 256
MACOS_OPEN_MAX = 10_240
CLIENTS_MAX = 16_384


def raised_open_files() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, MACOS_OPEN_MAX) if hard == resource.RLIM_INFINITY else hard  # macOS takes no infinite one
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != soft:
        log.debug("open_files_raised", soft=soft, now=now)
    return now


def clients_max(open_files: int) -> int:
    """Each client needs a second connection, to an engine."""
    if open_files == resource.RLIM_INFINITY:
        return CLIENTS_MAX
    return max(1, min(CLIENTS_MAX, (open_files - OWN_FILES) // 2))
