"""Hostile requests against a fleet as people run it, by a seed. `make fuzz` sends 20,000 and more; the suite a few hundred.

Half of schemathesis's requests obey the OpenAPI document, half break it; `hostile` makes the others. After all of them: no
5xx of ours, no leak, every request in the log has one end, memory and files are back, nobody connected where a client said.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok

from pointsman.contracts.decisions import RequestRejected
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from pointsman_cli.discovery import FleetFile, find_fleet
from tests.integration.test_malformed_requests import SOUND
from tests.security.hostile import BAITS, MODEL, Attempt, attempts
from tests.security.judging import Answer, Judge
from tests.security.live import conversation, files_with, key_for, public_document, secrets_of, usage
from tests.support.log_reading import events_in, link_to
from tests.support.up import RunningUp, pointsman_up
from tests.support.waiting import eventually

SEED = int(os.environ.get("POINTSMAN_FUZZ_SEED", "14"))
REQUESTS = int(os.environ.get("POINTSMAN_FUZZ_REQUESTS", "500"))
LONG = REQUESTS >= 5000
OPERATIONS_MAX = 100 if LONG else 6
"""Of the document; building the strategies of one takes a good part of a second."""
BY_SCHEMA = 0.2
"""Share of the requests that schemathesis makes."""
AT_ONCE = 24
RSS_GROWTH_MAX = 96 << 20
FILES_GROWTH_MAX = 12
ENDS = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)


SHAPES = {
    "split, with keys": ("--split", "1+1", "--set", "ingress.require_keys=true"),
    "without keys": ("--instances", "2"),
}
"""The suite fuzzes the first, `make fuzz` both with half of the requests each."""
SHARE = REQUESTS // 2 if LONG else REQUESTS


@dataclass(frozen=True)
class Target:
    """`key`: of a client; empty, if nobody asks for one."""

    up: RunningUp
    fleet: FleetFile
    key: str


@pytest.fixture(scope="module", params=SHAPES if LONG else list(SHAPES)[:1])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    shape = SHAPES[request.param]
    with pointsman_up(tmp_path_factory.mktemp("fuzz"), *shape, "--speed", "50", "--model", MODEL) as up:
        up.wait_for("Try it")
        yield Target(up, find_fleet(data=up.data), key_for("fuzzer", up.data) if len(shape) > 2 else "")
        up.stop()


@pytest.fixture
def judge(target: Target) -> Judge:
    return Judge((*secrets_of(target.fleet, target.up.data), *([target.key.encode()] if target.key else [])))


@pytest.mark.timeout(3600)
async def test_hostile_requests_get_an_answer_and_learn_nothing(target: Target, judge: Judge) -> None:
    async with bait() as (bait_port, visits):
        made = attempts(SEED, round(SHARE * (1 - BY_SCHEMA)), bait_port=bait_port, key=target.key)
        await send([next(made) for _ in range(100)], target.up.port, judge)
        before = usage(target.fleet, "ingress", "scheduler")
        await send(made, target.up.port, judge)
        await eventually(
            lambda: _returned(before, usage(target.fleet, "ingress", "scheduler")), seconds=30, what="memory and files"
        )

    print(judge.statuses, judge.codes, f"{judge.unanswered} unanswered")
    assert visits == []
    assert not judge.complaints, "\n".join([f"seed {SEED}", *judge.complaints])
    assert judge.statuses[200] > SHARE // 20
    assert judge.statuses[502] <= SHARE // 100


@pytest.mark.timeout(3600)
async def test_requests_from_the_openapi_document_get_an_answer_and_learn_nothing(target: Target, judge: Judge) -> None:
    document = with_bodies(await public_document(f"{target.fleet.of_role('ingress')[0].probes}/openapi.json"))
    await asyncio.to_thread(by_schema, document, target, judge)

    assert not judge.complaints, "\n".join([f"seed {SEED}", *judge.complaints])


async def test_afterwards_every_request_has_one_end(target: Target) -> None:
    async with link_to(target.fleet) as link:
        arrived: list[str] = []
        ends: Counter[str] = Counter()

        async def all_ended() -> bool:
            events = await events_in(link.log)
            arrived[:] = [event.request for event in events if isinstance(event, RequestArrived)]
            ends.clear()
            ends.update(event.request for event in events if isinstance(event, ENDS))
            return set(arrived) <= set(ends)

        await eventually(all_ended, seconds=20, what="the end of every request")

    assert arrived
    assert len(arrived) == len(set(arrived))
    assert set(ends.values()) == {1}


def test_afterwards_nothing_that_was_said_is_in_a_log_or_file(target: Target) -> None:
    up = target.up
    ours = [path for path in (up.data / "logs").glob("*.log") if not path.name.startswith("engine-")]
    logs = b"".join(path.read_bytes() for path in ours) + up.output.encode()

    assert b"Traceback" not in logs
    assert b"unexpected_error" not in logs
    assert b"nats_forbidden" not in logs
    assert b"\x1b" not in logs
    assert Path(target.fleet.secret_file).read_bytes().strip() not in logs
    assert {bait: files_with(bait.encode(), up.data) for bait in BAITS} == {bait: [] for bait in BAITS}
    assert len(logs) < 200_000 + REQUESTS * 20, "clients fill the logs"


# How it is sent


async def send(made: Any, port: int, judge: Judge) -> None:
    turns = iter(made)

    async def in_turn() -> None:
        for attempt in turns:
            assert isinstance(attempt, Attempt)
            raw = await conversation(
                port, attempt.raw, complete=attempt.complete, read_bytes_max=attempt.read_bytes_max
            )
            judge.hear(attempt, raw)

    await asyncio.gather(*(in_turn() for _ in range(AT_ONCE)))


def by_schema(document: dict[str, Any], target: Target, judge: Judge) -> None:
    """Half of the requests that schemathesis makes obey the document."""
    schema = schemathesis.openapi.from_dict(document)
    results = list(schema.get_all_operations())
    chosen = Random(SEED).sample(results, min(OPERATIONS_MAX, len(results)))
    examples = max(1, round(SHARE * BY_SCHEMA / 2 / len(chosen)))
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    for result in chosen:
        assert isinstance(result, Ok), result
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @seed(SEED)
            @settings(
                max_examples=examples,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case: schemathesis.Case[Any]) -> None:
                answer = case.call(base_url=target.up.url, headers=headers, timeout=30)
                heard = Answer(answer.status_code, {n.lower(): v[0] for n, v in answer.headers.items()}, answer.content)
                attempt = Attempt(f"{case.method} {case.formatted_path} {case.body!r:.500}".encode())
                judge.judge(attempt, heard)
                judge.check_leaks(attempt, answer.content)

            with contextlib.suppress(Unsatisfiable):  # an operation without parameters cannot be broken
                one()


def with_bodies(document: dict[str, Any]) -> dict[str, Any]:
    """The document says of a body that it is an object. So that more than the first check is reached, its fields have
    the types of a sound one here. Without the paths of the admin port."""
    document["paths"] = {
        path: operations for path, operations in document["paths"].items() if "servers" not in operations
    }
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if path in SOUND and "application/json" in content:
            content["application/json"]["schema"] = _schema_of(SOUND[path][0])
    return document


def _schema_of(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0, "maximum": 50}
        case str():
            return {"type": "string", "enum": [MODEL]} if value == MODEL else {"type": "string", "maxLength": 40}
        case list():
            return {"type": "array", "maxItems": 5, "items": {"anyOf": [_schema_of(item) for item in value[:4]]}}
        case dict():
            fields = {name: _schema_of(item) for name, item in value.items()}
            return {"type": "object", "properties": fields, "required": list(fields)[:3]}
        case _:
            return {}


def _returned(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return all(
        after[name].rss_bytes < start.rss_bytes + RSS_GROWTH_MAX and after[name].files <= start.files + FILES_GROWTH_MAX
        for name, start in before.items()
    )


@asynccontextmanager
async def bait() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A listener that clients name as an address for others: its port, and who came."""
    visits: list[bytes] = []

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(await reader.read(2000))
        writer.close()

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], visits
