"""Health check of a container: exits 0 when the path given (`/health` or `/readyz`) answers 200 on a port where the
container's processes listen, wherever flags, variables or a TOML file put it. A second argument is the port to ask."""

import socket
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path

LISTENING = "0A"
DECISIVE = (200, 503)


def listeners() -> list[tuple[str, int]]:
    """The highest port first: an ingress has its admin port above that of the API."""
    own = {link for process in Path("/proc").glob("[0-9]*") for link in sockets_of(process)}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == LISTENING and f"socket:[{rest[5]}]" in own:
            address, port = local.split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            found.append(("127.0.0.1" if host == "0.0.0.0" else host, int(port, 16)))
    return sorted(found, key=lambda one: -one[1])


def sockets_of(process: Path) -> set[str]:
    try:
        return {str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()}
    except OSError:  # it ended, or is another user's
        return set()


def status(host: str, port: int, path: str) -> int:
    connection = HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


path = sys.argv[1]
places = [("127.0.0.1", int(sys.argv[2]))] if len(sys.argv) > 2 else listeners()
answer = 0
for place in places:
    answer = status(*place, path)
    if answer in DECISIVE:
        break
if answer != 200:
    sys.exit(f"{path}: {answer or 'no answer'}")
