"""Pages that change: one rendering for all who look, only what changed, and nobody who is slow holds up the others."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.primitives import WallSeconds
from pointsman_cli.console.pages.live import Parts
from pointsman_cli.console.web.viewers import FRAMES_BEHIND_MAX, PAGES_MAX, VIEWERS_MAX, TooManyViewersError, Viewers


class SteppedClock(ScaledClock):
    """Its sleepers wake when `step` is called."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[asyncio.Future[None]] = []

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        await woken

    async def step(self) -> None:
        await asyncio.sleep(0)
        waiting, self._waiting = self._waiting, []
        for woken in waiting:
            woken.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)


class Stage:
    def __init__(self) -> None:
        self.shown = "first"
        self.renderings = 0
        self.clock = SteppedClock()
        self.viewers = Viewers(self._parts, self.clock)

    def _parts(self, page: str) -> Parts:
        self.renderings += 1
        return Parts({"a": self.shown, "fixed": page}, {})


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    running = asyncio.ensure_future(stage.viewers.run())
    yield stage
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def told(frame: bytes) -> dict[str, str]:
    assert frame.startswith(b"data: ")
    parts: dict[str, str] = json.loads(frame.removeprefix(b"data: "))["parts"]
    return parts


async def test_all_viewers_of_a_page_get_the_same_bytes_of_one_rendering(stage: Stage) -> None:
    streams = [stage.viewers.stream("/") for _ in range(10)]
    assert [told(await anext(stream)) for stream in streams] == [{"a": "first", "fixed": "/"}] * 10
    before = stage.renderings

    stage.shown = "second"
    await stage.clock.step()
    frames = [await anext(stream) for stream in streams]

    assert {told(frame)["a"] for frame in frames} == {"second"}
    assert len(set(frames)) == 1
    assert stage.renderings == before + 1


async def test_what_did_not_change_is_not_sent(stage: Stage) -> None:
    stream = stage.viewers.stream("/")
    await anext(stream)

    await stage.clock.step()
    stage.shown = "second"
    await stage.clock.step()

    assert told(await anext(stream)) == {"a": "second"}


async def test_nothing_is_rendered_while_nobody_looks(stage: Stage) -> None:
    stream = stage.viewers.stream("/")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    before = stage.renderings

    await stage.clock.step()

    assert stage.renderings == before
    assert stage.viewers.count == 0


async def test_a_viewer_that_does_not_keep_up_is_let_go_and_the_others_stay(stage: Stage) -> None:
    slow, quick = stage.viewers.stream("/"), stage.viewers.stream("/")
    await anext(slow)
    await anext(quick)

    for number in range(FRAMES_BEHIND_MAX + 2):
        stage.shown = f"frame {number}"
        await stage.clock.step()
        assert told(await anext(quick)) == {"a": f"frame {number}"}

    with pytest.raises(StopAsyncIteration):
        await anext(slow)


async def test_closing_ends_every_stream(stage: Stage) -> None:
    streams = [stage.viewers.stream("/"), stage.viewers.stream("/tenants")]
    for stream in streams:
        await anext(stream)

    stage.viewers.close()

    for stream in streams:
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(stream), 5)


async def test_viewers_and_pages_are_bounded(stage: Stage) -> None:
    streams = [stage.viewers.stream("/") for _ in range(VIEWERS_MAX)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(TooManyViewersError):
        stage.viewers.check_room("/")

    await streams[0].aclose()  # type: ignore[attr-defined]
    stage.viewers.check_room("/")


async def test_different_pages_are_bounded_too(stage: Stage) -> None:
    for number in range(PAGES_MAX):
        await anext(stage.viewers.stream(f"/requests?q={number}"))

    with pytest.raises(TooManyViewersError):
        stage.viewers.check_room("/requests?q=one-more")
    stage.viewers.check_room("/requests?q=1")


async def test_a_page_that_cannot_be_rendered_ends_no_other(stage: Stage) -> None:
    good, bad = stage.viewers.stream("/"), stage.viewers.stream("/bad")
    await anext(good)
    await anext(bad)
    parts = stage.viewers._parts_of

    def fails(page: str) -> Parts:
        if page == "/bad":
            raise RuntimeError("planted")
        return parts(page)

    stage.viewers._parts_of = fails
    stage.shown = "second"
    await stage.clock.step()

    assert told(await anext(good)) == {"a": "second"}
