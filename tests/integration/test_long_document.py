"""One document that takes longer than its TTFT objective even alone, asked again and again of an idle fleet with default
settings: answered every time, with a predicted TTFT that came true."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import aiohttp
import pytest
import pytest_asyncio

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.requests import RequestFinished
from pointsman_cli.discovery import find_fleet
from tests.support.log_reading import events_in, link_to
from tests.support.up import pointsman_up
from tests.support.waiting import eventually

READY_SECONDS_MAX = 120.0
INSTANCES = 2
DOCUMENT_TOKENS, TIMES = 29_696, 20
SLO_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    predicted_s: float
    upper_s: float
    best_effort: bool
    cached_tokens: int
    ttft_s: float
    """In engine seconds, from the log."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Answer]:
    """All of them, since none is refused."""
    chance = Random(3)
    document = [chance.randrange(1000, 30_000) for _ in range(DOCUMENT_TOKENS)]
    told = ("--instances", str(INSTANCES), "--speed", "1")  # a slow machine's delays are wall time
    with pointsman_up(tmp_path_factory.mktemp("document"), *told) as up:
        up.wait_for("Try it", READY_SECONDS_MAX)
        fleet = find_fleet(data=up.data)
        async with link_to(fleet) as link, aiohttp.ClientSession() as session:
            asked = [await _ask(session, fleet.ingress, fleet.model, document)]
            probes = fleet.of_role("ingress")[0].probes
            await eventually(lambda: _is_known(session, probes, document), what="the index of the document")
            asked += [await _ask(session, fleet.ingress, fleet.model, document) for _ in range(TIMES - 1)]
            ends: list[RequestFinished] = []

            async def all_are_logged() -> bool:
                ends[:] = _ends(await events_in(link.log))
                return len(ends) == TIMES

            await eventually(all_are_logged, what="the log of the last answer")
        up.stop()
    return [Answer(*answer, ttft_s=end.ttft) for answer, end in zip(asked, ends, strict=True)]


def test_the_first_is_late_as_predicted_and_says_so(answers: Sequence[Answer]) -> None:
    first = answers[0]

    assert first.best_effort
    assert first.cached_tokens == 0
    assert 5.5 < first.predicted_s < 6.5
    assert first.predicted_s <= first.upper_s
    assert first.ttft_s == pytest.approx(first.predicted_s, rel=0.2)


def test_from_then_on_its_prefix_is_cached_and_it_is_on_time(answers: Sequence[Answer]) -> None:
    for answer in answers[1:]:
        assert not answer.best_effort
        assert answer.cached_tokens > DOCUMENT_TOKENS - 1_024
        assert answer.predicted_s < SLO_SECONDS / 5
        assert answer.ttft_s < SLO_SECONDS / 2


def _ends(events: Sequence[LogEvent]) -> list[RequestFinished]:
    return [event for event in events if isinstance(event, RequestFinished)]


async def _is_known(session: aiohttp.ClientSession, probes: str, document: list[int]) -> bool:
    async with session.post(f"{probes}/kv/overlap", json={"prompts": [{"token_ids": document}]}) as answer:
        instances = (await answer.json()).get("instances", [])
    return max((instance["matched_tokens"][0] for instance in instances), default=0) > DOCUMENT_TOKENS - 1_024


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, document: list[int]
) -> tuple[float, float, bool, int]:
    body = {"model": model, "prompt": document, "max_tokens": 8}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        content, headers = await answer.json(), answer.headers
        assert answer.status == 200, content
        return (
            float(headers["x-pointsman-predicted-ttft-ms"]) / 1e3,
            float(headers["x-pointsman-predicted-ttft-upper-ms"]) / 1e3,
            headers.get("x-pointsman-best-effort") == "true",
            int(content["usage"]["prompt_tokens_details"]["cached_tokens"]),
        )
