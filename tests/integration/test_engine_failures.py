"""Engines that fail, hang or are slow: what the log is told, when a request goes elsewhere, and when it stays."""

import asyncio
import gc
import json
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.shared_timers import SharedTimer
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceEjected, InstanceLeft, InstanceProbed, InstanceSuspected
from pointsman.contracts.requests import PrefillFinished, RequestAttemptFailed, RequestFailed, RequestFinished
from pointsman.primitives import Epoch, InstanceId, WallSeconds
from pointsman.state.fleet import Instance
from pointsman_ingress import key_probe, metrics
from pointsman_ingress.engine import answer as engine_answer
from pointsman_ingress.engine.answer import EngineFailedError
from pointsman_ingress.engine.first_byte import POSTPONED_MAX, FirstByteDeadline
from pointsman_ingress.key_probe import KeyProber
from pointsman_ingress.lifecycle import RequestLifecycle
from pointsman_ingress.placement import fleet_view, in_flight, retry_budget
from pointsman_ingress.placement.retry_budget import RetryBudget
from tests.support.events import joined, reported
from tests.support.fake_engine import Behaviour, running_engine
from tests.support.ingress_world import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONE,
    STREAM,
    TOKENS,
    TWO,
    IngressBench,
    drop,
    eventually_listed,
    world_with,
)
from tests.support.log_reading import events_in
from tests.support.raw_engine import STREAM_HEAD, running_raw_engine, whole
from tests.support.waiting import eventually

GONE = InstanceId("engine-0")
AT_ONCE: dict[str, Any] = {"first_byte_seconds_min": 0.2, "first_byte_factor": 1.0}
"""The fake scheduler predicts 0.25 s."""
STAYS: dict[str, Any] = {**AT_ONCE, "request_timeout_seconds": 60.0}


async def failures(world: IngressBench) -> list[RequestAttemptFailed]:
    return [event for event in await world.events() if isinstance(event, RequestAttemptFailed)]


async def asked(world: IngressBench, body: dict[str, Any] = TOKENS, path: str = COMPLETIONS) -> tuple[int, str]:
    """The status, and who answered."""
    async with world.post(path, body) as answer:
        await answer.read()
        return answer.status, answer.headers.get("x-pointsman-instance", "")


def counted(instance: str, failure: str) -> float:
    """By the metric."""
    labels = {"pool": "default", "engine": instance, "failure": failure}
    return REGISTRY.get_sample_value("pointsman_engine_failures_total", labels) or 0.0


# What the log is told


@pytest.mark.parametrize(
    ("behaviour", "body", "failure", "status"),
    [
        (Behaviour.ERRS, TOKENS, "http_5xx", 500),
        (Behaviour.RESETS, TOKENS, "stream_reset", 0),
        (Behaviour.RESETS_AFTER_HEAD, STREAM, "stream_reset", 0),
        (Behaviour.BREAKS_OFF, STREAM, "stream_reset", 0),
        (Behaviour.ERRS_IN_STREAM, STREAM, "http_5xx", 200),
        (Behaviour.ERRS_IN_MID_STREAM, STREAM, "stream_reset", 0),
        (Behaviour.HANGS, STREAM, "first_byte_timeout", 0),
        (Behaviour.HANGS_AFTER_HEAD, STREAM, "first_byte_timeout", 0),
        (Behaviour.HANGS_AFTER_FIRST, STREAM, "chunk_timeout", 0),
    ],
)
async def test_the_log_is_told_who_failed_a_request_and_how(
    behaviour: Behaviour, body: dict[str, Any], failure: str, status: int
) -> None:
    async with world_with(**AT_ONCE, chunk_timeout_seconds=0.2) as world:
        world.one.script.append(behaviour)
        await asked(world, body)

        (told,) = await failures(world)
        assert (told.instance, told.attempt, told.failure, told.status) == (ONE, 1, failure, status)


async def test_an_error_in_place_of_the_first_token_is_seen_by_another_engine_and_not_by_the_client() -> None:
    async with world_with() as world:
        world.one.script.append(Behaviour.ERRS_IN_STREAM)
        async with world.post(COMPLETIONS, STREAM) as answer:
            text = await answer.text()

        assert answer.headers["x-pointsman-instance"] == TWO
        assert "error" not in text
        assert text.endswith("data: [DONE]\n\n")


async def test_an_error_in_the_middle_of_a_stream_reaches_the_client_once_and_the_request_has_failed() -> None:
    async with world_with() as world:
        world.one.script.append(Behaviour.ERRS_IN_MID_STREAM)
        async with world.post(COMPLETIONS, STREAM) as answer:
            text = await answer.text()

        assert text.count('"error"') == 1
        assert text.endswith("data: [DONE]\n\n")
        assert [event.reason for event in await world.events() if isinstance(event, RequestFailed)] == [
            "engine_broke_off"
        ]


async def test_a_mistake_of_ours_within_an_event_ends_the_stream_with_an_event_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mistaken(_: RequestLifecycle) -> None:
        raise RuntimeError

    monkeypatch.setattr(RequestLifecycle, "first_token", mistaken)
    async with world_with() as world:
        world.one.script.append(Behaviour.PAUSES)
        async with world.post(COMPLETIONS, STREAM) as answer:
            text = await answer.text()

    *_, last = filter(None, text.split("\n\n"))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"


