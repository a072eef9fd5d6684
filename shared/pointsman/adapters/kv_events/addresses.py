"""Numeric addresses for one engine's endpoints. libzmq would look a name up at each connection, in the one thread that
serves all engines: a slow name would stop the events of every other engine."""

import asyncio
import socket
from ipaddress import ip_address

from pointsman.primitives import Seconds

LOOKUP_SECONDS_MAX: Seconds = 2.0
"""Then the last answer counts; the lookup goes on for whoever asks next."""


class Addresses:
    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._fresh: set[str] = set()
        self._lookups: dict[str, asyncio.Task[None]] = {}

    def expire(self) -> None:
        """A connection failed: the engine may have moved. The names are looked up again when they are needed."""
        self._fresh.clear()

    async def numeric(self, endpoint: str) -> str:
        """The endpoint with its host's address; empty if the name has none, or none yet."""
        host, port = _name_in(endpoint)
        if not host:
            return endpoint
        if host not in self._fresh:
            lookup = self._lookups.get(host)
            if lookup is None:
                lookup = self._lookups[host] = asyncio.create_task(self._look_up(host))
            await asyncio.wait({lookup}, timeout=LOOKUP_SECONDS_MAX)
        address = self._known.get(host)
        return f"tcp://{address}:{port}" if address else ""

    def close(self) -> None:
        for lookup in self._lookups.values():
            lookup.cancel()

    async def _look_up(self, host: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            pass
        else:
            family, address = found[0][0], str(found[0][4][0])
            self._known[host] = f"[{address}]" if family == socket.AF_INET6 else address
            self._fresh.add(host)
        finally:
            del self._lookups[host]


def _name_in(endpoint: str) -> tuple[str, str]:
    """And its port. Empty for an address, and for other transports than TCP."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host.startswith("["):
        return "", ""
    try:
        ip_address(host)
    except ValueError:
        return host, port
    return "", ""
