"""A fleet with default settings. One document that takes longer than its TTFT objective even alone is asked again and again:
answered every time, with a predicted TTFT that came true. Then the fleet gets poison of every kind on every subject of its log
and its commands, and goes on."""

import asyncio
import base64
import json
import re
import sqlite3
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp
import nkeys
import pytest
import pytest_asyncio
from nats.aio.client import Client

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.commands import (
    ChangeApiKey,
    DescribeFleet,
    DrainInstance,
    ScalePool,
    SetTenantPolicies,
    UndrainInstance,
)
from pointsman.contracts.requests import RequestFinished
from pointsman_cli.discovery import find_fleet
from tests.golden.samples import COMMANDS, EVENTS
from tests.support.log_reading import events_in, link_to
from tests.support.poison import bad_fields, bad_utf8, deep
from tests.support.up import POINTSMAN, RunningUp, pointsman_up
from tests.support.waiting import eventually

DOCUMENT_TOKENS, TIMES = 29_696, 20
SLO_SECONDS = 5.0
WRITERS = {
    "workers/default/engine-1": ("kv.engine-1", "fleet.engine-1"),
    "ingress": ("request.r-1", "lost"),
    "scaler": ("scale",),
    "scheduler": ("leader",),
}
"""Subjects of the log by the credential that may write there."""
SENDERS = {
    "ingress": ("route", "handover", "follow", "cancel", "fleet"),
    "rebalancer": ("migrate",),
    "operators/local": ("drain.local", "scale.local", "keys.local", "tenants.local"),
    "scheduler": ("resync.engine-1",),
}
"""Subjects of commands, likewise."""
OBEYED: dict[str, tuple[type, ...]] = {
    "drain.local": (DrainInstance, UndrainInstance),
    "scale.local": (ScalePool,),
    "keys.local": (ChangeApiKey,),
    "tenants.local": (SetTenantPolicies,),
}
"""What an operator may ask for there is done and is no poison."""
STRANGE_SUBJECTS = (b"pm.default.fleet.\xff\xfe", b"pm.default.fleet.[/red]", b"pm.default.request.\xc3\x28")


