"""A hot prefix copied ahead of need, all of the system at work: scheduler, workers, ingress and simulated engines in one
process over the in-memory log, engines and clients over real sockets."""

from typing import Any

import pytest

from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.requests import PrefixCopyEnded, RequestFinished
from pointsman.primitives import InstanceId
from pointsman.simulation.replay import verify
from pointsman.state import prefix_copies
from tests.support.split_fleet import simulated_split_fleet
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
BLOCKS = 128
PREFIX = [token % 500 for token in range(64 * BLOCKS)]
HOT_AFTER = 3
A, B = InstanceId("a"), InstanceId("b")


def body(last: int, *, stream: bool = True) -> dict[str, Any]:
    return {"model": "pointsman-sim", "prompt": [*PREFIX, last], "max_tokens": 4, "stream": stream}


async def test_a_hot_prefix_is_there_before_the_first_request_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_copies, "ARRIVALS_MIN", HOT_AFTER)
    async with simulated_split_fleet({"a": "both", "b": "both"}, fetches=True, speed=3.0) as (fleet, engines):
        state = fleet.scheduler.state
        for number in range(HOT_AFTER + 1):  # counts fade
            await fleet.ask(COMPLETIONS, f"r{number}", body(10 + number))
        await eventually(lambda: min(state.index.blocks(A), state.index.blocks(B)) >= BLOCKS and not state.copies)
        events = [entry.event for entry in await fleet.pool.entries()]
        (copied,) = [event for event in events if isinstance(event, PrefixCopyEnded)]
        (granted,) = [event for event in events if isinstance(event, RequestGranted) and event.copy_to]

        await fleet.drain(str(copied.source))
        headers, _ = await fleet.ask(COMPLETIONS, "after", body(99, stream=False))
        after = next(event for event in await fleet.life_of("after") if isinstance(event, RequestFinished))
        await eventually(lambda: not state.workload.requests)
        verdict = verify(await fleet.pool.entries())

        assert (copied.request, copied.source, copied.instance) == (granted.request, granted.instance, granted.copy_to)
        assert (copied.tokens, copied.failure) == (64 * BLOCKS, "")
        assert after.instance == copied.instance
        assert after.cached_tokens == int(headers["x-pointsman-cached-tokens"]) == 64 * BLOCKS
        assert all(engine.model.cache.blocks_held == 0 for engine in engines.values())
        assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])
        assert verdict.identical == verdict.decisions > 4
