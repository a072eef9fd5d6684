"""How tests wait for what others do in their own time."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.02


async def eventually(condition: Callable[[], Any], *, seconds: float = 15.0, what: str = "it") -> None:
    """Wait until `condition()`, plain or asynchronous, holds; fails the test when it does not in time.

    Looks are counted, not seconds: while the machine stands still, no time is lost.
    """
    for _ in range(round(seconds / LOOK_SECONDS)):
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        await asyncio.sleep(LOOK_SECONDS)
    message = f"{what} did not happen within {seconds} s"
    raise AssertionError(message)
