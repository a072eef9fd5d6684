"""Engines that lie, beside honest ones, through the ingress and the worker as they are in production."""

import asyncio
import contextlib
import json
import random
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any

import aiohttp
import pytest
import structlog
from rich.console import Console

from pointsman.adapters.http_engine import METRICS_BYTES_MAX, NAMES_MAX, EngineUnreachableError, HttpEngine
from pointsman.adapters.sse import events_in as events_of
from pointsman.contracts.cache import BlocksStored
from pointsman.contracts.commands import DescribeFleet, FleetDescribed, RouteGranted
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft, InstanceReported
from pointsman.contracts.requests import RequestAttemptFailed, RequestFailed, RequestFinished
from pointsman.ports import EngineTarget
from pointsman.primitives import Epoch, InstanceId, WallSeconds
from pointsman.runtime.processes import PROCESSES_MAX
from pointsman.runtime.supervision import Supervisor
from pointsman_cli.fleet import fleet_table
from pointsman_ingress import delivery
from pointsman_ingress.engine import answer as engine_answer
from pointsman_worker.settings import WorkerSettings
from tests.support.events import joined
from tests.support.fake_publisher import BLOCK, FakePublisher, ScriptedCache
from tests.support.ingress_world import CHAT, COMPLETIONS, HELLO, ONE, STREAM, TOKENS, TWO, IngressBench, world_with
from tests.support.memory_pool import MemoryPool
from tests.support.raw_engine import HEAD, STREAM_HEAD, RawEngine, running_raw_engine, whole
from tests.support.services import worker_over
from tests.support.waiting import eventually
from tests.support.worker_bench import WorkerBench, working

USAGE = b'"usage":{"prompt_tokens":%s,"completion_tokens":2}'
CHUNK = b'data: {"choices":[{"text":"a"}]}'


@pytest.fixture
async def world() -> AsyncIterator[IngressBench]:
    async with world_with() as opened:
        yield opened


@pytest.fixture
async def liar(world: IngressBench) -> AsyncIterator[RawEngine]:
    """In the place of the first of two engines, which the scheduler prefers."""
    async with running_raw_engine() as engine:
        await world.grants({**world.scheduler.engines, ONE: engine.url})
        yield engine


async def ask(world: IngressBench, path: str = COMPLETIONS, body: dict[str, Any] = TOKENS) -> tuple[int, bytes]:
    async with world.post(path, body) as answer:
        return answer.status, await answer.read()


