"""Both steps of a split request over HTTP, with engines and a scheduler that do as the test says."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestHandedOver
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.primitives import InstanceId, Term
from pointsman_ingress.engine.disaggregation import SplitBody
from pointsman_ingress.http.json_form import LIGHT_BYTES_MAX
from tests.support.events import joined
from tests.support.fake_engine import Behaviour, running_engine
from tests.support.ingress_world import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONE,
    POOL,
    STREAM,
    TOKENS,
    TWO,
    IngressBench,
    world_with,
)
from tests.support.waiting import eventually

PLACE = {"do_remote_prefill": True, "remote_request_id": "there-1", "remote_host": "h", "remote_port": 1}


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    """Engine one prefills, engine two decodes."""
    async with world_with() as opened:
        opened.scheduler.engines = {ONE: opened.one.url}
        opened.scheduler.decoders = {TWO: opened.two.url}
        opened.one.transfer_params = PLACE
        yield opened


async def test_one_engine_prefills_and_the_other_is_told_where_the_cache_is(world: IngressBench) -> None:
    body = {**STREAM, "min_tokens": 2, "logprobs": 1, "structured_outputs": {"x": [None]}}
    async with world.post(COMPLETIONS, body, X_Request_Id="mine") as answer:
        content = await answer.text()

    assert content.endswith("data: [DONE]\n\n")
    assert answer.headers["x-pointsman-instance"] == TWO
    assert answer.headers["x-pointsman-prefill-instance"] == ONE
    (first,), (second,) = world.one.received, world.two.received
    own = answer.headers["x-pointsman-request-id"]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == own != "mine"
    assert first.fields["kv_transfer_params"]["do_remote_decode"] is True
    assert (first.fields["stream"], first.fields["max_tokens"]) == (False, 1)
    assert not {"min_tokens", "logprobs", "stream_options"} & set(first.fields)
    assert first.fields["structured_outputs"] == {"x": [None]}
    assert second.fields == {**body, "kv_transfer_params": PLACE}
    (command,) = world.scheduler.handed_over
    assert (command.request, command.instance) == (own, ONE)
    assert command.prefill > 0
    token, end = await world.events()
    assert isinstance(token, PrefillFinished)
    assert isinstance(end, RequestFinished)
    assert token.instance == end.instance == TWO
    assert end.cached_tokens == world.one.cached_tokens


async def test_a_chat_that_is_not_streamed_is_split_too(world: IngressBench) -> None:
    world.two.cached_tokens = 500
    async with world.post(CHAT, {**HELLO, "max_completion_tokens": 3}) as answer:
        await answer.read()

    assert (answer.status, answer.headers["x-pointsman-cached-tokens"]) == (200, "128")
    asked = world.one.received[0].fields
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize("place", [None, {}])
async def test_without_parameters_the_body_reaches_who_decodes_byte_for_byte(world: IngressBench, place: Any) -> None:
    world.one.transfer_params = place
    body = b' {"model":"m",  "prompt":[1,2,3], "max_tokens":2}\n'
    async with world.post(COMPLETIONS, body) as answer:
        await answer.read()

    assert world.two.received[0].body == body
    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.without_transfer


async def test_prefills_that_name_no_cache_are_counted_and_told(world: IngressBench) -> None:
    name, labels = "pointsman_handovers_without_transfer_total", {"pool": POOL, "engine": ONE}
    before = REGISTRY.get_sample_value(name, labels) or 0.0
    with capture_logs() as logs:
        for place in (PLACE, None, None):
            world.one.transfer_params = place
            async with world.post(COMPLETIONS, TOKENS) as answer:
                await answer.read()
        async with world.post(COMPLETIONS, {**TOKENS, "n": 2}) as answer:
            await answer.read()

    assert REGISTRY.get_sample_value(name, labels) == before + 2
    assert [line["instance"] for line in logs if line["event"] == "handover_without_transfer"] == [ONE, ONE]
    ends = [event for event in await world.events() if isinstance(event, RequestFinished)]
    assert [end.without_transfer for end in ends] == [False, True, True, False]


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": [[1, 2], [3, 4]]}, {"prompt": ["a", "b"]}])
async def test_what_cannot_be_split_is_done_by_who_decodes(world: IngressBench, several: dict[str, Any]) -> None:
    async with world.post(COMPLETIONS, {**TOKENS, **several}) as answer:
        await answer.read()

    assert world.one.received == []
    assert world.two.received[0].fields == {**TOKENS, **several}
    assert [command.prefill for command in world.scheduler.handed_over] == [0.0]


SOUND = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\r\n--x--\r\n'


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/messages", {**HELLO, "max_tokens": 3}, "application/json"),
        ("/rerank", {"model": "m", "query": "a", "documents": ["b"]}, "application/json"),
        ("/v1/audio/transcriptions", SOUND, "multipart/form-data; boundary=x"),
    ],
)
async def test_what_has_no_prefill_of_its_own_is_done_whole_by_who_decodes(
    world: IngressBench, path: str, body: Any, kind: str
) -> None:
    world.two.says[path] = {"text": "answer"}
    async with world.post(path, body, content_type=kind) as answer:
        assert (answer.status, await answer.json()) == (200, {"text": "answer"})

    assert world.one.received == []
    (received,) = world.two.received
    assert received.body == (body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize("behaviour", [Behaviour.ERRS, Behaviour.RESETS, Behaviour.BREAKS_OFF])
async def test_a_prefill_that_fails_is_placed_again_elsewhere(world: IngressBench, behaviour: Behaviour) -> None:
    world.one.script.append(behaviour)
    async with running_engine() as three:
        world.scheduler.engines = {ONE: world.one.url, "engine-3": three.url}  # type: ignore[dict-item]
        async with world.post(COMPLETIONS, STREAM) as answer:
            await answer.read()

        assert (answer.status, answer.headers["x-pointsman-prefill-instance"]) == (200, "engine-3")
    assert [command.excluded for command in world.scheduler.asked] == [[], [ONE]]


@pytest.mark.parametrize("behaviour", [Behaviour.ERRS, Behaviour.RESETS, Behaviour.RESETS_AFTER_HEAD])
async def test_who_fails_to_decode_before_the_first_token_is_left_out(
    world: IngressBench, behaviour: Behaviour
) -> None:
    world.two.script.append(behaviour)
    async with running_engine() as three:
        world.scheduler.decoders = {TWO: world.two.url, "engine-3": three.url}  # type: ignore[dict-item]
        async with world.post(COMPLETIONS, STREAM) as answer:
            content = await answer.text()

        assert (answer.headers["x-pointsman-instance"], len(three.received)) == ("engine-3", 1)
    assert content.count("data: [DONE]") == 1
    assert [command.excluded for command in world.scheduler.asked] == [[], [TWO]]
    assert len(world.one.received) == 2


@pytest.mark.parametrize(
    ("told", "behaviour", "place", "excluded"),
    [
        ({"role": "prefill"}, Behaviour.ERRS, PLACE, [ONE, TWO]),
        ({"role": "decode"}, Behaviour.ERRS, PLACE, [TWO]),
        ({"role": "prefill", "max_model_len": 10}, Behaviour.ERRS, PLACE, [TWO]),
        ({"role": "prefill"}, Behaviour.ERRS, None, [TWO]),
        ({"role": "prefill"}, Behaviour.KNOWS_NO_MODEL, PLACE, [TWO]),
    ],
)
async def test_who_prefilled_is_left_out_too_where_no_cache_came_and_another_engine_can_prefill(
    world: IngressBench, told: dict[str, Any], behaviour: Behaviour, place: Any, excluded: list[str]
) -> None:
    """Not if the decode engine computed all, nor for what it says of the request."""
    world.two.script.append(behaviour)
    world.one.transfer_params = place
    async with running_engine() as three:
        third: dict[str, Any] = {"url": three.url, "aliases": ["seen"], "max_model_len": 10_000} | told
        await world.log.append(joined("engine-3", at=ScaledClock().now(), **third))
        async with asyncio.timeout(5.0):
            while "seen" not in await _models(world):  # noqa: ASYNC110 - the ingress can only be asked
                await asyncio.sleep(0.02)
        world.scheduler.engines = {ONE: world.one.url, InstanceId("engine-3"): three.url}
        world.scheduler.decoders = {TWO: world.two.url, InstanceId("engine-4"): three.url}
        async with world.post(COMPLETIONS, STREAM) as answer:
            await answer.read()

    assert answer.status == 200
    assert [command.excluded for command in world.scheduler.asked] == [[], excluded]
    failures = [event for event in await world.events() if isinstance(event, RequestAttemptFailed)]
    blamed = [ONE if place else ""] if behaviour is Behaviour.ERRS else []
    assert [(event.instance, event.prefilled_by) for event in failures] == [(TWO, name) for name in blamed]


async def test_an_engine_that_refuses_the_connection_leaves_who_prefilled_in(world: IngressBench) -> None:
    """Its cache is still good."""
    async with running_engine() as three:
        await world.log.append(
            joined("engine-3", at=ScaledClock().now(), url=three.url, role="prefill", aliases=["seen"])
        )
        async with asyncio.timeout(5.0):
            while "seen" not in await _models(world):  # noqa: ASYNC110 - the ingress can only be asked
                await asyncio.sleep(0.02)
        world.scheduler.decoders = {InstanceId("gone"): "http://127.0.0.1:9", TWO: world.two.url}
        async with world.post(COMPLETIONS, STREAM) as answer:
            await answer.read()

    assert answer.status == 200
    assert [command.excluded for command in world.scheduler.asked] == [[], ["gone"]]


async def _models(world: IngressBench) -> str:
    async with world.client.get(world.url + "/v1/models") as answer:
        return await answer.text()


async def test_failures_of_either_engine_are_bounded_together(world: IngressBench) -> None:
    world.one.script.extend([Behaviour.ANSWERS, Behaviour.ERRS])
    world.two.script.append(Behaviour.ERRS)
    world.scheduler.decoders = {TWO: world.two.url, ONE: world.one.url}
    async with world.post(COMPLETIONS, TOKENS) as answer:
        assert answer.status == 503

    assert [command.excluded for command in world.scheduler.asked] == [[], [TWO], [TWO, ONE]]


async def test_a_stream_that_breaks_off_after_the_first_token_ends_with_an_error(world: IngressBench) -> None:
    world.two.script.append(Behaviour.BREAKS_OFF)
    async with world.post(COMPLETIONS, STREAM) as answer:
        content = await answer.text()

    assert '"code":"engine_failed"' in content
    end = (await world.events())[-1]
    assert isinstance(end, RequestFailed)
    assert (end.reason, end.instance) == ("engine_broke_off", TWO)


async def test_a_request_that_nobody_can_decode_any_more_is_refused_after_its_prefill(world: IngressBench) -> None:
    world.scheduler.hand_over_rejection = (429, "slo_tpot", 3.0)
    async with world.post(COMPLETIONS, STREAM) as answer:
        await answer.read()

    assert (answer.status, answer.headers["x-pointsman-reject-reason"]) == (429, "slo_tpot")
    assert not world.two.received
    (end,) = await world.events()
    assert isinstance(end, RequestFailed)
    assert (end.reason, end.status, end.instance) == ("slo_tpot", 429, ONE)


@pytest.mark.parametrize("reason", ["", "unknown_request", "already_ended"])
async def test_a_request_that_no_leader_follows_goes_on_as_planned_and_the_log_says_so(
    world: IngressBench, reason: str
) -> None:
    world.scheduler.silent_at_hand_over = not reason
    world.scheduler.hand_over_rejection = (503, reason, 0.0) if reason else None
    async with world.post(COMPLETIONS, STREAM) as answer:
        await answer.read()

    assert (answer.status, answer.headers["x-pointsman-instance"]) == (200, TWO)
    told, *_, end = await world.events()
    assert isinstance(told, RequestHandedOver)
    assert (told.source, told.instance, told.stamp) == (ONE, TWO, None)
    assert isinstance(end, RequestFinished)


async def test_what_the_prefill_engine_refuses_the_client_is_told(world: IngressBench) -> None:
    world.one.script.append(Behaviour.REFUSES)
    async with world.post(COMPLETIONS, STREAM) as answer:
        assert (answer.status, (await answer.json())["error"]["message"]) == (400, "the engine says no")

    (end,) = await world.events()
    assert isinstance(end, RequestFailed)
    assert (end.reason, end.instance) == ("engine_refused", ONE)


@pytest.mark.parametrize("step", ["prefill", "decode"])
async def test_a_client_that_hangs_up_ends_the_work_of_either_engine(world: IngressBench, step: str) -> None:
    engine, where = (world.one, ONE) if step == "prefill" else (world.two, TWO)
    engine.script.append(Behaviour.HANGS)
    asking = asyncio.create_task(_ask(world))
    await eventually(lambda: engine.received)
    asking.cancel()

    await eventually(lambda: engine.given_up == 1)
    end = (await world.events())[-1]
    assert isinstance(end, RequestCancelled)
    assert (end.reason, end.instance) == ("client_gone", where)


@pytest.mark.parametrize("step", ["prefill", "decode"])
async def test_a_new_leader_is_told_where_a_request_is(world: IngressBench, step: str) -> None:
    world.scheduler.grant_fields = {"term": Term(1)}
    engine = world.one if step == "prefill" else world.two
    engine.script.append(Behaviour.HANGS)
    asking = asyncio.create_task(_ask(world))
    await eventually(lambda: engine.received)
    elected = LeaderElected(at=0.0, term=Term(2), scheduler="another", as_of=0)
    await world.log.elect(elected, after=0)
    await eventually(lambda: world.board.whole)
    async with asyncio.timeout(5.0):
        while not (told := await world.events()):  # noqa: ASYNC110 - the log can only be read
            await asyncio.sleep(0.02)
    asking.cancel()

    if step == "prefill":
        assert isinstance(told[0], RequestGranted)
        assert (told[0].instance, told[0].decode, told[0].stamp) == (ONE, TWO, None)
    else:
        assert isinstance(told[0], RequestHandedOver)
        assert (told[0].source, told[0].instance, told[0].stamp) == (ONE, TWO, None)


@pytest.mark.parametrize("step", ["__init__", "for_decode"])
async def test_a_request_whose_body_waits_for_a_thread_is_named_to_the_leader(
    world: IngressBench, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    work = getattr(SplitBody, step)

    def waits(*arguments: Any, **named: Any) -> Any:
        begun.set()
        assert go.wait(30.0)
        return work(*arguments, **named)

    monkeypatch.setattr(SplitBody, step, waits)
    asking = asyncio.create_task(_ask(world, {**STREAM, "metadata": {"note": "a" * 2 * LIGHT_BYTES_MAX}}))
    await eventually(begun.is_set)
    world.scheduler.followed.clear()
    request = world.scheduler.asked[-1].request

    await eventually(lambda: any(request in command.waiting for command in world.scheduler.followed))
    go.set()
    await asking


async def _ask(world: IngressBench, body: Any = STREAM) -> None:
    async with world.post(COMPLETIONS, body) as answer:
        await answer.read()