async def test_an_error_in_a_stream_that_is_the_requests_fault_is_its_refusal_and_no_failure_of_the_engine() -> None:
    async with world_with() as world:
        world.one.script.append(Behaviour.BLAMES_IN_STREAM)
        async with world.post(COMPLETIONS, STREAM) as answer:
            assert (answer.status, (await answer.json())["error"]["message"]) == (400, "CUDA error")

        (end,) = await world.events()
        assert isinstance(end, RequestFailed)
        assert (end.reason, end.status, end.output_tokens) == ("engine_refused", 400, -1)


async def test_an_error_behind_output_that_is_the_requests_fault_costs_the_output_and_no_more() -> None:
    refusal = b'data: {"error": {"message": "too long", "type": "BadRequestError", "code": 413}}\n\n'
    async with world_with() as world, running_raw_engine() as engine:
        await world.grants({ONE: engine.url})
        engine.otherwise = [STREAM_HEAD + world.one.first_piece, world.one.first_piece + refusal, b"data: [DONE]\n\n"]
        engine.pause_seconds = 0.1
        async with world.post(COMPLETIONS, STREAM) as answer:
            assert await answer.read() == world.one.first_piece * 2 + refusal + b"data: [DONE]\n\n"

        end = (await world.events())[-1]
        assert isinstance(end, RequestFailed)
        assert (end.reason, end.status, end.output_tokens) == ("engine_refused", 413, 2)
        assert await failures(world) == []


