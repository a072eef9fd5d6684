"""Tests that wait without taking time: the event loop of the torture, whose time jumps to what is due next."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any
from unittest.mock import patch

from typing_extensions import ParamSpec

from pointsman.adapters.clocks import ScaledClock
from pointsman.primitives import ANCHOR_UNIX_SECONDS, EngineSeconds, WallSeconds, engine_time_of
from pointsman_lab.torture.clocks import BEGIN_SECONDS, UPTIME_SECONDS
from pointsman_lab.torture.loop import VirtualLoop

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """For a world in memory, without sockets, processes and threads. Every ScaledClock shows the loop's time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with (
            patch.object(ScaledClock, "now", _now),
            patch.object(ScaledClock, "wall", _wall),
            asyncio.Runner(loop_factory=lambda: VirtualLoop(Random(1))) as runner,
        ):
            runner.run(test(*args, **kwargs))

    return run


def _now(clock: ScaledClock) -> EngineSeconds:
    return engine_time_of(ANCHOR_UNIX_SECONDS + BEGIN_SECONDS + asyncio.get_running_loop().time(), clock.speed)


def _wall(_clock: ScaledClock) -> WallSeconds:
    return WallSeconds(UPTIME_SECONDS + asyncio.get_running_loop().time())