NOT_ANSWERS = {
    "garbage": [b"\x00\x01\x02\r\n\r\n"],
    "no status": [b"HTTP/1.1 \r\n\r\n"],
    "status 99999": [b"HTTP/1.1 99999 x\r\n\r\n"],
    "status 204": [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "status 202": [whole(b"{}", head=b"HTTP/1.1 202 Accepted\r\n")],
    "status 101": [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello"],
    "redirect": [b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"],
    "two lengths": [HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok"],
    "length of 400 digits": [HEAD + b"content-length: " + b"9" * 400 + b"\r\n\r\nok"],
    "status line of a megabyte": [b"HTTP/1.1 200 " + b"a" * 2**20],
    "header of a megabyte": [HEAD + b"x: " + b"a" * 2**20],
    "100,000 headers": [HEAD, *[b"".join(b"x-%d: a\r\n" % n for n in range(1000))] * 100],
    "breaks off": [HEAD + b"content-length: 100\r\n\r\n{"],
    "stream that says nothing": [STREAM_HEAD],
}
"""After these the next engine is asked: the client has seen nothing."""


@pytest.mark.parametrize("name", NOT_ANSWERS)
async def test_what_is_no_answer_costs_the_client_nothing(world: IngressBench, liar: RawEngine, name: str) -> None:
    liar.otherwise = NOT_ANSWERS[name]

    status, body = await ask(world)

    assert status == 200
    assert json.loads(body)["choices"] == [{"text": "answer"}]
    failure, end = await world.events()
    assert isinstance(failure, RequestAttemptFailed)
    assert (failure.instance, failure.attempt) == (ONE, 1)
    assert isinstance(end, RequestFinished)
    assert end.instance == TWO


ODD_ANSWERS = {
    "usage of 400 digits": whole(b'{"choices":[],' + USAGE % (b"9" * 400) + b"}"),
    "usage of 2**40": whole(b'{"choices":[],' + USAGE % str(2**40).encode() + b"}"),
    "usage of 2**64": whole(b'{"choices":[],' + USAGE % str(2**64).encode() + b"}"),
    "stream with usage of 2**40": STREAM_HEAD
    + CHUNK
    + b'\n\ndata: {"choices":[],'
    + USAGE % str(2**40).encode()
    + b"}\n\ndata: [DONE]\n\n",
    "infinite usage": whole(b'{"choices":[],' + USAGE % b"1e400" + b"}"),
    "negative usage": whole(b'{"choices":[],' + USAGE % b"-7" + b"}"),
    "deeply nested": whole(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no JSON": whole(b"\xff\xfe\x00"),
    "nothing": whole(b""),
    "content type that is no header": whole(b"{}", content_type="text/ÿ€".encode()),
    "content type of kilobytes": whole(b"{}", content_type=b"a" * 4000),
    "compressed, it says": whole(b"{}", head=HEAD + b"content-encoding: gzip\r\n"),
    "stream with usage of 400 digits": STREAM_HEAD
    + CHUNK
    + b'\n\ndata: {"choices":[],'
    + USAGE % (b"9" * 400)
    + b"}\n\ndata: [DONE]\n\n",
}
"""The client gets these as they are."""


@pytest.mark.parametrize("name", ODD_ANSWERS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_odd_answer_is_the_clients_business_and_its_numbers_are_not_believed(
    world: IngressBench, liar: RawEngine, name: str, path: str
) -> None:
    liar.otherwise = [ODD_ANSWERS[name]]

    status, _ = await ask(world, path, TOKENS if path == COMPLETIONS else HELLO)

    assert status == 200
    ends = [event for event in await world.events() if isinstance(event, RequestFinished | RequestFailed)]
    assert [type(end) for end in ends] == [RequestFinished]
    assert isinstance(ends[0], RequestFinished)
    assert ends[0].prompt_tokens == -1


STREAMED = {"model": "m", "prompt": [1, 2, 3], "stream": True}


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
async def test_a_stream_is_shown_as_it_comes_and_without_the_usage_however_its_lines_end(
    world: IngressBench, liar: RawEngine, end: bytes
) -> None:
    liar.otherwise = [STREAM_HEAD + CHUNK + end, CHUNK + end, b'data: {"choices":[],' + USAGE % b"3" + b"}" + end, b"data: [DONE]" + end]  # fmt: skip
    liar.pause_seconds, liar.goes_on = 0.1, asyncio.Event()
    async with world.post(COMPLETIONS, STREAMED) as answer:
        first = await asyncio.wait_for(answer.content.readany(), 15)
        liar.goes_on.set()
        rest = await answer.content.read()

    assert first == CHUNK + end
    assert rest == CHUNK + end + b"data: [DONE]" + end
    end_said = (await world.events())[-1]
    assert isinstance(end_said, RequestFinished)
    assert (end_said.prompt_tokens, end_said.completion_tokens) == (3, 2)


@pytest.mark.parametrize("where", ["an answer", "a refusal"])
async def test_an_answer_that_nobody_can_hold_is_computed_once_and_no_engine_has_failed(
    world: IngressBench, liar: RawEngine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "ANSWER_BYTES_MAX", 100_000)
    head = HEAD if where == "an answer" else b"HTTP/1.1 400 Bad Request\r\n"
    liar.otherwise = [whole(b'{"data":"' + b"a" * 100_000 + b'"}', head=head)]

    async with world.post(COMPLETIONS, TOKENS) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "answer_too_large")
        assert answer.headers["x-should-retry"] == "false"

    assert len(liar.posted) == 1
    (end,) = await world.events()
    assert isinstance(end, RequestFailed)
    assert (end.reason, end.status, end.instance) == ("answer_too_large", 502, ONE)


def comment(size: int) -> bytes:
    return b": " + b"c" * size + b"\n\n"


async def test_what_precedes_the_first_output_is_held_within_a_bound(world: IngressBench, liar: RawEngine) -> None:
    liar.otherwise, liar.goes_on = [STREAM_HEAD + comment(100_000), CHUNK + b"\n\ndata: [DONE]\n\n"], asyncio.Event()
    async with asyncio.timeout(15), world.post(COMPLETIONS, STREAM) as answer:
        assert answer.status == 200
        liar.goes_on.set()
        await answer.read()

    end = (await world.events())[-1]
    assert isinstance(end, RequestFinished)
    assert end.instance == ONE


async def test_what_repeats_a_long_request_is_held_so_that_another_engine_can_still_be_asked(
    world: IngressBench, liar: RawEngine
) -> None:
    liar.otherwise = [STREAM_HEAD + comment(300_000)]

    status, _ = await ask(world, COMPLETIONS, {**STREAM, "user": "u" * 100_000})

    end = (await world.events())[-1]
    assert status == 200
    assert isinstance(end, RequestFinished)
    assert end.instance == TWO


@pytest.mark.parametrize(("body_bytes", "counted"), [(100, -1), (400_000, 7)])
async def test_a_last_event_is_held_for_its_usage_as_far_as_it_may_repeat_answer_and_request(
    world: IngressBench, liar: RawEngine, body_bytes: int, counted: int
) -> None:
    delta = b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "a"}\n\n'
    usage = b'"usage":{"input_tokens":7,"output_tokens":1}'
    last = b'event: response.completed\ndata: {"response":{%b,"x":"%b"}}\n\n' % (usage, b"x" * 2_000_000)
    liar.otherwise = [STREAM_HEAD + delta, last]

    status, body = await ask(world, "/v1/responses", {"model": "m", "input": "i" * body_bytes, "stream": True})

    end = (await world.events())[-1]
    assert (status, len(body)) == (200, len(delta + last))
    assert isinstance(end, RequestFinished)
    assert end.prompt_tokens == counted


async def test_answers_that_are_held_have_a_bound_together() -> None:
    """One client has half of them: a megabyte."""
    async with world_with(body_bytes_max=100_000, processes=PROCESSES_MAX) as world, running_raw_engine() as slow:
        await world.grants({ONE: slow.url})
        answer = whole(b'{"data":"' + b"a" * 700_000 + b'"}')
        slow.otherwise, slow.goes_on = [answer[:600_000], answer[600_000:]], asyncio.Event()
        asking = {asyncio.create_task(ask(world)) for _ in range(2)}
        (first,), (held,) = await asyncio.wait(asking, timeout=15, return_when=asyncio.FIRST_COMPLETED)
        slow.goes_on.set()
        refused, answered, again = first.result(), await held, await ask(world)

        ends = [event for event in await world.events() if isinstance(event, RequestFailed | RequestFinished)]
        assert (refused[0], answered[0], again[0]) == (503, 200, 200)
        assert b"too_many_bodies" in refused[1]
        assert [type(end) for end in ends] == [RequestFailed, RequestFinished, RequestFinished]


async def test_an_answer_is_held_until_its_client_has_read_it() -> None:
    """One client has 32 MiB, and the system's buffers take some of an answer."""
    mib = 1 << 20
    async with world_with(body_bytes_max=16 * mib, processes=PROCESSES_MAX) as world, running_raw_engine() as engine:
        await world.grants({ONE: engine.url})
        engine.otherwise = [whole(b'{"data":"' + b"a" * 20 * mib + b'"}')]
        async with world.post(COMPLETIONS, TOKENS) as unread:
            assert unread.status == 200
            assert (await ask(world))[0] == 503
            assert any(isinstance(event, RequestFinished) for event in await world.events())
            await unread.read()

        assert (await ask(world))[0] == 200


BROKEN_STREAMS = {
    "breaks off": [STREAM_HEAD + CHUNK + b"\n\n"],
    "breaks off within an event": [STREAM_HEAD + CHUNK + b"\r\n\r\n" + CHUNK + b"\r\n"],
    "is no HTTP any more": [
        HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n22\r\n" + CHUNK + b"\n\n\r\n",
        b"no chunk\r\n",
    ],
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_a_stream_that_goes_wrong_ends_with_one_error_event_of_its_own(
    world: IngressBench, liar: RawEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_answer, "CUT_CHECK_WALL_SECONDS", 0.2)
    liar.otherwise = BROKEN_STREAMS[name]
    liar.pause_seconds = 0.1

    status, body = await ask(world, COMPLETIONS, STREAMED)

    assert status == 200
    last = body.replace(b"\r\n", b"\n").rstrip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    end = (await world.events())[-1]
    assert isinstance(end, RequestFailed)
    assert end.reason == "engine_broke_off"


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        (COMPLETIONS, STREAM, CHUNK),
        (
            "/v1/responses",
            {"model": "m", "input": "hello", "stream": True},
            b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "a"}',
        ),
    ],
)
async def test_an_engine_that_dies_within_an_event_leaves_no_part_of_it(
    world: IngressBench, liar: RawEngine, path: str, body: dict[str, Any], event: bytes
) -> None:
    """Also where nothing is taken out of the stream: clients read each event as JSON."""
    liar.otherwise = [STREAM_HEAD + event + b"\n\n", event[:-3]]
    liar.pause_seconds = 0.1

    _, content = await ask(world, path, body)

    assert content.startswith(event + b"\n\n")
    _, error = map(json.loads, events_of(content))
    assert "engine_failed" in json.dumps(error)


async def test_a_stream_without_an_empty_line_passes_through_and_holds_up_nobody(
    world: IngressBench, liar: RawEngine
) -> None:
    liar.otherwise = [STREAM_HEAD, *[b'data: {"usage": "' + b"a" * 65_536] * 500]  # 32 MB
    slowest = 0.0

    async def others() -> None:
        nonlocal slowest
        while True:
            began = asyncio.get_running_loop().time()
            async with world.client.get(f"{world.url}/health"):
                pass
            slowest = max(slowest, asyncio.get_running_loop().time() - began)

    asking = asyncio.create_task(others())
    _, body = await ask(world, COMPLETIONS, STREAMED)
    asking.cancel()

    assert len(body) > 32_000_000
    assert slowest < 5.0


async def test_an_engine_that_floods_its_streams_rests_and_nobody_else_does(
    world: IngressBench, liar: RawEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_answer, "HEAVY_SECONDS", 1e-4)
    monkeypatch.setattr(engine_answer, "REST_TIMES", 1e9)
    liar.answers[COMPLETIONS] = [STREAM_HEAD + CHUNK + b"\n\n", b'data: "error"\n\n' * 5000, b"data: [DONE]\n\n"]
    liar.pause_seconds = 0.01  # so that the second is a chunk of its own
    flooded = asyncio.create_task(ask(world, body=STREAMED))
    await eventually(lambda: liar.sent_bytes > 60_000)
    await world.grants({ONE: world.two.url, TWO: world.two.url})
    others = [await ask(world, body=STREAM) for _ in range(20)]
    resting = not flooded.done()
    flooded.cancel()

    assert {status for status, _ in others} == {200}
    assert resting


SOUND = (
    whole(b'{"choices":[{"text":"a"}],' + USAGE % b"3" + b"}"),
    STREAM_HEAD + CHUNK + b"\r\n\r\n" + b'data: {"choices":[],' + USAGE % b"3" + b"}\r\n\r\ndata: [DONE]\r\n\r\n",
    HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"22\r\n" + CHUNK + b"\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
)


def mangled(chance: random.Random, answer: bytes) -> list[bytes]:
    """The answer with some of it cut out, repeated or replaced, in pieces."""
    for _ in range(chance.randint(1, 4)):
        a = chance.randrange(len(answer))
        b = min(len(answer), a + chance.choice([1, 4, 40]))
        nonsense = [
            b"",
            answer[a:b] * 3,
            b"\r",
            b"\n",
            b"\x00",
            b"\xff",
            b"9" * 40,
            b'"usage":',
            b"[" * 3000,
            b"{",
            b"-",
        ]
        answer = answer[:a] + chance.choice(nonsense) + answer[b:]
    cut = chance.randrange(len(answer) + 1)
    return [piece for piece in (answer[:cut], answer[cut:]) if piece]


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_an_engine_sends_each_request_has_one_end_and_none_is_a_mistake_of_ours(
    world: IngressBench, liar: RawEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_answer, "CUT_CHECK_WALL_SECONDS", 0.1)
    chance = random.Random(seed)
    asked: list[str] = []
    for _ in range(25):
        liar.otherwise = mangled(chance, chance.choice(SOUND))
        async with world.post(COMPLETIONS, {**STREAMED, "stream": chance.random() < 0.7}) as answer:
            asked.append(answer.headers["x-pointsman-request-id"])
            with contextlib.suppress(aiohttp.ClientPayloadError):
                await answer.read()

    ends = [event for event in await world.events() if isinstance(event, RequestFinished | RequestFailed)]
    assert sorted(end.request for end in ends) == sorted(asked)
    assert {end.reason for end in ends if isinstance(end, RequestFailed)} <= {"engine_broke_off", "engine_refused"}


BAD = b"HTTP/1.1 400 Bad Request\r\n"
TOKEN_ANSWERS = {
    "numbers of 400 digits": (whole(b'{"tokens":[' + b"9" * 400 + b"]}"), 200),
    "negative numbers": (whole(b'{"tokens":[-1]}'), 200),
    "no numbers": (whole(b'{"tokens":["a"]}'), 200),
    "deeply nested": (whole(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 200),
    "17 MiB": (whole(b'{"tokens":[' + b"1," * (17 * 2**19) + b"1]}"), 200),
    "not UTF-8": (whole(b'{"tokens":"\xff"}'), 200),
    "a deeply nested objection": (whole(b"[" * 100_000, head=BAD), 400),
    "an objection of 5,000 digits": (whole(b'{"error":{"message":' + b"9" * 5000 + b"}}", head=BAD), 400),
}


@pytest.mark.parametrize("name", TOKEN_ANSWERS)
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, {"model": "m", "prompt": "hello"})])
async def test_tokens_that_cannot_be_are_guessed_instead(
    world: IngressBench, path: str, body: dict[str, Any], name: str
) -> None:
    async with running_raw_engine() as liar:
        answer, expected = TOKEN_ANSWERS[name]
        liar.otherwise = [answer]
        await world.log.append(joined("a-liar", url=liar.url, max_model_len=999_999))
        await eventually_asked(world, 999_999)
        async with world.post(path, body) as answered:
            said = answered.headers.get("x-pointsman-prefix", "")

    assert liar.asked[-1] == ("/tokenize" if path == COMPLETIONS or name == "17 MiB" else "/v1/chat/completions/render")
    assert answered.status == expected
    assert "guessed" in said or expected == 400