@pytest.mark.parametrize("settings", [{"engine_api_key": "ours"}, {"keys": {"key": "alice"}}], ids=["own", "none"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_an_engine_that_refuses_the_operators_key_is_no_fault_of_the_clients_key(
    settings: dict[str, Any], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world_with(**settings) as world:
        world.one.key = world.two.key = "theirs"
        async with world.post(path, TOKENS, authorization="Bearer key") as answer:
            error = (await answer.json())["error"]

        ends = [event for event in await world.events() if isinstance(event, RequestFailed)]
        assert (answer.status, error["code"]) == (502, "engine_failed")
        assert [(end.reason, end.status) for end in ends] == [("engine_failed", 502)] * (path == COMPLETIONS)
    assert "--engine-api-key" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [None, {"key": "alice"}], ids=["forwarding", "with keys"])
async def test_engines_with_different_keys_are_each_sent_their_own(keys: dict[str, str] | None) -> None:
    """One without a key of ours is sent the client's, where clients need none here."""
    async with world_with(engine_api_key=f"{ONE}=first", keys=keys) as world:
        for instance, engine in ((ONE, world.one), (TWO, world.two)):
            await world.grants({instance: engine.url})
            async with world.post(COMPLETIONS, TOKENS, authorization="Bearer key") as answer:
                assert answer.status == 200
                await answer.read()

        sent = [engine.received[-1].headers.get("authorization") for engine in (world.one, world.two)]
        assert sent == ["Bearer first", None if keys else "Bearer key"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@pytest.mark.parametrize("keys", [None, {"key": "alice"}])
async def test_an_engine_says_itself_when_it_may_be_asked_again(path: str, keys: dict[str, str] | None) -> None:
    busy = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\nx-other: secret\r\n"
    async with world_with(keys=keys) as world, running_raw_engine() as engine:
        engine.otherwise = [whole(b'{"error": {"message": "busy", "code": 429}}', head=busy)]
        await world.grants({ONE: engine.url, TWO: engine.url})
        async with world.post(path, TOKENS, authorization="Bearer key") as answer:
            assert (answer.status, answer.headers["retry-after"]) == (429, "7")
            assert "x-other" not in answer.headers


FULL = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
BUSY: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"error": {"message": FULL, "type": "Service Unavailable", "param": None, "code": 503}},
    "/v1/messages": {"type": "error", "error": {"type": "Service Unavailable", "message": FULL}},
}
"""What vLLM 0.32 answers with --max-num-queued-reqs, before it begins a stream."""
NOT_BUSY: dict[str, tuple[int, bytes]] = {
    "dead": (500, b'{"error": {"message": "EngineCore failed", "type": "InternalServerError", "code": 500}}'),
    "scaling": (503, b'{"error": "The model is currently scaling. Please try again later."}'),
    "proxy": (503, b"<html><h1>503 Service Unavailable</h1></html>"),
    "empty": (503, b""),
    "large": (503, b'{"error": {"type": "Service Unavailable", "message": "%b"}}' % (b"x" * 100_000)),
}


def refusing(status: int, body: bytes) -> list[bytes]:
    return [whole(body, head=b"HTTP/1.1 %d Refused\r\n" % status)]


@pytest.mark.parametrize("path", BUSY)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_busy_engine_has_not_failed_and_another_serves(path: str, streams: bool) -> None:
    body = {**TOKENS, "messages": HELLO["messages"], "stream": streams}
    async with world_with() as world, running_raw_engine() as busy:
        busy.answers[path] = refusing(503, json.dumps(BUSY[path]).encode())
        world.two.says["/v1/messages"] = {"content": []}
        await world.grants({ONE: busy.url, TWO: world.two.url})
        status, instance = await asked(world, body, path)

        assert (status, instance, busy.posted[-1]) == (200, TWO, path)
        assert await failures(world) == []


@pytest.mark.parametrize("keys", [None, {"key": "alice"}], ids=["no keys", "keys"])
@pytest.mark.parametrize("path", [*BUSY, "/tokenize"])
async def test_where_all_engines_are_busy_the_client_is_told_to_come_again(
    path: str, keys: dict[str, str] | None
) -> None:
    said = BUSY.get(path, BUSY[COMPLETIONS])
    async with world_with(keys=keys) as world, running_raw_engine() as engine:
        engine.answers[path] = refusing(503, json.dumps(said).encode())
        await world.grants({ONE: engine.url, TWO: engine.url})
        body = {**TOKENS, "messages": HELLO["messages"]}
        async with world.post(path, body, authorization="Bearer key") as answer:
            error = (await answer.json())["error"]

        assert (answer.status, answer.headers["retry-after"], error["message"]) == (503, "1", FULL)
        assert await failures(world) == []


@pytest.mark.parametrize("why", NOT_BUSY)
async def test_any_other_engine_that_is_unavailable_has_failed(why: str) -> None:
    status, body = NOT_BUSY[why]
    async with world_with() as world, running_raw_engine() as engine:
        engine.answers[COMPLETIONS] = refusing(status, body)
        await world.grants({ONE: engine.url, TWO: world.two.url})
        answered = await asked(world)

        (told,) = await failures(world)
        assert (told.instance, told.failure, told.status) == (ONE, "http_5xx", status)
        assert answered == (200, TWO)


async def test_an_engine_that_cannot_be_reached_is_told_of_as_such(world_without_engine_one: IngressBench) -> None:
    status, instance = await asked(world_without_engine_one)

    assert (status, instance) == (200, TWO)
    (told,) = await failures(world_without_engine_one)
    assert (told.instance, told.failure) == (ONE, "connect_failure")


@pytest.fixture
async def world_without_engine_one() -> Any:
    async with world_with() as world:
        await world.grants({**world.scheduler.engines, ONE: "http://127.0.0.1:9"})
        yield world


@pytest.mark.parametrize("refusal", [Behaviour.REFUSES, Behaviour.KNOWS_NO_KEY, Behaviour.KNOWS_NO_MODEL])
async def test_a_refusal_is_no_failure_of_the_engine(refusal: Behaviour) -> None:
    async with world_with() as world:
        world.one.script.append(refusal)
        await asked(world)

        assert await failures(world) == []


async def test_a_client_that_hangs_up_and_a_request_that_is_too_old_are_no_failures_of_the_engine() -> None:
    async with world_with(request_timeout_seconds=1.0) as world:
        world.one.script.extend([Behaviour.HANGS, Behaviour.HANGS_AFTER_FIRST])
        status, _ = await asked(world, STREAM)
        async with world.post(COMPLETIONS, STREAM) as answer:
            await answer.content.readany()
        await eventually(lambda: world.one.given_up == 2)

        assert status == 408
        assert await failures(world) == []


# The first byte


@pytest.mark.parametrize("behaviour", [Behaviour.HANGS, Behaviour.HANGS_AFTER_HEAD])
async def test_an_engine_that_does_not_begin_in_time_costs_the_client_nothing_but_that_time(
    behaviour: Behaviour,
) -> None:
    async with world_with(**AT_ONCE) as world:
        world.one.script.append(behaviour)
        status, instance = await asked(world, STREAM)
        await eventually(lambda: world.one.given_up == 1)

        assert (status, instance) == (200, TWO)
        assert [(a.attempt, a.excluded) for a in world.scheduler.asked] == [(1, []), (2, [ONE])]
        assert [type(event) for event in await world.events()] == [
            RequestAttemptFailed,
            PrefillFinished,
            RequestFinished,
        ]


@pytest.mark.parametrize(
    ("settings", "grant"),
    [
        ({"first_byte_seconds_min": 0.05, "first_byte_factor": 10.0}, {"expected_seconds": 60.0}),
        ({"first_byte_seconds_min": 600.0, "first_byte_factor": 10.0}, {"expected_seconds": 0.001}),
        ({"first_byte_seconds_min": 0.05, "first_byte_factor": 0.0}, {}),
        ({"first_byte_seconds_min": 0.05, "first_byte_factor": 10.0, "speed": 0.01}, {"expected_seconds": 0.1}),
    ],
)
async def test_an_engine_has_a_multiple_of_what_is_predicted_but_a_minimum_in_any_case(
    settings: dict[str, Any], grant: dict[str, Any]
) -> None:
    async with world_with(**settings, request_timeout_seconds=0.6) as world:
        world.scheduler.grant_fields = grant
        world.one.script.append(Behaviour.HANGS)

        assert await asked(world, STREAM) == (408, "")
        assert await failures(world) == []


async def test_an_answer_that_is_not_streamed_also_has_the_time_that_its_output_may_take() -> None:
    async with world_with(**AT_ONCE, slo_tpot_seconds=0.1, request_timeout_seconds=2.0) as world:
        world.one.script.extend([Behaviour.HANGS, Behaviour.HANGS])
        bodies = [{**TOKENS, "max_tokens": output_tokens} for output_tokens in (500, 1)]
        (long, _), short = await asyncio.gather(*(asked(world, body) for body in bodies))

        assert (long, short) == (408, (200, TWO))
        assert [told.failure for told in await failures(world)] == ["first_byte_timeout"]


async def test_a_client_that_wants_its_tokens_sooner_than_usual_makes_no_engine_fail() -> None:
    async with world_with(**AT_ONCE, slo_tpot_seconds=0.1, request_timeout_seconds=1.0) as world:
        world.one.script.append(Behaviour.HANGS)
        async with world.post(COMPLETIONS, {**TOKENS, "max_tokens": 500}, x_slo_tpot_ms="0.1") as answer:
            assert answer.status == 408
        assert await failures(world) == []


async def test_an_answer_whose_length_nobody_bounds_is_waited_for() -> None:
    async with world_with(**AT_ONCE, max_model_len=0, request_timeout_seconds=1.0) as world:
        world.one.script.append(Behaviour.HANGS)

        assert await asked(world, HELLO, CHAT) == (408, "")
        assert await failures(world) == []


@pytest.mark.parametrize("back", [True, False])
async def test_a_request_that_no_engine_took_a_connection_for_waits_for_one_within_the_hold(*, back: bool) -> None:
    async with world_with(hold_seconds=3.0, retries_max=0) as world:
        gone = "http://127.0.0.1:9"
        there = world.scheduler.engines
        await world.grants({ONE: gone, TWO: gone})
        asking = asyncio.create_task(asked(world))
        await eventually(lambda: len(world.scheduler.asked) > 2)
        if back:
            await world.grants(there)
        status, _ = await asking

        assert status == (200 if back else 502)
        assert {failure.failure for failure in await failures(world)} == {"connect_failure"}


REFUSING = {InstanceId(f"refusing-{number}"): "http://127.0.0.1:9" for number in range(2)}


@pytest.mark.parametrize("before", [True, False])
async def test_refused_connections_do_not_count_towards_the_retries(*, before: bool) -> None:
    async with world_with(retries_max=1) as world:
        one, two = {ONE: world.one.url}, {TWO: world.two.url}
        world.scheduler.engines = REFUSING | one | two if before else one | REFUSING | two
        world.one.script.append(Behaviour.ERRS)

        assert await asked(world) == (200, TWO)
        assert len(world.scheduler.asked) == 4


async def test_a_slow_engine_is_left_after_refused_connections_too() -> None:
    async with world_with(**AT_ONCE, retries_max=1, request_timeout_seconds=3.0) as world:
        world.scheduler.engines = REFUSING | world.scheduler.engines
        world.one.script.append(Behaviour.HANGS)

        assert await asked(world, STREAM) == (200, TWO)


async def test_a_request_that_was_refused_connections_fails_after_its_last_retry() -> None:
    async with world_with(retries_max=1) as world:
        world.scheduler.engines = REFUSING | world.scheduler.engines | {InstanceId("engine-3"): world.two.url}
        world.one.script.append(Behaviour.ERRS)
        world.two.script.append(Behaviour.ERRS)

        assert await asked(world) == (502, "")
        assert len(world.scheduler.asked) == 4


@pytest.mark.parametrize("idle", [True, False])
async def test_an_answer_that_the_leader_says_will_not_come_is_had_elsewhere(*, idle: bool) -> None:
    async with world_with(first_byte_seconds_min=0.5, first_byte_factor=100.0, request_timeout_seconds=4.0) as world:
        world.one.script.append(Behaviour.HANGS)
        if idle:
            world.scheduler.idle = {ONE}
        answered = await asked(world)
        told = await failures(world)

        assert answered == ((200, TWO) if idle else (408, ""))
        assert [(failure.instance, failure.failure) for failure in told] == ([(ONE, "first_byte_timeout")] * idle)


async def test_an_engine_that_is_said_to_be_idle_has_the_least_time_to_its_first_byte_all_the_same() -> None:
    async with world_with(first_byte_seconds_min=30.0) as world:
        world.one.pause = asyncio.Event()
        world.scheduler.idle = {ONE}
        asking = asyncio.create_task(asked(world))
        await eventually(lambda: sum(bool(named.requests) for named in world.scheduler.followed) >= 3)
        world.one.pause.set()

        assert await asking == (200, ONE)
        assert (await failures(world), world.two.received) == ([], [])


@pytest.mark.parametrize("why", ["no other engine", "no retries", "no budget"])
async def test_a_request_that_nobody_else_can_take_waits_on_and_the_log_is_told_once(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = 0 if why == "no retries" else 2
    budget: dict[str, Any] = {"retry_budget": 0.0} if why == "no budget" else {}
    monkeypatch.setattr(retry_budget, "RETRIES_MIN", 0)
    async with world_with(**STAYS, **budget, retries_max=retries) as world:
        if why == "no other engine":
            world.scheduler.engines = {ONE: world.one.url}
            await drop(world, TWO, stays=ONE)
        world.one.pause = asyncio.Event()
        before = counted(ONE, "first_byte_timeout")
        asking = asyncio.create_task(asked(world, STREAM))
        await eventually(lambda: len(world.one.received) == 1)
        await eventually(lambda: counted(ONE, "first_byte_timeout") > before)
        await asyncio.sleep(0.7)  # several deadlines
        told = await failures(world)
        world.one.pause.set()
        assert counted(ONE, "first_byte_timeout") == before + 1

        assert await asking == (200, ONE)
        assert [(t.instance, t.failure) for t in told] == [(ONE, "first_byte_timeout")]
        assert await failures(world) == told
        assert len(world.scheduler.asked) == 1


async def silent_for_good() -> None:
    async with asyncio.timeout(5):
        with FirstByteDeadline(0.1, lambda _seconds: True, SharedTimer(1.0)):
            time.sleep(0.5)  # noqa: ASYNC251 - so that nothing runs
            await asyncio.Event().wait()


async def test_a_long_wait_is_counted_by_a_shorter_timer() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(EngineFailedError), FirstByteDeadline(0.35, lambda _seconds: True, SharedTimer(0.1)):
        await asyncio.Event().wait()

    assert loop.time() - began >= 0.3


async def test_the_time_in_which_the_ingress_itself_stood_still_is_not_the_engines() -> None:
    answered = asyncio.Event()
    with FirstByteDeadline(0.1, lambda _seconds: True, SharedTimer(1.0)):
        asyncio.get_running_loop().call_later(0.05, answered.set)
        time.sleep(0.5)  # noqa: ASYNC251 - so that nothing runs
        await asyncio.sleep(0.05)
        await answered.wait()

    with pytest.raises(EngineFailedError):
        await silent_for_good()


async def test_an_ingress_that_stands_still_again_and_again_gives_up_an_engine_all_the_same() -> None:
    stalls: list[None] = []
    with pytest.raises(EngineFailedError):
        await silent_while_standing_still(stalls)

    assert POSTPONED_MAX <= len(stalls) < 4 * POSTPONED_MAX


async def silent_while_standing_still(stalls: list[None]) -> None:
    with FirstByteDeadline(0.01, lambda _seconds: True, SharedTimer(1.0)):
        while len(stalls) < 100:
            stalls.append(None)
            time.sleep(0.3)  # noqa: ASYNC251 - so that nothing runs
            await asyncio.sleep(0)


async def test_a_prefill_for_another_engine_has_its_own_deadline() -> None:
    async with world_with(**AT_ONCE) as world:
        three = world.one
        world.scheduler.engines = {ONE: world.one.url, TWO: world.two.url}
        world.scheduler.decoders = {TWO: world.two.url, ONE: three.url}
        world.one.script.append(Behaviour.HANGS)
        status, _ = await asked(world, STREAM)

        (told, *_) = await failures(world)
        assert (told.instance, told.failure) == (ONE, "first_byte_timeout")
        assert status == 200


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "late"),
    [
        ({"include_reasoning": True}, True),
        ({"include_reasoning": False}, False),
        ({"tools": [TOOL]}, False),
        ({"tools": [TOOL], "tool_choice": "required"}, False),
        ({"tools": [TOOL], "tool_choice": "none"}, True),
        ({"tools": []}, True),
    ],
)
async def test_a_response_that_hides_reasoning_or_begins_with_a_tool_call_is_no_late_first_byte(
    fields: dict[str, Any], late: bool
) -> None:
    created = b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n"
    body = {"model": "m", "input": "hello", "stream": True, "max_output_tokens": 500, **fields}
    async with world_with(**AT_ONCE, retries_max=1, request_timeout_seconds=3.0 if late else 1.0) as world:
        world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        world.one.first_piece = created
        await asked(world, body, "/v1/responses")

        assert [failure.failure for failure in await failures(world)][:1] == ["first_byte_timeout"] * late


