"""Words and numbers of the sentences about a request."""

from collections.abc import Sequence

from pointsman.primitives import EngineSeconds

NAMES_MAX = 3
FAILURES = {
    "connect_failure": "no connection to it could be made",
    "http_5xx": "it answered with an error",
    "stream_reset": "its answer broke off",
    "first_byte_timeout": "its first byte did not come in time",
    "chunk_timeout": "the next part of its answer did not come in time",
}


def of_the_wait(spent: EngineSeconds, whole: EngineSeconds) -> str:
    return f" ({min(1.0, spent / whole):.0%} of the wait)" if whole else ""


def named(names: Sequence[str]) -> str:
    shown = list(names[:NAMES_MAX])
    more = len(names) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
