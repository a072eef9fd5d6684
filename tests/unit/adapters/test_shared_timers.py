"""Deadlines of one timer, against the same with a timer each: `asyncio.timeout`."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from pointsman.adapters.shared_timers import LENGTHS_MAX, SharedTimer, SharedTimers
from pointsman.adapters.waiting import wait_at_most
from pointsman.primitives import WallSeconds


class CountingLoop(asyncio.SelectorEventLoop):
    """Its time passes as its timers need it."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0.0
        self.timers = 0

    @override
    def time(self) -> float:
        return self.passed

    @override
    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *arguments: Any, context: Any = None
    ) -> Any:
        self.timers += 1
        return super().call_later(delay, callback, *arguments, context=context)

    async def until(self, moment: float) -> None:
        while self.passed < moment:
            self.passed = min(moment, self.passed + 0.5)
            for _ in range(5):
                await asyncio.sleep(0)


def run(scenario: Callable[[CountingLoop], object]) -> CountingLoop:
    loop = CountingLoop()
    try:
        loop.run_until_complete(scenario(loop))  # type: ignore[arg-type]
    finally:
        loop.close()
    return loop


@given(
    starts=st.lists(st.integers(0, 20), max_size=12).map(sorted),
    dropped=st.sets(st.integers(0, 11)),
)
def test_each_deadline_that_is_not_dropped_is_called_when_it_is_due(starts: list[int], dropped: set[int]) -> None:
    calls: list[tuple[int, float]] = []

    async def scenario(loop: CountingLoop) -> None:
        timer = SharedTimer(5.0)
        for number, start in enumerate(starts):
            await loop.until(start)
            handle = timer.set(lambda number=number: calls.append((number, loop.passed)))  # type: ignore[misc]
            if number in dropped:
                timer.cancel(handle)
        await loop.until(40.0)

    run(scenario)

    expected = [(number, start + 5.0) for number, start in enumerate(starts) if number not in dropped]
    assert calls == expected


def test_deadlines_that_are_met_cost_one_timer_of_the_loop_for_each_length_of_time() -> None:
    async def scenario(loop: CountingLoop) -> None:
        timer = SharedTimer(5.0)
        for number in range(1000):
            await loop.until(number * 0.01)
            timer.cancel(timer.set(lambda: None))

    assert run(scenario).timers <= 3


async def test_what_takes_too_long_is_interrupted_where_it_waits() -> None:
    limit = SharedTimer(0.01).limit()

    with pytest.raises(TimeoutError), limit:
        await asyncio.Event().wait()

    task = asyncio.current_task()
    assert limit.fired
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def waits() -> None:
        with SharedTimer(60.0).limit():
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_together_with_the_limit_stays_one() -> None:
    async def waits() -> None:
        limit = timer.limit()
        with limit:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                assert limit.fired
                task.cancel()
                raise

    timer = SharedTimer(0.01)
    task = asyncio.create_task(waits())

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_limit_that_is_kept_does_nothing() -> None:
    limit = SharedTimer(0.01).limit()
    with limit:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)

    assert not limit.fired


def test_lengths_are_kept_within_a_bound() -> None:
    timers = SharedTimers()
    kept = [timers.of(float(seconds)) for seconds in range(LENGTHS_MAX)]

    assert all(timers.of(float(seconds)) is timer for seconds, timer in enumerate(kept))
    assert timers.of(-1.0) is not timers.of(-1.0)


def test_who_is_not_due_is_not_looked_at() -> None:
    """Thousands of queued requests wait at once."""
    looked_at = [0]

    class Due(float):
        @override
        def __le__(self, other: float) -> bool:
            looked_at[0] += 1
            return float(self) <= other

    async def scenario(loop: CountingLoop) -> None:
        timer = SharedTimer(1000.0)
        for number in range(1000):
            await loop.until(number)
            handle = timer.set(lambda: None)
            due, on_due = timer._due[handle]
            timer._due[handle] = Due(due), on_due
        await loop.until(1500.0)

    run(scenario)

    assert 500 <= looked_at[0] <= 1200


async def test_a_wait_for_an_event_ends_with_the_event_or_with_its_time() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    async with asyncio.timeout(5.0):
        await wait_at_most(event, WallSeconds(60.0))
        await wait_at_most(asyncio.Event(), WallSeconds(0.01))
