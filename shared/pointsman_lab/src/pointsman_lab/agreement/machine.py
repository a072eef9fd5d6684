"""Whether this machine kept engine time during a run: seconds that the fleet's processes waited for a core
(`/proc/PID/task/*/schedstat`), send delay, and the longest standstill."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from pointsman.primitives import EngineSeconds
from pointsman_lab.proc import threads

DISTURBED_SHARE_MAX = 0.03
"""Of a median prefill. Close to saturation this much less capacity doubles the queue."""
STANDSTILL_SHARE_MAX = 0.2
HEARTBEAT_WALL_SECONDS = 0.02
REQUEST_PATH = frozenset({"ingress", "scheduler", "nats", "engine"})
SERIOUS = frozenset({"warning", "error", "critical"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Disturbance by the machine itself. Engine seconds."""

    waited_s: EngineSeconds
    late_p90_s: EngineSeconds
    stood_still_s: EngineSeconds
    warned: dict[str, int]

    def disturbed(self, prefill_p50_s: EngineSeconds) -> bool:
        slow = max(self.waited_s, self.late_p90_s) > DISTURBED_SHARE_MAX * prefill_p50_s
        return slow or self.stood_still_s > STANDSTILL_SHARE_MAX * prefill_p50_s


@dataclass(slots=True)
class Heartbeat:
    longest_pause: float = 0.0

    @contextlib.asynccontextmanager
    async def listened(self) -> AsyncIterator["Heartbeat"]:
        beating = asyncio.create_task(self._beat())
        try:
            yield self
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(HEARTBEAT_WALL_SECONDS)
            self.longest_pause = max(self.longest_pause, time.monotonic() - before - HEARTBEAT_WALL_SECONDS)


def waited_for_cores(pids: Iterable[int]) -> float:
    """Wall seconds that the threads of these processes have waited for a core. Processes that ended, and systems
    without the counter, give 0."""
    nanoseconds = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in threads(pid):
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def warnings_in(logs: Path) -> dict[str, int]:
    warned: Counter[str] = Counter()
    for path in logs.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                entry = json.loads(line)
                if entry.get("level") in SERIOUS:
                    warned[f"{path.stem}: {entry.get('event')}"] += 1
    return dict(sorted(warned.items()))
