"""Two models and a LoRA adapter behind one address, as `pointsman up --also MODEL=ENGINES --lora NAME` starts them, and a trace of
a request through this fleet, with the log's sequences."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, NotFoundError

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.decisions import RequestGranted, RequestPlaced
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestFinished
from pointsman.ports import Link
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman_cli.discovery import FleetFile
from tests.support.ingress_world import CHAT
from tests.support.log_reading import whole_log
from tests.support.otlp_collector import CollectedSpan, Collector, collector
from tests.support.up import RunningUp, pointsman_up
from tests.support.waiting import eventually

SPEED = 40.0
LONG = " ".join(f"fact {number}" for number in range(200))
"""Several blocks of text."""
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("collector")) as running:
        yield running


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, collected: Collector) -> Iterator[RunningUp]:
    arguments = ("--instances", "1", "--also", "Coder 7B=1", "--lora", "poet", "--speed", str(SPEED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        patch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with pointsman_up(tmp_path_factory.mktemp("fleet"), *arguments, "--set", "ingress.access_log=true") as running:
            running.wait_for("Try it")
            yield running
            running.stop()


@pytest.fixture
async def client(fleet: FleetFile) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=fleet.ingress + "/v1", api_key="unused") as opened:
        await until_listed(opened, {"pointsman-sim", "poet", "Coder 7B"})
        yield opened


async def until_listed(client: AsyncOpenAI, names: set[str]) -> None:
    async with asyncio.timeout(10):
        while {model.id async for model in client.models.list()} != names:  # noqa: ASYNC110 - it can only be asked
            await asyncio.sleep(0.1)


async def ask(client: AsyncOpenAI, model: str, text: str) -> tuple[str, int, int]:
    """Who answered, how many prompt tokens were predicted to be cached there, and how many the engine says were."""
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    reported = -1
    async for chunk in raw.parse():
        assert chunk.model == model
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            reported = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return raw.headers["x-pointsman-instance"], int(raw.headers["x-pointsman-cached-tokens"]), reported


async def test_all_models_are_listed_on_one_address_with_the_parents_of_adapters(client: AsyncOpenAI) -> None:
    listed = [model.model_dump() async for model in client.models.list()]
    one = await client.models.retrieve("poet")

    assert [(model["id"], model["parent"]) for model in listed] == [
        ("pointsman-sim", None),
        ("poet", "pointsman-sim"),
        ("Coder 7B", None),
    ]
    assert all(model["max_model_len"] > 0 for model in listed)
    assert one.model_dump() == listed[1]


async def test_a_request_goes_to_the_pool_of_its_model_and_lives_in_that_pools_log(
    client: AsyncOpenAI, fleet: FleetFile
) -> None:
    for model, instance in (("pointsman-sim", "engine-1"), ("Coder 7B", "coder-7b-engine-1")):
        assert (await ask(client, model, f"hello, {model}"))[0] == instance

    assert fleet.further == {"coder-7b": "Coder 7B"}
    assert await instances_in_log(fleet, "default") == {"engine-1"}
    assert await instances_in_log(fleet, "coder-7b") == {"coder-7b-engine-1"}


async def instances_in_log(fleet: FleetFile, pool: str) -> set[str]:
    """Where the requests in a pool's log were served, once each has its end."""
    settings = fleet.settings(pool)
    async with (
        asyncio.timeout(10),
        open_link(settings, ScaledClock(SPEED), HealthBoard(), name="test", user=BusUser(BusRole.READER)) as link,
    ):
        running, served = 0, set[str]()
        async for entry in link.log.read(1, kinds=("request",)):
            event = getattr(entry, "event", None)
            running += isinstance(event, RequestArrived)
            if isinstance(event, RequestFinished):
                served.add(event.instance)
                running -= 1
                if not running:
                    return served
    return set()


