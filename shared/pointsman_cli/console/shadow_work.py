"""Drives the simulations of shadow policies: in a thread, on a bounded share of a core, so that following the log and pages
are not held up. What does not fit into the share is shed, by `ShadowWindows`."""

import asyncio
import time
from collections.abc import Callable

from pointsman.analysis.shadow import Shadow
from pointsman.ports import Clock
from pointsman.primitives import WallSeconds

CORE_SHARE = 0.25
SLICE_SECONDS = 0.02
IDLE_WALL_SECONDS: WallSeconds = WallSeconds(1.0)


async def simulate(shadow: Callable[[], Shadow | None], clock: Clock) -> None:
    """Never returns. `shadow`: None until the log is read."""
    while True:
        known = shadow()
        spent = await asyncio.to_thread(_slice, known) if known is not None else 0.0
        await clock.sleep_wall(WallSeconds(spent / CORE_SHARE - spent) if spent else IDLE_WALL_SECONDS)


def _slice(shadow: Shadow) -> float:
    """Returns the CPU seconds spent, 0 if there was nothing to do."""
    began = time.thread_time()
    worked = False
    while time.thread_time() - began < SLICE_SECONDS and shadow.work():
        worked = True
    return time.thread_time() - began if worked else 0.0
