"""Two tenants who send the same prompts through an ingress: what each is told of cached tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.support.tenants import ALICE, BOB

PROMPT_TOKENS_MIN = 200
STORY = "The ferryman counts the boats that pass the bridge, and writes each of them into his book. " * 16


def bodies(model: str) -> dict[str, dict[str, Any]]:
    """By path: everything that reads a prompt and reports cached tokens."""
    chat = [{"role": "user", "content": STORY}]
    return {
        "/v1/completions": {"model": model, "prompt": list(range(100, 100 + PROMPT_TOKENS_MIN)), "max_tokens": 2},
        "/v1/chat/completions": {"model": model, "messages": chat, "max_tokens": 2},
        "/v1/responses": {"model": model, "input": f"Reply. {STORY}", "max_output_tokens": 2},
        "/v1/messages": {"model": model, "messages": [{"role": "user", "content": f"Say. {STORY}"}], "max_tokens": 2},
    }


@dataclass(frozen=True)
class Told:
    """Cached tokens of one answer: as the engine counts them, and as predicted."""

    reported: int
    predicted: int


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any], tenant: Mapping[str, str]) -> Told:
    patient = {"x-slo-ttft-ms": "600000", **tenant}
    async with client.post(url, json=body, headers=patient) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        assert not any("engine" in value for value in answer.headers.values())
        return Told(_reported(usage), int(answer.headers["x-pointsman-cached-tokens"]))


def _reported(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


async def check_isolation(
    client: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any], *, block_tokens: int
) -> None:
    """Asserts that nothing is shared across, and everything within."""
    first = await ask(client, url + path, body, ALICE)
    again = await ask(client, url + path, body, ALICE)
    across = await ask(client, url + path, body, BOB)
    posing = await ask(client, url + path, {**body, "cache_salt": "guess"}, BOB)
    within = await ask(client, url + path, body, BOB)

    assert first == across == posing == Told(0, 0), path
    assert again == within, path
    assert again.reported == again.predicted >= PROMPT_TOKENS_MIN - 2 * block_tokens, (path, again)