async def test_an_adapter_shares_no_prefix_with_its_base_model_and_its_own_are_found_again(client: AsyncOpenAI) -> None:
    cold = await ask(client, "pointsman-sim", LONG)
    first = await ask(client, "poet", LONG)
    again = await ask(client, "poet", LONG)

    assert {cold[0], first[0], again[0]} == {"engine-1"}
    assert (cold[1:], first[1:]) == ((0, 0), (0, 0))
    assert again[1] == again[2] > 0


async def test_an_unknown_model_is_refused_as_openai_does(client: AsyncOpenAI) -> None:
    for asked in (ask(client, "nobody", "hello"), client.models.retrieve("nobody")):
        with pytest.raises(NotFoundError) as refusal:
            await asked

        assert refusal.value.code == "model_not_found"


async def test_an_adapter_that_is_loaded_while_the_engine_runs_can_be_asked_for_until_it_is_unloaded(
    client: AsyncOpenAI, fleet: FleetFile
) -> None:
    engine = fleet.of_role("engine")[0].url
    await tell_engine(f"{engine}/v1/load_lora_adapter", {"lora_name": "critic", "lora_path": "/adapters/critic"})
    await until_listed(client, {"pointsman-sim", "poet", "critic", "Coder 7B"})

    assert (await ask(client, "critic", "hello"))[0] == "engine-1"

    await tell_engine(f"{engine}/v1/unload_lora_adapter", {"lora_name": "critic"})
    await until_listed(client, {"pointsman-sim", "poet", "Coder 7B"})
    with pytest.raises(NotFoundError):
        await ask(client, "critic", "hello")


async def tell_engine(url: str, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()


async def test_one_trace_leads_from_the_client_through_ingress_and_scheduler_to_the_engine(
    up: RunningUp, link: Link, collected: Collector
) -> None:
    body = {
        "model": "pointsman-sim",
        "stream": True,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hello"}],
    }
    headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    request = urllib.request.Request(f"{up.url}{CHAT}", json.dumps(body).encode(), headers)
    request_id = await asyncio.to_thread(_request_id, request)
    spans = {span.name: span for span in collected.trace(TRACE, spans=6)}
    log = {entry.sequence: entry.event for entry in await whole_log(link.log)}

    server, decide, queue = spans[f"POST {CHAT}"], spans["decide"], spans["queue"]
    assert {name: _parent(span, spans) for name, span in spans.items()} == {
        server.name: PARENT,
        "tokenise": server.name,
        "route": server.name,
        "decide": "route",
        "queue": "route",
        "chat pointsman-sim": server.name,
    }
    assert {span.service for span in (decide, queue)} == {"pointsman-scheduler"}
    assert {spans[name].service for name in (server.name, "route", "chat pointsman-sim")} == {"pointsman-ingress"}
    logged = {name: log[sequence] for span in (server, decide, queue) for name, sequence in span.sequences.items()}
    kinds = (RequestArrived, RequestPlaced, RequestGranted, PrefillFinished, RequestFinished)
    assert {name: type(event) for name, event in logged.items()} == {kind.__name__: kind for kind in kinds}
    assert {getattr(event, "request", "") for event in logged.values()} == {request_id}
    await eventually(lambda: _accesses(up, request_id) == [TRACE])  # lines are written a moment later


def _accesses(up: RunningUp, request_id: str) -> list[str]:
    """Trace ids of the access log's lines about a request."""
    lines = [
        json.loads(line) for line in (up.data / "logs" / "ingress.log").read_text().splitlines() if "access" in line
    ]
    return [line["trace_id"] for line in lines if line["request_id"] == request_id]


def _request_id(request: urllib.request.Request) -> str:
    with urllib.request.urlopen(request) as answer:
        answer.read()
        return str(answer.headers["x-pointsman-request-id"])


def _parent(span: CollectedSpan, spans: dict[str, CollectedSpan]) -> str:
    return next((name for name, other in spans.items() if other.id == span.parent), span.parent)
