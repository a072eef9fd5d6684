"""Free TCP ports below the ephemeral range, so that a restarted process finds its port free. On Linux they are reserved,
for as long as this process lives, against others that ask here: two fleets that start together need different ones."""

import ipaddress
import random
import socket
import sys

LOWEST = 20_000
HIGHEST = 32_000
LOOPBACK = "127.0.0.1"


def why_taken(port: int, host: str = LOOPBACK) -> str:
    """The system's reason why the port cannot be bound; empty if it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
        except (TypeError, UnicodeError):  # as of an empty label between two dots
            return "that is no host name"
    return ""


def free_ports(count: int) -> list[int]:
    """Distinct free loopback ports. Raises RuntimeError if there are too few."""
    offset, size = random.randrange(HIGHEST - LOWEST), HIGHEST - LOWEST
    found: list[int] = []
    for step in range(size):
        if len(found) == count:
            return found
        port = LOWEST + (offset + step) % size
        if not why_taken(port) and _reserve(port):
            found.append(port)
    raise RuntimeError(f"there are no {count} free ports from {LOWEST} to {HIGHEST}")


def _reserve(port: int) -> bool:
    """By a name that is gone with this process, whatever ends it."""
    if sys.platform != "linux":
        return True
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0pointsman-port-{port}")
    except OSError:
        reservation.close()
        return False
    reservation.detach()  # stays open
    return True


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