# Length, names and models


async def test_one_engine_with_a_short_context_shortens_it_for_nobody(world: IngressBench) -> None:
    await world.log.append(joined(ONE, epoch=2, url=world.one.url, max_model_len=1))
    await eventually_asked(world, 1000)

    status, _ = await ask(world)
    too_long, said = await ask(world, body={**TOKENS, "max_tokens": 1001})

    assert status == 200
    assert world.scheduler.asked[-1].context_tokens == 203
    assert too_long == 400
    assert b"maximum context length is 1000 tokens" in said


async def test_an_engine_with_another_model_is_offered_to_nobody(world: IngressBench) -> None:
    await world.log.append(joined("liar", model="other", url="http://127.0.0.1:1", aliases=["mine"]))
    await world.log.append(joined(TWO, epoch=2, url=world.two.url, max_model_len=2000, aliases=["m-latest"]))
    await eventually_asked(world, 2000)

    async with world.client.get(f"{world.url}/v1/models") as answer:
        listed = [card["id"] for card in (await answer.json())["data"]]
    refused, _ = await ask(world, body={**TOKENS, "model": "other"})
    served, _ = await ask(world, body={**TOKENS, "model": "m-latest"})

    assert listed == ["m", "m-latest"]
    assert (refused, served) == (404, 200)
    assert world.scheduler.asked[-1].alias == "m-latest"