# Silence within an answer


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_answer, "CUT_CHECK_WALL_SECONDS", 0.05)


async def tell(world: IngressBench, *events: LogEvent) -> None:
    """What the log says of engine one, which the ingress has then read."""
    report = reported(ONE, 0, [], at=ScaledClock().now())
    for event in (msgspec.structs.replace(report, running=1), *events):
        await world.log.append(event)
    last = reported(TWO, 0, [], at=ScaledClock().now())
    await world.log.append(msgspec.structs.replace(last, adapters=["read-up-to-here"]))
    await eventually_listed(world, "read-up-to-here")


def of_one() -> dict[str, Any]:
    return {"at": ScaledClock().now(), "instance": ONE, "epoch": Epoch(1)}


UNSOUND: dict[str, Callable[[], LogEvent]] = {
    "idle": lambda: reported(ONE, 0, [], at=ScaledClock().now()),
    "down": lambda: msgspec.structs.replace(reported(ONE, 0, [], at=ScaledClock().now(), serving=False), running=1),
    "suspected": lambda: InstanceSuspected(**of_one(), silent_seconds=3.0),
    "ejected": lambda: InstanceEjected(**of_one(), cause="latency", detail="slow", seconds=60.0, number=1),
    "gone": lambda: InstanceLeft(**of_one(), reason="the test says so"),
}


