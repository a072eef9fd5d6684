"""CPU time of processes, from /proc."""

import contextlib
from pathlib import Path

from pointsman_lab.gateway.connection import BenchError


def cpu_us(pid: int) -> float:
    """CPU time of a process with its threads and children, in microseconds. Raises BenchError."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        own = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1000
        return own + sum(map(cpu_us, _children(pid)))
    except (OSError, ValueError, IndexError) as error:
        raise BenchError(f"the CPU time of process {pid} cannot be read: {error}") from error


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found
