"""A real engine that keeps more than its device holds: a few prompts that do not fit on the device together, asked over and
over, and what the log says of it."""

import asyncio
from pathlib import Path
from random import Random

import aiohttp

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.requests import RequestFinished
from pointsman_cli.discovery import find_fleet
from tests.support.log_reading import events_in, link_to
from tests.support.up import pointsman_up
from tests.support.vllm import BOOT_SECONDS_MAX

DEVICE_BLOCKS = 40
PROMPT_TOKENS = 512
"""Of each prompt, in whole blocks: as much as can be a hit. Three prompts are more than the device holds."""
SETTLE_SECONDS = 1.0


async def log_of_prompts_asked_twice(
    directory: Path, engine_arguments: str, *, prompts: int, more: int = 0
) -> list[LogEvent]:
    """Ask unlike prompts one after the other, twice, and `more` others once, of one engine behind a whole fleet. Returns
    the fleet's log."""
    arguments = f"--max-model-len 1024 --enable-prompt-tokens-details {engine_arguments}"
    told = ("--engine", "vllm", "--instances", "1", "--kv-blocks", str(DEVICE_BLOCKS), "--engine-args", arguments)
    chance = Random(7)
    texts = [[chance.randrange(100, 20_000) for _ in range(PROMPT_TOKENS + 1)] for _ in range(prompts + more)]
    with pointsman_up(directory, *told) as up:
        up.wait_for("Stop +Ctrl-C", BOOT_SECONDS_MAX)
        fleet = find_fleet(data=up.data)
        async with link_to(fleet) as link:
            for text in texts[:prompts] * 2 + texts[prompts:]:
                await _ask(fleet.ingress, fleet.model, text)
                await asyncio.sleep(SETTLE_SECONDS)
            events = await events_in(link.log)
        up.stop()
    return events


def second_round(events: list[LogEvent], *, prompts: int) -> list[tuple[int | None, int | None, int]]:
    """Tokens of each prompt that were cached when it was asked again, of those predicted, and of those loaded back."""
    placed = [event for event in events if isinstance(event, RequestPlaced)][prompts : 2 * prompts]
    ends = [event for event in events if isinstance(event, RequestFinished)][prompts : 2 * prompts]
    loaded = [sum(load.tokens for load in event.loads) for event in placed]
    return [(end.cached_tokens, end.predicted_cached_tokens, tokens) for end, tokens in zip(ends, loaded, strict=True)]


def what_was_measured(events: list[LogEvent], *, prompts: int) -> str:
    """TTFT of the prompts when they were computed, and when they were loaded back."""
    ends = [event for event in events if isinstance(event, RequestFinished)]
    seconds = [f"{end.ttft:.2f}" for end in ends]
    return f"TTFT computed {' '.join(seconds[:prompts])} s, loaded back {' '.join(seconds[prompts : 2 * prompts])} s"


async def _ask(url: str, model: str, prompt: list[int]) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers={"x-slo-ttft-ms": "600000"}) as answer,
    ):
        content = await answer.text()
        assert answer.status == 200, content