@pytest.mark.usefixtures("short_checks")
async def test_an_engine_that_works_may_be_silent_within_an_answer() -> None:
    async with world_with(chunk_timeout_seconds=0.1, request_timeout_seconds=5.0) as world:
        await tell(world)
        world.one.script.append(Behaviour.PAUSES)
        async with world.post(CHAT, {**HELLO, "stream": True}) as answer:
            await answer.content.readany()
            await asyncio.sleep(1.0)  # many timeouts
            world.one.resumes.set()
            text = await answer.text()

        assert text.endswith("data: [DONE]\n\n")
        assert "error" not in text
        assert await failures(world) == []


COMMENT = b": keep-alive\n\n"
"""Of vLLM's server with --sse-keep-alive-interval, whatever its model does."""


async def test_comments_are_no_first_output_of_an_engine_that_hangs() -> None:
    async with world_with(**AT_ONCE, request_timeout_seconds=5.0) as world, running_raw_engine() as hangs:
        hangs.answers[COMPLETIONS] = [STREAM_HEAD, *[COMMENT] * 100]
        hangs.pause_seconds = 0.1
        await world.grants({ONE: hangs.url, TWO: world.two.url})

        assert await asked(world, STREAM) == (200, TWO)
        assert [(told.instance, told.failure) for told in await failures(world)] == [(ONE, "first_byte_timeout")]
        assert [event.instance for event in await world.events() if isinstance(event, PrefillFinished)] == [TWO]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
