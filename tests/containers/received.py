"""Which requests engines received, as their logs say: also those of containers that are replaced or removed meanwhile."""

import asyncio
import re
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

from docker.errors import APIError, NotFound

from tests.containers.fleet import ContainerFleet

RECEIVED = re.compile(rb'\brequest"?[=:] ?"?([\w-]+)')
MARK = b"request_received"
LOOK_SECONDS = 0.5


class ReceivedRequests:
    """`since`: Unix seconds. A line of a log has its time in front, so it counts once however often it is read."""

    def __init__(self, fleet: ContainerFleet, since: float) -> None:
        self._fleet = fleet
        self._since = since
        self._lines: set[bytes] = set()
        self._followed: dict[str, threading.Thread] = {}

    async def watch(self) -> None:
        """Until cancelled. Follows the log of each engine until its container stops."""
        while True:
            for container in await asyncio.to_thread(self._engines):
                thread = self._followed.get(container.id)
                if thread is None or not thread.is_alive():
                    thread = threading.Thread(
                        target=self._read, args=(container,), kwargs={"follow": True}, daemon=True
                    )
                    self._followed[container.id] = thread
                    thread.start()
            await asyncio.sleep(LOOK_SECONDS)

    def counted(self) -> Counter[str]:
        """How often engines received each request."""
        for container in self._engines():
            self._read(container, follow=False)
        found = (RECEIVED.search(line) for line in list(self._lines))
        return Counter(match[1].decode() for match in found if match)

    def _read(self, container: Any, *, follow: bool) -> None:
        with suppress(NotFound, APIError, OSError):
            for line in container.logs(stream=True, follow=follow, since=self._since, timestamps=True):
                if MARK in line:
                    self._lines.add(line)

    def _engines(self) -> list[Any]:
        found = []
        for container in self._fleet.containers().values():
            if container.is_engine and container.state == "running":
                with suppress(NotFound):
                    found.append(self._fleet.engine.containers.get(container.name))
        return found
