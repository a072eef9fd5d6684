"""A wait for an event with a bound."""

import asyncio

from pointsman.primitives import WallSeconds


async def wait_at_most(event: asyncio.Event, seconds: WallSeconds) -> None:
    """Returns when the event is set or the time is over."""
    try:
        async with asyncio.timeout(float(seconds)):
            await event.wait()
    except TimeoutError:
        return
