"""Health check of a container: prints the answer, and exits 0 when the path given (`/health`, `/readyz`, `/readyz?verbose`)
answers 200 on a port where the container's processes listen, wherever flags, variables or a TOML file put it. A second
argument is the port to ask.

Every container runs it every few seconds, and starting Python is most of its work, so it imports little. It ends itself in
time: on a loaded host Docker Engine 20.10 left those that took too long running, a hundred at once."""

import os
import signal
import socket
import sys

SECONDS_MAX = 3  # the `timeout` of the health checks
LISTENING = "0A"
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
WORD_BYTES = 4
ANSWER_BYTES_MAX = 4096  # what Docker keeps of it
DECISIVE = (200, 503)


def listeners() -> list[tuple[str, int]]:
    """The highest port first: an ingress has its admin port above that of the API."""
    own = {link for process in os.listdir("/proc") if process.isdigit() for link in sockets_of(process)}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in lines_of(table)[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and f"socket:[{rest[5]}]" in own:
                address, port = local.split(":")
                host = host_of(bytes.fromhex(address))
                found.append((LOOPBACKS.get(host, host), int(port, 16)))
    return sorted(found, key=lambda one: -one[1])


def host_of(words: bytes) -> str:
    """The kernel prints an address as words of this machine, which are little-endian."""
    address = b"".join(words[at : at + WORD_BYTES][::-1] for at in range(0, len(words), WORD_BYTES))
    return socket.inet_ntop(socket.AF_INET if len(address) == WORD_BYTES else socket.AF_INET6, address)


def lines_of(table: str) -> list[str]:
    try:
        with open(table) as file:
            return file.readlines()
    except OSError:  # without IPv6 there is no table of it
        return []


def sockets_of(process: str) -> set[str]:
    found = set()
    try:
        for descriptor in os.scandir(f"/proc/{process}/fd"):
            try:
                found.add(os.readlink(descriptor.path))
            except OSError:  # closed in between
                continue
    except OSError:  # it ended, or is another user's
        pass
    return found


def asked(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and body; 0 if nothing listens or answers, or it speaks no HTTP."""
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            while len(answer) < ANSWER_BYTES_MAX and (part := connection.recv(ANSWER_BYTES_MAX)):
                answer += part
    except OSError:  # what came before counts
        pass
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, body.decode(errors="replace").strip()


def main() -> None:
    signal.alarm(SECONDS_MAX)
    path = sys.argv[1]
    places = [("127.0.0.1", int(sys.argv[2]))] if len(sys.argv) > 2 else listeners()
    status, body = 0, ""
    for place in places:
        status, body = asked(*place, path)
        if status in DECISIVE:
            break
    print(body or f"{path}: {status or 'no answer'}")
    sys.exit(status != 200)


if __name__ == "__main__":
    main()
