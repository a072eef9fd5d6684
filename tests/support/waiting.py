"""How tests wait for what others do in their own time."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

FIRST_LOOKS_SECONDS = (0.001, 0.002, 0.004, 0.008)
"""Most of what a test waits for has happened by then."""
LOOK_SECONDS = 0.02


async def eventually(condition: Callable[[], Any], *, seconds: float = 15.0, what: str = "it") -> None:
    """Wait until `condition()`, plain or asynchronous, holds; fails the test when it does not in time.

    Looks are counted, not seconds: while the machine stands still, no time is lost.
    """
    for pause in (*FIRST_LOOKS_SECONDS, *[LOOK_SECONDS] * round(seconds / LOOK_SECONDS)):
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        await asyncio.sleep(pause)
    raise AssertionError(f"{what} did not happen within {seconds} s")