async def test_an_error_after_comments_is_seen_by_another_engine_and_not_by_the_client(end: bytes) -> None:
    error = b'data: {"error": {"message": "x", "type": "InternalServerError", "code": 500}}' + end
    async with world_with() as world, running_raw_engine() as engine:
        engine.answers[COMPLETIONS] = [STREAM_HEAD + b": keep", b"-alive" + end, error, b"data: [DONE]" + end]
        engine.pause_seconds = 0.05
        await world.grants({ONE: engine.url, TWO: world.two.url})
        async with world.post(COMPLETIONS, STREAM) as answer:
            text = await answer.text()

        assert (answer.headers["x-pointsman-instance"], "error" in text) == (TWO, False)


@pytest.mark.usefixtures("short_checks")
async def test_comments_do_not_prolong_the_silence_within_an_answer() -> None:
    async with (
        world_with(chunk_timeout_seconds=0.3, request_timeout_seconds=5.0) as world,
        running_raw_engine() as hangs,
    ):
        hangs.answers[COMPLETIONS] = [STREAM_HEAD + world.one.first_piece, *[COMMENT] * 100]
        hangs.pause_seconds = 0.1
        await world.grants({ONE: hangs.url, TWO: world.two.url})
        await asked(world, STREAM)

        assert [(told.instance, told.failure) for told in await failures(world)] == [(ONE, "chunk_timeout")]


async def test_comments_between_events_of_a_slow_answer_reach_the_client() -> None:
    async with world_with(chunk_timeout_seconds=1.0) as world, running_raw_engine() as slow:
        event, end = world.one.first_piece, b"data: [DONE]\n\n"
        slow.answers[COMPLETIONS] = [STREAM_HEAD, *[COMMENT, COMMENT, COMMENT + event] * 5, end]
        slow.pause_seconds = 0.1
        await world.grants({ONE: slow.url, TWO: world.two.url})
        async with world.post(COMPLETIONS, STREAM) as answer:
            text = await answer.read()

        assert text == (COMMENT * 3 + event) * 5 + end
        assert await failures(world) == []


@pytest.mark.usefixtures("short_checks")
@pytest.mark.parametrize("why", UNSOUND)
@pytest.mark.parametrize("meanwhile", [False, True])
async def test_an_engine_of_which_that_is_not_known_may_not(why: str, meanwhile: bool) -> None:
    async with world_with(chunk_timeout_seconds=0.1, request_timeout_seconds=5.0) as world:
        await tell(world, *([] if meanwhile else [UNSOUND[why]()]))
        world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        async with world.post(CHAT, {**HELLO, "stream": True}) as answer:
            await answer.content.readany()
            if meanwhile:
                await tell(world, UNSOUND[why]())
            await answer.read()

        assert [told.failure for told in await failures(world)] == ["chunk_timeout"]


@pytest.mark.usefixtures("short_checks")
async def test_an_engine_of_which_nothing_was_heard_for_long_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_view, "PULSE_WALL_SECONDS", 0.1)
    monkeypatch.setattr(fleet_view, "FRESH_WALL_SECONDS", 0.1)
    async with world_with(chunk_timeout_seconds=0.1, request_timeout_seconds=5.0) as world:
        await tell(world)
        world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        await asked(world, STREAM)

        assert [told.failure for told in await failures(world)] == ["chunk_timeout"]


