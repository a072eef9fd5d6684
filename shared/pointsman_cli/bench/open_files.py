"""Many clients need many sockets."""

import contextlib
import resource


def raise_open_files_limit() -> None:
    """To what this process may have at most; unchanged where the system refuses."""
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
