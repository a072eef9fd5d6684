"""CPU time of processes, from /proc, and their instructions, where `perf` may count them."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from pointsman_lab.gateway.connection import BenchError


class PerfError(Exception):
    """perf cannot count here."""


class Perf:
    """Counts the instructions of one process."""

    def __init__(self, perf: str, pid: int) -> None:
        self._perf = perf
        self._pid = pid

    async def during(self, work: Callable[[], Awaitable[None]]) -> float:
        """Raises PerfError."""
        arguments = ["stat", "-x", ",", "-e", "instructions:u,instructions:k", "-p", str(self._pid)]
        process = await asyncio.create_subprocess_exec(
            self._perf, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            await asyncio.sleep(0.2)
            await work()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            _, output = await process.communicate()
        return _counted(output.decode(errors="replace"))


def _counted(output: str) -> float:
    fields = [line.split(",") for line in output.splitlines() if "instructions" in line]
    numbers = [float(row[0]) for row in fields if row[0].strip().isdigit()]
    if len(numbers) < 2:
        said = fields[0][0].strip("<>") if fields else (output.strip().splitlines() or ["it said nothing"])[-1]
        message = f"perf may not count here ({said[:200]})"
        raise PerfError(message)
    return sum(numbers)


def cpu_us(pid: int) -> float:
    """CPU time so far of a process, its threads and its children (of an ingress with --processes), in microseconds.
    Raises BenchError."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        own = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1000
        return own + sum(map(cpu_us, _children(pid)))
    except (OSError, ValueError, IndexError) as error:
        message = f"the CPU time of process {pid} cannot be read: {error}"
        raise BenchError(message) from error


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found
