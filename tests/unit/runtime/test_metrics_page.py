"""The page at `/metrics` of many who ask at once: rendered for all of them together, and never before they asked."""

import asyncio

import pytest

from pointsman.runtime import metrics_page
from pointsman.runtime.health import HealthBoard
from tests.support.waiting import eventually

MANY = 250


class Pages:
    """Renders how often the page was rendered, and what was counted until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rendered = 0
        self.counted = 0
        self.board = HealthBoard()
        monkeypatch.setattr(metrics_page, "metrics_page", self._render)

    async def ask(self) -> int:
        """Returns what the page says was counted."""
        answer = await self.board.answer("/metrics")
        assert answer is not None
        assert answer[0] == 200
        return int(answer[2])

    def _render(self) -> bytes:
        self.rendered += 1
        return b"%d" % self.counted


async def test_one_rendering_answers_all_who_ask_at_once_and_another_those_who_ask_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = Pages(monkeypatch)
    first = [asyncio.ensure_future(pages.ask()) for _ in range(MANY)]
    await eventually(lambda: bool(pages.rendered))
    pages.counted = 1
    second = [asyncio.ensure_future(pages.ask()) for _ in range(MANY)]

    assert await asyncio.gather(*first) == [0] * MANY
    assert await asyncio.gather(*second) == [1] * MANY
    assert pages.rendered == 2


async def test_who_asks_alone_gets_what_was_counted_a_moment_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    for counted in range(5):
        pages.counted = counted
        assert await pages.ask() == counted


async def test_the_loop_does_something_else_before_a_page_is_rendered_and_between_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = Pages(monkeypatch)
    monkeypatch.setattr(metrics_page, "RENDERING_SHARE_MAX", 1e-12)
    monkeypatch.setattr(metrics_page, "PAUSE_SECONDS_MAX", 0.05)
    loop, turns = asyncio.get_running_loop(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    loop.call_soon(turn)
    began = loop.time()
    await pages.ask()
    assert turns >= 1
    await pages.ask()
    assert loop.time() - began >= 0.04


async def test_others_get_the_page_if_who_was_to_render_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    gone, other = (asyncio.ensure_future(pages.ask()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()

    assert await asyncio.wait_for(other, 5.0) == 0
    assert gone.cancelled()
