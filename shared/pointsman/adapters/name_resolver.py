"""Addresses of engines that have names. While a lookup fails or takes long, the last addresses count: an engine stays
reachable while DNS is not."""

import asyncio
import socket
from functools import partial
from typing import TypeAlias

import aiohttp
from aiohttp.abc import ResolveResult
from typing_extensions import override

from pointsman.adapters.daemon_threads import in_daemon_thread
from pointsman.primitives import WallSeconds

LOOKUP_WALL_SECONDS_MAX: WallSeconds = WallSeconds(1.0)
"""Then the lookup goes on for whoever asks next. Below the 2 s of a worker's question to its engine."""
NAMES_MAX = 10_000

Name: TypeAlias = tuple[str, int, int]
"""Host, port, address family."""


class NameResolver(aiohttp.abc.AbstractResolver):
    """A thread for each lookup, at most one for each name: lookups that hang hold up no others, nor the process's end."""

    def __init__(self) -> None:
        self._known: dict[Name, list[ResolveResult]] = {}
        self._lookups: dict[Name, asyncio.Future[list[ResolveResult]]] = {}

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError if the name has no address, and had none before."""
        name = (host, port, int(family))
        lookup = self._lookups.get(name) or self._begin(name)
        await asyncio.wait({lookup}, timeout=float(LOOKUP_WALL_SECONDS_MAX))
        known = self._known.get(name)
        if known is not None:
            return known
        if lookup.done():
            try:
                return lookup.result()
            except RuntimeError as error:  # no more threads
                raise OSError(str(error)) from error
        raise OSError(f"the lookup of {host} took more than {LOOKUP_WALL_SECONDS_MAX:g} s")

    def _begin(self, name: Name) -> "asyncio.Future[list[ResolveResult]]":
        self._lookups[name] = lookup = in_daemon_thread(partial(_looked_up, name), "lookup")
        lookup.add_done_callback(partial(self._end, name))
        return lookup

    def _end(self, name: Name, lookup: "asyncio.Future[list[ResolveResult]]") -> None:
        del self._lookups[name]
        if lookup.exception() is not None:  # looked at, as whoever asked may have gone
            return
        self._known.pop(name, None)
        self._known[name] = lookup.result()
        if len(self._known) > NAMES_MAX:
            del self._known[next(iter(self._known))]

    @override
    async def close(self) -> None:
        self._known.clear()


def _looked_up(name: Name) -> list[ResolveResult]:
    """Blocks. Raises OSError."""
    host, port, family = name
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    except UnicodeError as error:
        raise OSError(str(error)) from error
    return [
        ResolveResult(
            hostname=host,
            host=str(address[0]),
            port=port,
            family=found_family,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for found_family, _, protocol, _, address in found
    ]
