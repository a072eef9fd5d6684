"""Free TCP ports of this machine, below the range of outgoing connections, so that a restarted process finds its port free. Two
fleets that start at once may choose the same port; the later one then fails to bind."""

import random
import socket

LOWEST = 20_000
HIGHEST = 32_000
LOOPBACK = "127.0.0.1"


def why_taken(port: int, host: str = LOOPBACK) -> str:
    """Why no process could listen on the port now, in the system's words; empty where one could."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a process could listen on the port now."""
    return not why_taken(port, host)


def free_ports(count: int) -> list[int]:
    """Distinct free ports of the loopback address. Raises RuntimeError when there are not enough."""
    offset, size = random.randrange(HIGHEST - LOWEST), HIGHEST - LOWEST
    found: list[int] = []
    for step in range(size):
        if len(found) == count:
            return found
        port = LOWEST + (offset + step) % size
        if is_free(port):
            found.append(port)
    message = f"there are no {count} free ports from {LOWEST} to {HIGHEST}"
    raise RuntimeError(message)