# The retry budget


async def test_what_is_beyond_the_retry_budget_is_told_to_ask_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "RETRIES_MIN", 1)
    async with world_with(retry_budget=0.0, first_byte_factor=0.0) as world:
        world.two.pause = asyncio.Event()
        world.one.script.extend([Behaviour.ERRS, Behaviour.ERRS])
        first = asyncio.create_task(asked(world, STREAM))
        await eventually(lambda: world.two.received)
        async with world.post(COMPLETIONS, STREAM) as refused:
            error = json.loads(await refused.read())["error"]
        world.two.pause.set()
        again = await first
        world.one.script.append(Behaviour.ERRS)
        later = await asked(world, STREAM)
        ends = [event for event in await world.events() if isinstance(event, RequestFailed)]

    assert (refused.status, error["code"]) == (503, "retry_budget_spent")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-pointsman-reject-reason"] == "retry_budget_spent"
    assert [(end.reason, end.status) for end in ends] == [("retry_budget_spent", 503)]
    assert again == later == (200, TWO)


async def test_the_death_of_one_of_two_engines_does_not_exhaust_the_retry_budget() -> None:
    async with world_with(first_byte_factor=0.0) as world:
        world.one.pause, world.two.pause = asyncio.Event(), asyncio.Event()
        both = [world.scheduler.engines, {TWO: world.two.url}]
        asking = []
        for number in range(60):
            world.scheduler.engines = both[number % 2]
            asking.append(asyncio.create_task(asked(world)))
            await eventually(lambda: len(world.one.received) + len(world.two.received) == len(asking))
        world.scheduler.engines = both[0]
        world.one.dies = True
        world.one.pause.set()
        await eventually(lambda: len(world.two.received) == 60)
        world.two.pause.set()
        answers = await asyncio.gather(*asking)

    assert set(answers) == {(200, TWO)}


async def test_where_every_engine_fails_the_budget_bounds_what_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "RETRIES_MIN", 0)
    async with world_with(retry_budget=0.5, first_byte_factor=0.0) as world:
        world.one.pause, world.two.pause = asyncio.Event(), asyncio.Event()
        world.one.dies = world.two.dies = True
        asking = [asyncio.create_task(asked(world)) for _ in range(20)]
        await eventually(lambda: len(world.one.received) == 20)
        world.one.pause.set()
        await eventually(lambda: len(world.two.received) >= 1)
        await eventually(lambda: sum(task.done() for task in asking) + len(world.two.received) == 20)
        world.two.pause.set()
        statuses = [status for status, _ in await asyncio.gather(*asking)]

    assert len(world.two.received) <= 10
    assert set(statuses) == {503}


async def test_a_request_has_its_place_in_the_budget_until_its_first_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "RETRIES_MIN", 1)
    async with world_with(retry_budget=0.0) as world:
        world.one.script.extend([Behaviour.ERRS, Behaviour.ERRS])
        world.two.script.append(Behaviour.HANGS_AFTER_FIRST)
        async with world.post(COMPLETIONS, STREAM) as streaming:
            await streaming.content.readany()
            again = await asked(world, STREAM)

    assert again == (200, TWO)


def test_the_budget_is_a_share_of_what_is_live_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "RETRIES_MIN", 1)
    budget = RetryBudget(0.5, "default")
    with ExitStack() as stack:
        of_six = [ticket.claim() for ticket in [stack.enter_context(budget.open()) for _ in range(6)]]
    with budget.open() as one, budget.open() as other:
        of_two = [one.claim(), one.claim(), other.claim()]

    assert of_six == [True, True, True, False, False, False]
    assert of_two == [True, True, False]
    assert (budget.live, budget.retrying) == (0, 0)


# Without a scheduler


async def test_without_a_scheduler_an_engine_that_failed_lately_is_left_alone() -> None:
    async with world_with(scheduler_timeout_seconds=0.05) as world:
        await world.scheduler.__aexit__(None, None, None)
        world.one.script.extend([Behaviour.ERRS] * 10)
        answers = [await asked(world) for _ in range(6)]

        assert answers == [(200, TWO)] * 6
        assert len(world.one.received) == 1


async def test_one_that_failed_is_tried_again_after_a_while_by_one_request_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall, steps = ScaledClock.wall, list[WallSeconds]()
    monkeypatch.setattr(ScaledClock, "wall", lambda clock: sum(steps, start=wall(clock)))
    async with world_with(scheduler_timeout_seconds=0.05, first_byte_factor=0.0) as world:
        await world.scheduler.__aexit__(None, None, None)
        world.one.script.extend([Behaviour.ERRS])
        await asked(world)
        world.two.script.extend([Behaviour.HANGS] * 4)
        busy = [asyncio.create_task(asked(world)) for _ in range(4)]
        await eventually(lambda: len(world.two.received) == 5)
        steps.append(in_flight.AVOIDED_WALL_SECONDS)
        world.one.pause = asyncio.Event()
        trying = asyncio.create_task(asked(world))
        await eventually(lambda: len(world.one.received) == 2)
        meanwhile = [await asked(world) for _ in range(3)]
        world.one.pause.set()
        tried = await trying
        after = await asked(world)
        for task in busy:
            task.cancel()

    assert meanwhile == [(200, TWO)] * 3
    assert tried == after == (200, ONE)


