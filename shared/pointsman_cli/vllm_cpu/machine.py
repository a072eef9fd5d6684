"""Requirements of the CPU engine, checked before installation."""

import os
import platform
import shutil
import sys
from pathlib import Path

PYTHON_LOWEST = (3, 11)
PYTHON_HIGHEST = (3, 14)
DISK_BYTES_MIN = 6 * 1024**3
MEMORY_BYTES_MIN = 3 * 1024**3
CPU_FLAGS = frozenset({"avx2", "avx512f"})

ELSEWHERE = "docs/engines.md describes engines on other machines"


class UnsuitableMachineError(Exception):
    """The message says why, and what helps."""


def check_can_run(engines: int = 1) -> None:
    """Raises UnsuitableMachineError."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise UnsuitableMachineError(
            f"vLLM's CPU build is for Linux on x86-64, this is {platform.system()} on {platform.machine()}; {ELSEWHERE}"
        )
    if not CPU_FLAGS & _cpu_flags():
        raise UnsuitableMachineError(
            f"this processor has neither AVX2 nor AVX-512, which vLLM's CPU build needs; {ELSEWHERE}"
        )
    available = _memory_bytes()
    needed = engines * MEMORY_BYTES_MIN
    if available is not None and available < needed:
        raise UnsuitableMachineError(
            f"{_gib(available)} of memory are free, {_gib(needed)} are needed for {engines} such engine(s); {ELSEWHERE}"
        )


def check_can_make(directory: Path) -> None:
    """Raises UnsuitableMachineError."""
    if not PYTHON_LOWEST <= sys.version_info[:2] <= PYTHON_HIGHEST:
        lowest, highest = (".".join(map(str, version)) for version in (PYTHON_LOWEST, PYTHON_HIGHEST))
        raise UnsuitableMachineError(
            f"vLLM's CPU build needs Python {lowest} to {highest}, this is {platform.python_version()}"
        )
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise UnsuitableMachineError(f"{existing} cannot be written to; name another directory with POINTSMAN_VLLM_DIR")
    free = shutil.disk_usage(existing).free
    if free < DISK_BYTES_MIN:
        raise UnsuitableMachineError(
            f"{_gib(free)} are free at {existing}, {_gib(DISK_BYTES_MIN)} are needed; make room, or name another directory with POINTSMAN_VLLM_DIR"
        )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set(CPU_FLAGS)  # unknown: the engine decides
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


def _memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((line for line in lines if line.startswith("MemAvailable:")), "")
    return int(available.split()[1]) * 1024 if available else None


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f} GiB"
