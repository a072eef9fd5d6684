"""Whether this machine kept engine time while a fleet ran on it.

Measured are the seconds that the processes of the fleet waited for a core (`/proc/PID/task/*/schedstat`), how late requests were
sent, and, by a heartbeat, how long nothing ran at all.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from pointsman.primitives import Seconds

DISTURBED_SHARE_MAX = 0.03
"""Of a median prefill: close to saturation, so much less capacity is a queue twice as long. A machine that takes more
has no say in whether two worlds agree."""

STANDSTILL_SHARE_MAX = 0.2
"""Of a median prefill: a single standstill is in the TTFT of all who wait at that moment, and of nobody else."""

HEARTBEAT_WALL_SECONDS = 0.02

REQUEST_PATH = frozenset({"ingress", "scheduler", "nats", "engine"})
"""Roles of the processes that a request waits for."""

SERIOUS = frozenset({"warning", "error", "critical"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How much time the machine itself cost. Engine seconds."""

    waited_s: Seconds
    """That processes on the path waited for a core, all together, for each request; 0 where the kernel does not say."""
    late_p90_s: Seconds
    """That requests were sent after their time, P90."""
    stood_still_s: Seconds
    """The longest that nothing ran here at all."""
    warned: dict[str, int]
    """What the fleet's processes warned of meanwhile, and how often: an engine that was late, a worker unheard."""

    def disturbed(self, prefill_p50_s: Seconds) -> bool:
        """Whether that is too much to judge latencies, where a median prefill takes `prefill_p50_s`."""
        slow = max(self.waited_s, self.late_p90_s) > DISTURBED_SHARE_MAX * prefill_p50_s
        return slow or self.stood_still_s > STANDSTILL_SHARE_MAX * prefill_p50_s


@dataclass(slots=True)
class Heartbeat:
    """Beats while it is `listened` to."""

    longest_pause: float = 0.0
    """Wall seconds between two beats, beyond what they are apart."""

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
    """Wall seconds that the threads of these processes have waited for a core so far. Processes that are gone, and
    systems that do not count, give 0."""
    nanoseconds = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def warnings_in(logs: Path) -> dict[str, int]:
    """How often each warning, or worse, stands in these JSON logs."""
    warned: Counter[str] = Counter()
    for path in logs.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                said = json.loads(line)
                if said.get("level") in SERIOUS:
                    warned[f"{path.stem}: {said.get('event')}"] += 1
    return dict(sorted(warned.items()))
