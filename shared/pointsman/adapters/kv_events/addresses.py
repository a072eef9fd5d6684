"""Numeric addresses for one engine's endpoints. libzmq would look a name up at each connection, in the one thread that
serves all engines: a slow name would stop the events of every other engine."""

import socket
from ipaddress import ip_address

from pointsman.adapters.name_resolver import NameResolver
from pointsman.adapters.tcp_ports import in_url


class Addresses:
    def __init__(self) -> None:
        self._names = NameResolver()
        self._fresh: dict[str, str] = {}

    def expire(self) -> None:
        """A connection failed: the engine may have moved. The names are looked up again when they are needed."""
        self._fresh.clear()

    async def numeric(self, endpoint: str) -> str:
        """The endpoint with its host's address; empty if the name has none, or none yet."""
        host, port = _name_in(endpoint)
        if not host:
            return endpoint
        if host not in self._fresh:
            try:
                found = await self._names.resolve(host, family=socket.AF_UNSPEC)
            except OSError:
                return ""
            self._fresh[host] = found[0]["host"]
        return f"tcp://{in_url(self._fresh[host])}:{port}"


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