async def eventually_asked(world: IngressBench, length: int) -> None:
    """Wait until the ingress offers this context."""

    async def offered() -> bool:
        async with world.client.get(f"{world.url}/v1/models") as answer:
            return any(card.get("max_model_len") == length for card in (await answer.json())["data"])

    await eventually(offered)


# The scheduler


async def test_the_leader_says_which_instance_is_unschedulable_and_sends_it_nothing() -> None:
    pool = MemoryPool()

    async def b_is_ready() -> bool:
        answer = await pool.ask(DescribeFleet(), kind="fleet")
        return isinstance(answer, FleetDescribed) and [i.status for i in answer.instances] == ["ready"]

    with structlog.testing.capture_logs() as logs:
        async with pool.scheduler():
            await pool.append(pool.joined("a"), pool.joined("b", model="other"))
            await eventually(lambda: any(line["event"] == "instance_unschedulable" for line in logs))
            fleet = await pool.ask(DescribeFleet(), kind="fleet")
            granted = [await pool.route(f"r{number}", [number]) for number in range(6)]
            await pool.append(
                InstanceLeft(at=pool.clock.now(), instance=InstanceId("a"), epoch=Epoch(1), reason="test")
            )
            await eventually(b_is_ready)

    reason = "it serves the model 'other', the pool 'm'"
    assert isinstance(fleet, FleetDescribed)
    assert [(i.instance, i.status, i.doubt) for i in fleet.instances][1] == ("b", "unschedulable", reason)
    assert [line["problem"] for line in logs if line["event"] == "instance_unschedulable"] == [reason]
    assert {answer.instance for answer in granted if isinstance(answer, RouteGranted)} == {"a"}
    shown = Console(width=120, file=StringIO())
    shown.print(fleet_table(fleet))
    assert f"b is unschedulable: {reason}" in shown.file.getvalue()  # type: ignore[attr-defined] # a StringIO


