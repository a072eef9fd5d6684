"""The small parts of the ingress: request ids, usage, whether a scheduler answers, and the view of the fleet."""

import asyncio
import re
from collections.abc import MutableMapping
from random import Random
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import CancelAnswered, RouteRejected
from pointsman.contracts.subjects import command_subject
from pointsman.ports import Reply
from pointsman.primitives import PoolName, RequestId, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.http_protocol import CLOSE_NOW
from pointsman_ingress.engine.usage import Usage, usage_in
from pointsman_ingress.http.call import HttpExchange, RequestIds
from pointsman_ingress.http.errors import OPENAI_ERRORS, internal_error, rejected, unknown_model
from pointsman_ingress.placement import scheduler_client
from pointsman_ingress.placement.scheduler_client import SchedulerLiveness
from pointsman_ingress.prompt.block_keys import BlockKeys
from pointsman_lab.memory.log import MemoryBroker
from tests.support.waiting import eventually


def rejection(reason: str, detail: str = "", *, retry_after: float = 1.0) -> RouteRejected:
    return RouteRejected(
        request=RequestId("r"), attempt=1, status=429, reason=reason, detail=detail, retry_after=retry_after
    )


def test_ids_are_fresh_and_long_enough_not_to_be_guessed() -> None:
    ids = RequestIds(Random(0))
    given = [ids.fresh() for _ in range(1000)]

    assert len(set(given)) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{24}", each) for each in given)  # 96 bits


@pytest.mark.parametrize("length", [10, None], ids=["whole", "stream"])
async def test_an_answer_that_has_begun_and_fails_does_not_look_whole_and_a_whole_one_is_left_alone(
    length: int | None,
) -> None:
    """HTTP/1.1 tells the client by the connection that a body of a known length is cut short."""
    sent: list[MutableMapping[str, Any]] = []
    closed: list[bool] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"method": "POST", "headers": [], CLOSE_NOW: lambda: closed.append(True)}
    call = HttpExchange("/v1/embeddings", OPENAI_ERRORS, scope, send, ids=RequestIds(Random(0)), clock=ScaledClock())
    await call.start("application/json", [], length=length)
    await call.write(b"12345")
    await call.fail(internal_error())
    begun, bodies = len(closed), [message["body"] for message in sent[1:]]
    await call.finish()
    await call.fail(internal_error())

    assert begun == len(closed) == (length is not None)
    assert [b"internal_error" in body for body in bodies] == ([False] if length else [False, True])


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (
            b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}',
            Usage(7, 2, 4),
        ),
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":null}}', Usage(7, 2, -1)),
        (b'{"usage":null}', Usage()),
        (b"{}", Usage()),
        (b"no json", Usage()),
    ],
)
def test_usage_is_the_engines_or_unknown(answer: bytes, usage: Usage) -> None:
    assert usage_in(answer) == usage


def test_retry_after_is_whole_wall_seconds_and_at_least_one() -> None:
    waits = [
        dict(rejected(rejection("overloaded", retry_after=wall), speed=1.0).headers)[b"retry-after"]
        for wall in (0, 0.2, 1.2)
    ]

    assert waits == [b"1", b"1", b"2"]


@pytest.mark.parametrize(
    ("reason", "detail", "message"),
    [
        ("queue_full", "9 requests wait already", "9 requests wait already. Ask again later."),
        ("slo_tpot", "", "The request was refused. Ask again later, or with a longer objective (x-slo-tpot-ms)."),
    ],
)
def test_a_rejection_has_a_reason_and_advice(reason: str, detail: str, message: str) -> None:
    assert rejected(rejection(reason, detail), speed=1.0).message == message


def test_an_unknown_model_is_answered_with_some_known_ones() -> None:
    few, many = (unknown_model("m", [f"m{number}" for number in range(count)]).message for count in (2, 1000))

    assert few == "The model 'm' does not exist; there is: m0, m1."
    assert many.endswith(", m19, and 980 more in /v1/models.")


def test_salt_and_model_change_the_keys_of_equal_prompts() -> None:
    keys = BlockKeys(secret=b"s", block_tokens=lambda: 4)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]

    assert len(keys.packed("m", tokens)) == 16
    assert keys.last("m", tokens) == keys.packed("m", tokens)[8:]
    assert len({keys.packed("m", tokens), keys.packed("n", tokens), keys.packed("m", tokens, cache_salt="a")}) == 3


async def test_without_requests_too_an_ingress_notices_that_no_scheduler_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_client, "LIVENESS_WALL_SECONDS", WallSeconds(0.02))
    monkeypatch.setattr(scheduler_client, "IDLE_WALL_SECONDS", WallSeconds(0.1))
    pool, clock, board = PoolName("default"), ScaledClock(), HealthBoard()
    broker = MemoryBroker(pool)
    commands = broker.client(clock, name="ingress").commands
    liveness = SchedulerLiveness(commands, pool, clock, board, WallSeconds(0.3))
    asked = 0

    async def leader(_command: AnyCommand, reply: Reply) -> None:
        nonlocal asked
        asked += 1
        await reply(CancelAnswered(request=RequestId("r"), ended=False))

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(liveness.watch())
        async with broker.client(clock, name="leader").commands.serve(command_subject(pool, "fleet"), leader):
            await eventually(lambda: asked == 2)
            whole = board.whole
        await eventually(lambda: "scheduler" in board.degraded_parts)
        at_once = liveness.timed_out
        await eventually(lambda: liveness.timed_out)
        async with broker.client(clock, name="next").commands.serve(command_subject(pool, "fleet"), leader):
            await eventually(lambda: board.whole)
        watching.cancel()

    assert (whole, at_once) == (True, False)