async def test_without_a_scheduler_a_hanging_engine_is_left_after_the_minimum() -> None:
    async with world_with(scheduler_timeout_seconds=0.05, first_byte_seconds_min=0.3) as world:
        await world.scheduler.__aexit__(None, None, None)
        world.one.script.append(Behaviour.HANGS)

        assert await asked(world, STREAM) == (200, TWO)
        assert [told.failure for told in await failures(world)] == ["first_byte_timeout"]


# Questions that are passed through


async def test_a_question_that_an_engine_does_not_answer_in_time_is_put_to_another() -> None:
    async with world_with(first_byte_seconds_min=0.3) as world:
        world.one.says["/detokenize"] = world.two.says["/detokenize"] = {"prompt": "hello"}
        world.one.script.append(Behaviour.HANGS)

        assert await asked(world, {"model": "m", "tokens": [1]}, "/detokenize") == (200, TWO)


async def test_what_is_asked_for_tokens_is_not_an_engine_that_failed_lately() -> None:
    async with world_with(scheduler_timeout_seconds=0.05) as world:
        world.one.script.append(Behaviour.ERRS)
        await asked(world)
        await asked(world, HELLO, CHAT)

        assert not world.one.questions
        assert world.two.questions


# What is remembered of engines that left


async def test_nothing_in_an_ingress_names_an_engine_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PERIOD_WALL_SECONDS", 0.05)
    monkeypatch.setattr(key_probe, "EVENTS_WALL_SECONDS_MAX", 0.1)
    async with world_with(probe=True) as world, running_engine() as leaving:
        now = ScaledClock().now()
        await world.log.append(joined(GONE, at=now, url=leaving.url, max_model_len=1000))
        await world.log.append(reported(GONE, 0, [], at=now))
        await eventually(lambda: probed(world, GONE))  # a later probe would take what the script says to the requests
        world.scheduler.engines = {GONE: leaving.url, TWO: world.two.url}
        for behaviour in (Behaviour.ANSWERS, Behaviour.ERRS):
            leaving.script.append(behaviour)
            await asked(world, HELLO, CHAT)
        before = remembering(GONE)
        await world.log.append(InstanceLeft(at=now, instance=GONE, epoch=Epoch(1), reason="scaled in"))

        await eventually(lambda: not remembering(GONE))

    assert before == {"InFlightRequests", "KeyProber", "PromptTokenizer"}


async def test_an_engine_that_is_not_followed_is_not_said_to_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    now, checks, silent = ScaledClock().now(), list[bool](), asyncio.Event()
    monkeypatch.setattr(key_probe, "REPEAT_WALL_SECONDS", WallSeconds(0.01))

    async def check(prober: KeyProber, instance: Instance) -> tuple[bool, str] | None:
        """The engine answers and its events do not come, as its worker says that it does not serve; later they do."""
        if instance.id != GONE:
            return None
        checks.append(instance.serving)
        if len(checks) > 1:
            return True, "the keys of a chat agree"
        await world.log.append(reported(GONE, 0, [], at=now, serving=False))
        await eventually(lambda: not serves(prober))
        silent.set()
        return False, "the keys of a chat differ"

    async with world_with(probe=True) as world, running_engine() as engine:
        monkeypatch.setattr(KeyProber, "_check_repeatedly", check)
        await world.log.append(joined(GONE, at=now, url=engine.url, max_model_len=1000))
        await world.log.append(reported(GONE, 0, [], at=now))
        await asyncio.wait_for(silent.wait(), 20)
        await world.log.append(reported(GONE, 0, [], at=now + 1.0))
        await eventually(lambda: probed(world, GONE))

        found = [event.parity for event in await events_in(world.log) if isinstance(event, InstanceProbed)]

    assert (found, checks) == ([True], [True, True])


def serves(prober: KeyProber) -> bool:
    instance = prober.pool.fleet.get(GONE, Epoch(1))
    return instance is not None and instance.serving


async def probed(world: IngressBench, engine: InstanceId) -> bool:
    return any(isinstance(event, InstanceProbed) and event.instance == engine for event in await events_in(world.log))


def remembering(engine: InstanceId) -> set[str]:
    """Classes of the ingress with an object that has the engine in a table of its own."""
    found = set()
    for owner in gc.get_objects():
        kind = type(owner)
        if str(kind.__module__).startswith("pointsman_ingress") and any(map(partial(_names, engine), _tables(owner))):
            found.add(kind.__name__)
    return found


def _tables(owner: object) -> list[Collection[Any]]:
    names = {*getattr(owner, "__dict__", ()), *getattr(owner, "__slots__", ())}
    values = (getattr(owner, name, None) for name in names)
    return [value for value in values if isinstance(value, (dict, set, list, deque))]


def _names(engine: InstanceId, table: Collection[Any]) -> bool:
    return any(engine in entry if isinstance(entry, tuple) else engine == entry for entry in list(table))