# The worker

METRICS = (
    b"""\
vllm:num_requests_waiting{engine="0"} 4.0
vllm:num_requests_running{engine="0"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="%d",num_gpu_blocks="1000",engine="0"} 1.0
"""
    % BLOCK
)
PAGES: dict[str, Sequence[bytes]] = {
    "/health": [whole(b"")],
    "/version": [whole(b'{"version":"1"}')],
    "/v1/models": [whole(b'{"data":[{"id":"m","max_model_len":4096}]}')],
    "/metrics": [whole(METRICS)],
}


@dataclass
class LiarsWorker(WorkerBench):
    """A worker at work, beside an engine that says what a test wants."""

    liar: RawEngine

    async def next_report(self) -> InstanceReported:
        """The second that is written from now on: all of it is newer."""
        wanted = len(self.log.of(InstanceReported)) + 2
        await eventually(lambda: len(self.log.of(InstanceReported)) >= wanted or self.task.done())
        assert not self.task.done()
        found: InstanceReported = self.log.of(InstanceReported)[-1]
        return found


@asynccontextmanager
async def lied_to(publisher: FakePublisher | None = None) -> AsyncIterator[LiarsWorker]:
    async with running_raw_engine() as liar, HttpEngine(liar.url) as asked:
        liar.answers = dict(PAGES)
        target = EngineTarget(instance=ONE, url=liar.url)
        async with working(publisher, engine=asked, target=target, report_seconds=0.05) as bench:
            yield LiarsWorker(**vars(bench), liar=liar)


