"""Raises the limit of open files, for many client sockets."""

import contextlib
import resource


def raise_open_files_limit() -> None:
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
