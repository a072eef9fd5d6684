"""Drives the simulations of shadow policies: in a thread, on a bounded share of a core, so that following the log and pages
are not held up. What does not fit into the share is shed, by `ShadowWindows`."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import click

from pointsman.analysis.shadow import SHADOWS_MAX, Shadow, shadow_choice
from pointsman.ports import Clock
from pointsman.primitives import WallSeconds

CORE_SHARE = 0.25
SLICE_SECONDS = 0.02
IDLE_WALL_SECONDS: WallSeconds = WallSeconds(1.0)


def shadow_of(texts: Sequence[str]) -> Callable[..., Shadow] | None:
    """Raises click.BadParameter. None without any."""
    if len(set(texts)) > SHADOWS_MAX:
        raise click.BadParameter(f"at most {SHADOWS_MAX}", param_hint="--shadow")
    try:
        choices = [shadow_choice(text) for text in dict.fromkeys(texts)]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shadow") from error
    return partial(Shadow, choices) if choices else None


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
