"""Who holds which prefix, asked of a real fleet as another router asks: over HTTP and NATS, of leader and follower, and
right after all schedulers were killed."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import nats
import pytest
from nats.aio.client import Client

from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import Credentials
from pointsman_cli.command_client import connected_link
from pointsman_cli.discovery import FleetFile, find_fleet
from pointsman_cli.up.command import CREDENTIALS
from tests.support.up import RunningUp, pointsman_up
from tests.support.waiting import eventually
from tests.tidy.pages import ROOT, blocks

ROUTER = BusUser(BusRole.ROUTER, "other", PoolName("default"))
PAGE = ROOT / "docs/overlap.md"
PROMPTS = [[number] * 400 + list(range(1000, 1600)) for number in range(1, 5)]
WARM_SECONDS = 1.0
"""Counted in looks."""
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    directory = tmp_path_factory.mktemp("fleet")
    Credentials(directory / "data" / CREDENTIALS).make([PoolName("default")], routers=[ROUTER])
    arguments = "--instances", "2", "--schedulers", "2", "--speed", "20", "--set", "scheduler.checkpoint_seconds=1"
    with pointsman_up(directory, *arguments) as running:
        running.wait_for("Try it")
        asyncio.run(fill(find_fleet(data=running.data)))
        yield running
        running.stop()


async def fill(fleet: FleetFile) -> None:
    async with aiohttp.ClientSession() as http:
        for prompt in PROMPTS:
            assert (await complete(http, fleet, prompt))[0]
        await eventually(lambda: all_known(http, fleet), what="the caches in the index")


async def complete(http: aiohttp.ClientSession, fleet: FleetFile, prompt: list[int]) -> tuple[str, int]:
    """The engine, and what it says that it had of the prompt."""
    body = {"model": fleet.model, "prompt": prompt, "max_tokens": 2}
    async with http.post(f"{fleet.ingress}/v1/completions", json=body) as answer:
        usage = (await answer.json())["usage"]
        return answer.headers["x-pointsman-instance"], (usage.get("prompt_tokens_details") or {}).get(
            "cached_tokens", 0
        )


async def overlap(http: aiohttp.ClientSession, fleet: FleetFile) -> Answer:
    url = f"{fleet.of_role('ingress')[0].probes}/kv/overlap"
    async with http.post(url, json={"prompts": [{"token_ids": prompt} for prompt in PROMPTS]}) as answer:
        told: Answer = await answer.json()
        return told | {"status": answer.status}


async def all_known(http: aiohttp.ClientSession, fleet: FleetFile) -> bool:
    told = await overlap(http, fleet)
    exact = all(instance["knowledge"] == "exact" for instance in told.get("instances", []))
    return exact and min(best(told), default=0) > 900


def matched(answer: Answer) -> dict[str, list[int]]:
    return {instance["instance"]: instance["matched_tokens"] for instance in answer["instances"]}


def best(answer: Answer) -> list[int]:
    return [max(tokens) for tokens in zip(*matched(answer).values(), strict=True)]


@asynccontextmanager
async def router(fleet: FleetFile) -> AsyncIterator[Client]:
    """A plain client with the credential of another router, as docs/overlap.md shows."""
    seed = Credentials(Path(fleet.credentials)).file(ROUTER)
    client = await nats.connect(fleet.nats, nkeys_seed=str(seed), inbox_prefix=b"_INBOX.router.default.other")
    try:
        yield client
    finally:
        await client.close()


async def ready_schedulers(fleet: FleetFile, http: aiohttp.ClientSession) -> list[str]:
    found = []
    for process in fleet.of_role("scheduler"):
        try:
            async with http.get(f"{process.url}/readyz") as answer:
                found += [process.url] if answer.status == 200 else []
        except aiohttp.ClientError:
            pass
    return found


async def test_the_answer_is_what_the_engines_then_deliver(fleet: FleetFile) -> None:
    async with aiohttp.ClientSession() as http:
        told = await overlap(http, fleet)
        for number, prompt in enumerate(PROMPTS):
            instance, cached = await complete(http, fleet, prompt)
            assert matched(told)[instance][number] == cached
        assert told["behind"] <= 50
        assert 0 <= told["age"] < 10


async def test_another_router_asks_leader_and_follower_over_nats(fleet: FleetFile) -> None:
    asked = json.dumps({"type": "OverlapRequest", "prompts": [{"token_ids": prompt} for prompt in PROMPTS]}).encode()
    answers: dict[bool, Answer] = {}
    async with router(fleet) as client, asyncio.timeout(10):
        while len(answers) < 2:
            told = json.loads((await client.request("pm.default.cmd.overlap", asked, timeout=2)).data)
            assert told["type"] in ("OverlapAnswered", "OverlapRefused")
            if told["type"] == "OverlapAnswered":
                answers[told["leading"]] = told
            await asyncio.sleep(0.05)

    leader, follower = answers[True], answers[False]
    assert leader["scheduler"] != follower["scheduler"]
    assert matched(leader) == matched(follower)
    assert min(best(leader)) > 900


def test_the_examples_of_the_page_run(fleet: FleetFile) -> None:
    shell, python = blocks(PAGE.read_text())[:2]
    admin = fleet.of_role("ingress")[0].probes
    told = subprocess.run(
        ["bash", "-c", shell.text.replace("http://127.0.0.1:8081", admin).replace("qwen2.5-7b", fleet.model)],
        capture_output=True, check=True,
    )  # fmt: skip
    assert [len(i["matched_blocks"]) for i in json.loads(told.stdout)["instances"]] == [2, 2]

    seed = Credentials(Path(fleet.credentials)).file(ROUTER)
    own = python.text.replace("nats://127.0.0.1:4222", fleet.nats).replace("router-1", ROUTER.name)
    ran = own.replace(f"credentials/routers/default/{ROUTER.name}.nk", str(seed))
    told = subprocess.run([sys.executable, "-c", ran], capture_output=True, check=True)
    assert json.loads(told.stdout)["type"] == "OverlapAnswered"


async def test_in_a_flood_each_gets_an_answer_or_a_refusal_and_decisions_go_on(fleet: FleetFile) -> None:
    """All of it goes to two schedulers on this machine; requests of clients are answered meanwhile."""
    asked = json.dumps(
        {"type": "OverlapRequest", "prompts": [{"token_ids": prompt} for prompt in PROMPTS] * 4}
    ).encode()
    async with router(fleet) as client, aiohttp.ClientSession() as http:
        flood = [asyncio.create_task(client.request("pm.default.cmd.overlap", asked, timeout=20)) for _ in range(100)]
        instance, _ = await complete(http, fleet, PROMPTS[0])
        kinds = [json.loads(answer.data) for answer in await asyncio.gather(*flood)]

    refused = [told for told in kinds if told["type"] == "OverlapRefused"]
    print(f"{len(refused)} of {len(kinds)} refused")
    assert instance
    assert {told["reason"] for told in refused} <= {"too_often"}
    assert all(told["retry_after"] > 0 for told in refused)


async def test_killed_schedulers_are_warm_within_the_first_second_of_readiness(up: RunningUp, fleet: FleetFile) -> None:
    async with aiohttp.ClientSession() as http:
        before = await overlap(http, fleet)
        async with connected_link(fleet.settings(), name="test") as link:
            await eventually(link.checkpoints.labels, seconds=30.0, what="a checkpoint")
        pids = [process.pid for process in fleet.of_role("scheduler")]
        restored = restores(up)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while not await is_up_again(up, pids, http):  # noqa: ASYNC110 - asking is how one knows
                await asyncio.sleep(0.02)
        told: dict[str, Any] = {}

        async def is_warm() -> bool:
            told.update(await overlap(http, fleet))
            return bool(told["status"] == 200)

        await eventually(is_warm, seconds=WARM_SECONDS)

    print(f"answered as of {told['as_of']}, before {before['as_of']}")
    assert matched(told) == matched(before)
    assert told["as_of"] >= before["as_of"]
    assert told["scheduler"] != before["scheduler"]
    assert restores(up) > restored, "the answer comes from a checkpoint"


async def is_up_again(up: RunningUp, killed: list[int], http: aiohttp.ClientSession) -> bool:
    fleet = find_fleet(data=up.data)
    others = [process for process in fleet.of_role("scheduler") if process.pid not in killed]
    return bool(others) and bool(await ready_schedulers(fleet, http))


def restores(up: RunningUp) -> int:
    logs = (path.read_text() for path in (up.data / "logs").glob("scheduler*.log"))
    return sum(len(re.findall("checkpoint_restored", text)) for text in logs)
