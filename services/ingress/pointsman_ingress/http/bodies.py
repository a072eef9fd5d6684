"""How many bytes of unfinished bodies this process holds, over all its clients.

A body that comes in one piece is never counted: it is gone as soon as it is there. Bodies that are read already are not
counted either; they are bounded by the requests that are served at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pointsman_ingress.http.openai_errors import too_many_bodies

BODIES_BYTES_MAX = 256 * 1024 * 1024


class Bodies:
    """The bodies that are being read."""

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """For one body: call it with the size of each piece. It raises Refusal (503) where there is no room for more."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._bytes + size > self._bytes_max:
                raise too_many_bodies()
            self._bytes += size
            taken += size

        try:
            yield take
        finally:
            self._bytes -= taken
