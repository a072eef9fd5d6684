"""Lets a reader with many messages give other tasks of the process their turns of the event loop."""

import asyncio
from math import inf

from pointsman.adapters.clocks import loop_seconds
from pointsman.primitives import Seconds

TURN_SECONDS_MAX: Seconds = 0.02
"""Of messages that may take long to decode."""


class Turn:
    """Of one reader. Over after `messages_max`, or `seconds_max` of the loop's time."""

    def __init__(self, messages_max: int, seconds_max: Seconds = inf) -> None:
        self._messages_max = messages_max
        self._seconds_max = seconds_max
        self.begin()

    def begin(self) -> None:
        """Also whenever the reader has waited: others had theirs."""
        self._messages = 0
        self._began = loop_seconds()

    async def take_message(self) -> bool:
        """Count one. Returns whether others had a turn meanwhile."""
        self._messages += 1
        if self._messages < self._messages_max and loop_seconds() - self._began < self._seconds_max:
            return False
        await asyncio.sleep(0)
        self.begin()
        return True