LIES: dict[str, tuple[str, Sequence[bytes]]] = {
    "NaN": ("/metrics", [whole(METRICS.replace(b"4.0", b"NaN"))]),
    "1e400": ("/metrics", [whole(METRICS.replace(b"7.0", b"1e400"))]),
    "usage Inf": ("/metrics", [whole(METRICS.replace(b"0.25", b"Inf"))]),
    "block size of 5,000 digits": ("/metrics", [whole(METRICS.replace(b'"16"', b'"' + b"9" * 5000 + b'"'))]),
    "metrics larger than their bound": ("/metrics", [whole(METRICS * 60_000)]),
    "metrics without an end": ("/metrics", [STREAM_HEAD, *[METRICS * 300] * 200]),
    "metrics are gone": ("/metrics", [whole(b"", head=b"HTTP/1.1 404 Not Found\r\n")]),
    "no models": ("/v1/models", [whole(b'{"data":[]}')]),
    "models nested deeply": ("/v1/models", [whole(b"[" * 100_000)]),
    "models that are no models": ("/v1/models", [whole(b'{"data":[1,null,[],{"id":{}},{"id":""}]}')]),
    "20,000 adapters": (
        "/v1/models",
        [whole(json.dumps({"data": [{"id": "m"}, *({"id": f"a{n}", "parent": "m"} for n in range(20_000))]}).encode())],
    ),
    "version": ("/version", [whole(b'{"version":' + b"9" * 5000 + b"}")]),
    "a bomb": ("/v1/models", [whole(b"{}", head=HEAD + b"content-encoding: gzip\r\n")]),
}


@pytest.mark.parametrize("name", LIES)
async def test_no_worker_dies_for_what_its_engine_says_and_its_reports_can_be_read(name: str) -> None:
    path, lie = LIES[name]
    async with lied_to() as worker:
        await worker.next_report()
        worker.liar.answers[path] = lie
        report = await worker.next_report()
        honest = await _eventually_honest(worker)

        assert 0 <= report.waiting <= 10**9
        assert 0.0 <= report.kv_usage <= 1.0
        assert len(report.adapters) <= NAMES_MAX
        assert (honest.waiting, honest.running, honest.kv_usage, honest.serving) == (4, 7, 0.25, True)
        assert len(worker.log.of(InstanceJoined)) == 1


async def _eventually_honest(worker: LiarsWorker) -> InstanceReported:
    worker.liar.answers = dict(PAGES)

    def honest(report: InstanceReported) -> bool:
        return (report.waiting, report.running, report.kv_usage, report.adapters) == (4, 7, 0.25, [])

    await worker.next_report()
    await eventually(lambda: honest(worker.log.of(InstanceReported)[-1]))
    found: InstanceReported = worker.log.of(InstanceReported)[-1]
    return found


AWAY: dict[str, tuple[str, Sequence[bytes]]] = {
    "health redirects": ("/health", [b"HTTP/1.1 302 Found\r\nlocation: /version\r\ncontent-length: 0\r\n\r\n"]),
    "health is garbage": ("/health", [b"\x00\x01\r\n\r\n"]),
    "100,000 headers": ("/health", [HEAD, *[b"".join(b"x-%d: a\r\n" % n for n in range(1000))] * 100]),
    "a hundred answers to come": ("/health", [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, PAGES["/health"][0]]),
    "metrics break off": ("/metrics", [HEAD + b"content-length: 1000\r\n\r\nvllm"]),
    "metrics are no HTTP": ("/metrics", [HEAD + b"transfer-encoding: chunked\r\n\r\nno chunk\r\n"]),
}


@pytest.mark.parametrize("name", AWAY)
async def test_an_engine_that_answers_no_http_is_away_and_followed_no_further(name: str) -> None:
    path, answer = AWAY[name]
    async with running_raw_engine() as engine, HttpEngine(engine.url, seconds_max=1.0) as asked:
        engine.answers = {**PAGES, path: answer}

        with pytest.raises(EngineUnreachableError):
            await asked.load()
        assert "/version" not in engine.asked


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
async def test_an_engine_with_a_page_that_hangs_serves_with_what_it_said_before(path: str) -> None:
    async with lied_to() as worker:
        await eventually(lambda: any(report.waiting == 4 for report in worker.log.of(InstanceReported)))
        worker.liar.pause_seconds = 10.0
        worker.liar.answers[path] = [b""]
        await eventually(lambda: path in worker.board.degraded_parts.get("engine", ""))
        report = await worker.next_report()
        worker.liar.answers = dict(PAGES)
        await eventually(lambda: worker.board.whole)

        assert (report.serving, report.waiting, report.running, report.kv_usage) == (True, 4, 7, 0.25)
        assert all(report.serving for report in worker.log.of(InstanceReported))
        assert len(worker.log.of(InstanceJoined)) == 1