@dataclass(frozen=True)
class Answer:
    predicted_s: float
    upper_s: float
    best_effort: bool
    cached_tokens: int
    ttft_s: float
    """In engine seconds, from the log."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with pointsman_up(tmp_path_factory.mktemp("fleet"), "--instances", "2") as running:
        running.wait_for("curl ")
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(up: RunningUp) -> Sequence[Answer]:
    """All of them, since none is refused. Asked at the engines' real speed: a slow machine's delays are wall time."""
    chance = Random(3)
    document = [chance.randrange(1000, 30_000) for _ in range(DOCUMENT_TOKENS)]
    fleet = find_fleet(data=up.data)
    async with link_to(fleet) as link, aiohttp.ClientSession() as session:
        asked = [await _ask_document(session, fleet.ingress, fleet.model, document)]
        probes = fleet.of_role("ingress")[0].probes
        await eventually(lambda: _is_known(session, probes, document), what="the index of the document")
        asked += [await _ask_document(session, fleet.ingress, fleet.model, document) for _ in range(TIMES - 1)]
        ends: list[RequestFinished] = []

        async def all_are_logged() -> bool:
            ends[:] = _ends(await events_in(link.log))
            return len(ends) == TIMES

        await eventually(all_are_logged, what="the log of the last answer")
    return [Answer(*answer, ttft_s=end.ttft) for answer, end in zip(asked, ends, strict=True)]


def test_the_first_is_late_as_predicted_and_says_so(answers: Sequence[Answer]) -> None:
    first = answers[0]

    assert first.best_effort
    assert first.cached_tokens == 0
    assert 5.5 < first.predicted_s < 6.5
    assert first.predicted_s <= first.upper_s
    assert first.ttft_s == pytest.approx(first.predicted_s, rel=0.2)


def test_from_then_on_its_prefix_is_cached_and_it_is_on_time(answers: Sequence[Answer]) -> None:
    assert len(answers) == TIMES > 1
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


async def _ask_document(
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


def garbage() -> list[bytes]:
    """Every kind of message that nobody may believe, but for those that are merely wrong."""
    events = [encode(event) for event in EVENTS]
    made = [b"", b"\xff\xfe", b"{", b"[" * 50_000, b'{"type":"Unknown"}', b"null"]
    made += [deep(event) for event in events[::4]] + [bad_utf8(event) for event in events[::4]]
    for event in EVENTS[::2]:
        made += [
            payload for where, payload in bad_fields(event) if re.search(r"keys|at =|epoch|sequence|digest", where)
        ]
    return [payload for payload in made if len(payload) < 100_000]


@asynccontextmanager
async def client_of(url: str, seed: str) -> AsyncIterator[Client]:
    client = Client()
    await client.connect(url, max_reconnect_attempts=2, nkeys_seed_str=seed)
    try:
        yield client
        await client.flush()
    finally:
        await client.close()


async def poison(url: str, credentials: Path) -> int:
    """Publish all of it, each where its thief may; returns how many messages the log has got."""
    seeds = {name: (credentials / f"{name}.nk").read_text().strip() for name in WRITERS | SENDERS}
    bad = garbage()
    for name, kinds in WRITERS.items():
        async with client_of(url, seeds[name]) as client:
            for payload in bad:
                for kind in kinds:
                    await client.publish(f"pm.default.{kind}", payload)
    for name, kinds in SENDERS.items():
        async with client_of(url, seeds[name]) as client:
            for kind in kinds:
                unwanted = [c for c in COMMANDS if not isinstance(c, OBEYED.get(kind, (DescribeFleet,)))]
                for payload in (*bad[:20], *map(encode, unwanted)):
                    await client.publish(f"pm.default.cmd.{kind}", payload)
    await poison_by_hand(url, seeds["ingress"])
    return len(bad) * sum(map(len, WRITERS.values())) + len(STRANGE_SUBJECTS) + 1


async def poison_by_hand(url: str, seed: str) -> None:
    """What no client library sends."""
    host, port = url.removeprefix("nats://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    greeting = json.loads((await reader.readline()).removeprefix(b"INFO "))
    pair = nkeys.from_seed(bytearray(seed.encode()))
    signature = base64.urlsafe_b64encode(pair.sign(greeting["nonce"].encode())).rstrip(b"=").decode()
    login = {"verbose": False, "headers": True, "nkey": pair.public_key.decode(), "sig": signature}
    writer.write(b"CONNECT %s\r\n" % json.dumps(login).encode())
    for subject in STRANGE_SUBJECTS:
        writer.write(b"PUB %s 2\r\n{}\r\n" % subject)
    header = b"NATS/1.0 \xff\xfe\r\nName\xff: \xff\r\n\r\n"
    writer.write(b"HPUB pm.default.fleet.engine-1 %d %d\r\n%s{}\r\n" % (len(header), len(header) + 2, header))
    writer.write(b"PING\r\n")
    await writer.drain()
    assert b"-ERR" not in await reader.readuntil(b"PONG\r\n")
    writer.close()


def ask(up: RunningUp, text: str) -> int:
    body = {"model": "pointsman-sim", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{up.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def process_ids(up: RunningUp) -> dict[int, str]:
    """Every process that `up` has started, by its id."""
    listed = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().replace("\x00", " ") for pid in listed}


async def tool(up: RunningUp, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        POINTSMAN, *arguments, "--from", str(up.data), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def test_a_fleet_that_is_poisoned_serves_on_with_the_same_processes(up: RunningUp) -> None:
    url = up.wait_for(r"nats://127\.0\.0\.1:\d+")[0]
    before = process_ids(up)
    assert [await asyncio.to_thread(ask, up, f"before {n}") for n in range(2)] == [200] * 2

    poisons = await poison(url, up.data / "credentials")

    async def serves() -> bool:
        return await asyncio.to_thread(ask, up, "after") == 200

    await eventually(serves, what="an answer after the poison")
    kept = "SELECT count(*) FROM dead_letters"  # the server may still store what it has taken
    await eventually(lambda: archived(up, kept) == poisons, seconds=60, what="the dead letters in the archive")
    assert [await asyncio.to_thread(ask, up, f"after {n} " * 50) for n in range(4)] == [200] * 4
    fleet, doctor, verified = await asyncio.gather(
        tool(up, "fleet"), tool(up, "doctor"), tool(up, "replay", "--verify")
    )
    assert process_ids(up) == before, up.output
    assert "started again" not in up.output
    assert fleet[0] == 0, fleet
    assert re.search(rf"{poisons:,} entries do not decode", doctor[1]), doctor
    assert "could not be applied" not in doctor[1]
    assert "different 0" in verified[1], verified
    assert f"{poisons:,} entries do not decode" in verified[1]


def archived(up: RunningUp, query: str) -> int:
    with closing(sqlite3.connect(up.data / "archive.sqlite")) as connection:
        return int(connection.execute(query).fetchone()[0])
