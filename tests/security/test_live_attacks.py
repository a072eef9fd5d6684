"""An outsider against a fleet as `pointsman up` starts it, with keys for clients: two ingresses, two tenants."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import nats
import pytest
from nats.aio.client import Client

from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestEvent, RequestFailed, RequestFinished
from pointsman_cli.discovery import FleetFile, find_fleet
from tests.security.live import key_for, secrets_of
from tests.support.fake_engine import running_engine
from tests.support.log_reading import events_in, link_to
from tests.support.up import OUTSIDER, RunningUp, pointsman_up
from tests.support.waiting import eventually

MEMO = [7 + number % 900 for number in range(1100)]
ENDS = (RequestFinished, RequestFailed, RequestCancelled)
HINTS = re.compile(r"cached|instance|ttft|knowledge|predicted|hit|queue|engine", re.IGNORECASE)


@dataclass(frozen=True)
class Fleet:
    up: RunningUp
    file: FleetFile
    keys: dict[str, str]
    ingresses: list[str]

    def credentials(self, name: str) -> dict[str, Any]:
        return {"nkeys_seed_str": (self.up.data / "credentials" / name).read_text().strip()}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    arguments = ("--instances", "2", "--ingresses", "2", "--speed", "50", "--set", "ingress.require_keys=true")
    with pointsman_up(tmp_path_factory.mktemp("live"), *arguments) as up:
        up.wait_for("Try it")
        file = find_fleet(data=up.data)
        keys = {tenant: key_for(tenant, up.data) for tenant in ("alice", "bob")}
        ingresses = [process.url for process in file.of_role("ingress")]
        asyncio.run(admitted(ingresses, keys.values()))
        yield Fleet(up, file, keys, ingresses)
        up.stop()


async def admitted(ingresses: list[str], keys: Iterable[str]) -> None:
    """Keys are effective everywhere within 5 s."""

    async def everywhere() -> bool:
        statuses = set()
        for ingress in ingresses:
            for key in keys:
                async with session.get(f"{ingress}/v1/models", headers={"authorization": f"Bearer {key}"}) as answer:
                    statuses.add(answer.status)
        return statuses == {200}

    async with aiohttp.ClientSession() as session:
        await eventually(everywhere, seconds=5, what="each key's effect in each ingress")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def asked(
    fleet: Fleet, http: aiohttp.ClientSession, tenant: str, prompt: list[int], *, ingress: int = 0, **more: Any
) -> tuple[int, dict[str, str], dict[str, Any]]:
    headers = {"authorization": f"Bearer {fleet.keys[tenant]}", "x-slo-ttft-ms": "3600000", **more.pop("headers", {})}
    body = {"model": fleet.file.model, "prompt": prompt, "max_tokens": 2, **more}
    async with http.post(f"{fleet.ingresses[ingress]}/v1/completions", json=body, headers=headers) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.json()


async def events(fleet: Fleet) -> list[RequestEvent]:
    async with link_to(fleet.file) as link:
        return [event for event in await events_in(link.log) if isinstance(event, RequestEvent)]


async def test_a_guess_of_another_tenants_prompt_answers_like_a_wrong_one(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
    for _ in range(3):
        await asked(fleet, http, "alice", MEMO)
    right = await asked(fleet, http, "bob", MEMO)
    wrong = await asked(fleet, http, "bob", [*MEMO[500:], *MEMO[:500]])

    def told(answer: tuple[int, dict[str, str], dict[str, Any]]) -> tuple[Any, ...]:
        hints = {name: value for name, value in answer[1].items() if HINTS.search(name)}
        return answer[0], hints, answer[2]["usage"]

    assert right[0] == 200
    assert told(right) == told(wrong)


async def test_no_header_and_no_field_names_another_tenant(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    names = ("x-tenant", "x-tenant-id", "x-pointsman-tenant", "openai-organization", "x-forwarded-user")
    status, _, _ = await asked(
        fleet, http, "bob", [1, 2, 3], user="alice", headers=dict.fromkeys(names, "alice") | {"x-request-id": "spoof"}
    )
    arrived = [event for event in await events(fleet) if isinstance(event, RequestArrived)]

    assert status == 200
    assert {event.tenant for event in arrived if event.client_request_id == "spoof"} == {"bob"}


async def test_the_same_id_on_two_ingresses_at_once_harms_nobody(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    many = [
        asked(fleet, http, tenant, [number, 1, 2], ingress=number % 2, headers={"x-request-id": "the-same"})
        for number in range(10)
        for tenant in ("alice", "bob")
    ]
    answers = await asyncio.gather(*many)
    logged = await events(fleet)
    arrived = [e.request for e in logged if isinstance(e, RequestArrived) and e.client_request_id == "the-same"]
    ends = Counter(event.request for event in logged if isinstance(event, ENDS))

    assert Counter(status for status, _, _ in answers) == {200: 20}
    assert len(set(arrived)) == len(arrived) == 20
    assert {ends[request] for request in arrived} == {1}


async def test_without_a_key_nobody_is_told_anything(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    said = []
    for ingress in fleet.ingresses:
        for path in ("/v1/models", "/v1/models/x", "/metrics", "/readyz", "/docs", "/openapi.json", "/"):
            async with http.get(ingress + path) as answer:
                said.append((path, answer.status, await answer.read()))
        async with http.post(f"{ingress}/v1/completions", json={"prompt": "x"}) as answer:
            said.append(("POST", answer.status, await answer.read()))
        async with http.get(f"{ingress}/health?verbose") as answer:
            assert (answer.status, await answer.read()) == (200, b"")

    assert {(path, status) for path, status, _ in said if status not in (401, 404)} == set()
    assert [path for path, _, body in said for text in secrets_of(fleet.file, fleet.up.data) if text in body] == []


async def test_nobody_gets_on_the_bus_without_a_credential(fleet: Fleet) -> None:
    client = Client()
    with pytest.raises(nats.errors.Error):
        await client.connect(fleet.file.nats, allow_reconnect=False)
    await client.close()


@pytest.mark.parametrize("credential", ["reader.nk", "workers/default/engine-1.nk"])
async def test_a_stolen_credential_steals_no_prompt_and_stops_nobody(
    fleet: Fleet, http: aiohttp.ClientSession, credential: str
) -> None:
    async with running_engine() as evil:
        await forge(fleet, credential, evil.url)
        answers = [await asked(fleet, http, "alice", [number, 5, 6], ingress=number % 2) for number in range(10)]

    assert {status for status, _, _ in answers} == {200}
    assert evil.received == evil.questions == []


async def forge(fleet: Fleet, credential: str, url: str) -> None:
    """What an outsider would try at once: an instance of its own, one in another's name, the stolen one at another URL,
    and the fleet drained."""

    async def silent(_: Exception) -> None:
        pass

    joined = {
        "type": "InstanceJoined", "at": 1e12, "url": url, "model": fleet.file.model, "block_tokens": 64, "engine_block_tokens": 16,
        "kv_capacity_tokens": 10**6, "max_model_len": 10**5, "prefill": {"fixed_s": 0, "per_token_s": 0, "per_token_squared_s": 0}, "epoch": 2**52,
    }  # fmt: skip
    reported = {
        "type": "InstanceReported",
        "at": 1e12,
        "epoch": 2**52,
        "serving": True,
        "waiting": 0,
        "running": 0,
        "kv_usage": 0,
        "sequence": 0,
        "blocks": 0,
        "digest": 0,
    }
    client = await nats.connect(
        fleet.file.nats,
        name=OUTSIDER,
        error_cb=silent,
        allow_reconnect=False,
        inbox_prefix="_INBOX.x",
        **fleet.credentials(credential),
    )
    for instance in ("evil", "engine-2", "engine-1"):
        for event in (joined, reported, reported):
            await client.publish(f"pm.default.fleet.{instance}", json.dumps(event | {"instance": instance}).encode())
    for actor in ("local", "scaler", "reader"):
        for instance in ("engine-1", "engine-2"):
            drain = {"type": "DrainInstance", "instance": instance, "reason": "mine"}
            await client.publish(f"pm.default.cmd.drain.{actor}", json.dumps(drain).encode())
    await client.flush()
    await client.close()
    await asyncio.sleep(0.3)