async def test_a_page_of_metrics_without_an_end_costs_no_more_memory_than_its_bound() -> None:
    async with running_raw_engine() as engine, HttpEngine(engine.url) as asked:
        engine.answers = dict(PAGES)
        engine.answers["/metrics"] = [STREAM_HEAD, *[METRICS * 200] * 6000]  # 220 MB, if anybody reads them
        tracemalloc.start()
        load = await asked.load()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        assert (load.waiting, load.model) == (0, "m")
        assert peak < 2 * METRICS_BYTES_MAX


async def test_an_engine_that_comes_back_as_nonsense_is_not_served_and_says_so_until_it_makes_sense() -> None:
    async with FakePublisher() as publisher, lied_to(publisher) as worker:
        await publisher.publish(ScriptedCache().store([1] * 2 * BLOCK))
        await eventually(lambda: worker.board.whole and worker.log.of(InstanceJoined))
        worker.liar.answers["/metrics"] = [whole(METRICS.replace(b'block_size="%d"' % BLOCK, b'block_size="7"'))]
        await publisher.restart()
        await publisher.publish(ScriptedCache(life=2).store([2] * 2 * BLOCK))
        await eventually(lambda: not worker.board.whole)
        reason, report = worker.board.lacks["engine"], await worker.next_report()
        worker.liar.answers = dict(PAGES)
        await eventually(lambda: len(worker.log.of(InstanceJoined)) == 2)
        await eventually(lambda: worker.log.of(InstanceReported)[-1].serving)

        assert "--block-tokens does not fit this engine" in reason
        assert not report.serving
        assert worker.board.whole


UNDESCRIBED: dict[str, tuple[str, Sequence[bytes]]] = {
    "models want a key": ("/v1/models", [whole(b"", head=b"HTTP/1.1 401 Unauthorized\r\n")]),
    "no models": ("/v1/models", [whole(b'{"data":[]}')]),
    "version hangs": ("/version", [b""]),
}


@pytest.mark.parametrize("name", UNDESCRIBED)
async def test_an_engine_that_took_anothers_place_serves_only_once_it_describes_itself(name: str) -> None:
    """Although its load can be read: what is known of its cache is the other's."""
    path, answer = UNDESCRIBED[name]
    async with FakePublisher() as publisher, lied_to(publisher) as worker:
        await publisher.publish(ScriptedCache().store([1] * 2 * BLOCK))
        await eventually(lambda: worker.board.whole and worker.log.of(BlocksStored))
        worker.liar.pause_seconds = 5.0
        worker.liar.answers[path] = answer
        await publisher.restart()
        await publisher.publish(ScriptedCache(life=2).store([2] * 2 * BLOCK))
        await eventually(lambda: not worker.log.of(InstanceReported)[-1].serving)
        asked = worker.liar.asked.count("/metrics")
        await eventually(lambda: worker.liar.asked.count("/metrics") > asked + 3)
        report, lacks, joins = await worker.next_report(), dict(worker.board.lacks), len(worker.log.of(InstanceJoined))
        worker.liar.answers = dict(PAGES)
        await eventually(lambda: len(worker.log.of(InstanceJoined)) == 2)
        await eventually(lambda: worker.log.of(InstanceReported)[-1].serving)

        assert (report.serving, joins) == (False, 1)
        assert path in lacks["engine"]
        assert worker.board.whole


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("now", [("other", 4096), ("m", 100)])
async def test_an_engine_that_serves_something_else_than_before_joins_anew_with_that(
    followed: bool, now: tuple[str, int]
) -> None:
    async with FakePublisher() as publisher, lied_to(publisher if followed else None) as worker:
        await publisher.publish(ScriptedCache().store([1] * 2 * BLOCK))
        await eventually(lambda: worker.board.whole and worker.log.of(InstanceJoined))
        worker.liar.answers["/v1/models"] = [
            whole(b'{"data":[{"id":"%s","max_model_len":%d}]}' % (now[0].encode(), now[1]))
        ]
        await eventually(lambda: len(worker.log.of(InstanceJoined)) == 2)
        await worker.next_report()

        assert [(event.model, event.max_model_len) for event in worker.log.of(InstanceJoined)] == [("m", 4096), now]
        assert (await worker.next_report()).serving


# All of it


def pages(models: bytes, metrics: bytes = METRICS) -> dict[str, Sequence[bytes]]:
    """Of an engine that answers completions, too."""
    answer = [whole(b'{"choices":[{"text":"a"}],' + USAGE % b"3" + b"}")]
    return {**PAGES, "/v1/models": [whole(models)], "/metrics": [whole(metrics)], "/v1/completions": answer}


