"""Health check of a container: exits 0 when the path given (`/health` or `/readyz`) answers 200 on a port where the
container's processes listen, wherever flags, variables or a TOML file put it. A second argument is the port to ask."""

import sys
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from pathlib import Path

LISTENING = "0A"
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
WORD_BYTES = 4
DECISIVE = (200, 503)


def listeners() -> list[tuple[str, int]]:
    """The highest port first: an ingress has its admin port above that of the API."""
    own = {link for process in Path("/proc").glob("[0-9]*") for link in sockets_of(process)}
    found = []
    tables = [table for name in ("tcp", "tcp6") if (table := Path("/proc/net", name)).exists()]
    for line in [line for table in tables for line in table.read_text().splitlines()[1:]]:
        _, local, _, state, *rest = line.split()
        if state == LISTENING and f"socket:[{rest[5]}]" in own:
            address, port = local.split(":")
            host = host_of(bytes.fromhex(address))
            found.append((LOOPBACKS.get(host, host), int(port, 16)))
    return sorted(found, key=lambda one: -one[1])


def host_of(words: bytes) -> str:
    """The kernel prints an address as words of this machine, which are little-endian."""
    return str(ip_address(b"".join(words[at : at + WORD_BYTES][::-1] for at in range(0, len(words), WORD_BYTES))))


def sockets_of(process: Path) -> set[str]:
    found = set()
    with suppress(OSError):  # it ended, or is another user's
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):  # closed in between
                found.add(str(descriptor.readlink()))
    return found


def status(host: str, port: int, path: str) -> int:
    connection = HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


def main() -> None:
    path = sys.argv[1]
    places = [("127.0.0.1", int(sys.argv[2]))] if len(sys.argv) > 2 else listeners()
    answer = 0
    for place in places:
        answer = status(*place, path)
        if answer in DECISIVE:
            break
    if answer != 200:
        sys.exit(f"{path}: {answer or 'no answer'}")


if __name__ == "__main__":
    main()