HONEST = b'{"data":[{"id":"m","max_model_len":4096},{"id":"m-latest"}]}'
NEIGHBOURS: dict[str, dict[str, Sequence[bytes]]] = {
    "another model": pages(b'{"data":[{"id":"other"},{"id":"m"},{"id":"m-latest"}]}'),
    "a context of one token": pages(b'{"data":[{"id":"m","max_model_len":1},{"id":"m-latest"}]}'),
    "names of its own": pages(b'{"data":[{"id":"m","max_model_len":9},{"id":"x"},{"id":"m-latest","parent":"m"}]}'),
    "NaN and Inf": pages(HONEST, METRICS.replace(b"4.0", b"NaN").replace(b"0.25", b"Inf")),
    "no metrics at all": pages(HONEST, b"vllm:" * 2_000_000),
    "no model": pages(b"[" * 100_000),
}


@asynccontextmanager
async def whole_pool(*engines: RawEngine) -> AsyncIterator[str]:
    """An ingress, a scheduler and a worker for each engine, as in production, over a log in memory. The URL of the ingress.
    The first engine joins first."""
    pool = MemoryPool()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool.scheduler())
        for number, engine in enumerate(engines):
            link = pool.broker.client(pool.clock, name=f"worker-{number}")
            asked = await stack.enter_async_context(HttpEngine(engine.url))
            target = EngineTarget(instance=InstanceId(f"engine-{number}"), url=engine.url)
            service = worker_over(link, pool.clock, asked, target, WorkerSettings(report_seconds=WallSeconds(0.1)))
            supervisor = await stack.enter_async_context(Supervisor())
            supervisor.start(service.run(), name="worker")
            await eventually(lambda: len(engines[number].asked) > 8)  # noqa: B023 - awaited within the round
        yield await stack.enter_async_context(pool.ingress())


@pytest.mark.parametrize("name", NEIGHBOURS)
async def test_beside_a_lying_engine_every_request_is_served(name: str) -> None:
    async with AsyncExitStack() as stack:
        honest, liar = [await stack.enter_async_context(running_raw_engine()) for _ in range(2)]
        honest.answers, liar.answers = pages(HONEST), NEIGHBOURS[name]
        url = await stack.enter_async_context(whole_pool(honest, liar))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        statuses = []
        for number in range(12):
            body = {"model": ("m", "m-latest")[number % 2], "prompt": [number] * 200, "max_tokens": 3}
            async with client.post(url + COMPLETIONS, json=body) as answer:
                statuses.append(answer.status)
        async with client.get(url + "/v1/models") as answer:
            listed = {card["id"]: card.get("max_model_len") for card in (await answer.json())["data"]}

    assert statuses == [200] * 12
    assert (listed["m"], listed["m-latest"]) == (4096, 4096)
    assert name.startswith(("NaN", "no metrics")) or not liar.posted


BILLION = {"prompt_tokens": 10**9, "completion_tokens": 10**9, "prompt_tokens_details": {"cached_tokens": 10**9}}
COUNTED = [
    (COMPLETIONS, TOKENS, (200, 3)),
    (COMPLETIONS, {**TOKENS, "stream": True}, (200, 3)),
    (COMPLETIONS, {**TOKENS, "n": 4}, (200, 12)),
    (COMPLETIONS, {**TOKENS, "max_tokens": 900}, (200, 800)),
    (COMPLETIONS, {**TOKENS, "prompt": [[1, 2, 3], [4]], "n": 2}, (4, 12)),
    (COMPLETIONS, {"model": "m", "prompt": [1, 2, 3]}, (3, 1000)),
    (CHAT, HELLO, (1000, 1000)),  # no tokenizer: the prompt is a guess
    ("/v1/embeddings", {"model": "m", "input": "hello"}, (48, 0)),
]


@pytest.mark.parametrize(("path", "body", "believed"), COUNTED)
async def test_no_engine_counts_more_for_a_request_than_it_can_have_cost(
    world: IngressBench, liar: RawEngine, path: str, body: dict[str, Any], believed: tuple[int, int]
) -> None:
    answer = json.dumps({"choices": [{"text": "a"}], "usage": BILLION}).encode()
    stream = STREAM_HEAD + b"data: " + answer + b"\n\ndata: [DONE]\n\n"
    liar.otherwise = [stream if "stream" in body else whole(answer)]
    status, _ = await ask(world, path, body)

    (end,) = [event for event in await world.events() if isinstance(event, RequestFinished)]

    assert status == 200
    assert (end.prompt_tokens, end.completion_tokens) == believed
    assert end.cached_tokens == end.prompt_tokens
