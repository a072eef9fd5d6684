"""The bench: what it makes of answers, and that it sends on time whatever the answers do."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner
from rich.console import Console

from pointsman.simulation.workload import WorkloadRequest
from pointsman_cli.bench.answer import StreamedAnswer, StreamError
from pointsman_cli.bench.command import bench_command
from pointsman_cli.bench.load import LoadGenerator, Target
from pointsman_cli.bench.report import (
    BenchReport,
    Outcome,
    RunFacts,
    RunReport,
    lateness_warning,
    runs_table,
    summarise,
)
from pointsman_cli.output_file import json_of
from tests.support.waiting import eventually

FACTS = RunFacts(policy="dualmap", slo_ttft_s=5.0, speed=2.0, offered_rate=1.0, workload="chat", trace=None, seed=1)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":64}}}\n\n'
ISSUE_KEYS = {
    "policy", "requests", "completed", "rejected", "failed", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s",
    "tpot_p50_s", "e2e_p50_s", "effective_capacity", "hit_rate", "per_instance",
}  # fmt: skip


def completed(ttft_s: float, *, cached: int | None = 0, prompt: int = 100, instance: str = "engine-1") -> Outcome:
    return Outcome(
        ending="completed",
        late_s=0.0,
        ttft_s=ttft_s,
        e2e_s=ttft_s + 1.0,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=11,
        instance=instance,
    )


def summary(*outcomes: Outcome) -> RunReport:
    return summarise(outcomes, FACTS, wall_s=1.0, interrupted=False)


# --- Numbers ---


def test_capacity_counts_rejected_and_failed_requests_as_missed() -> None:
    report = summary(
        completed(1.0),
        completed(5.0),
        completed(5.1),
        Outcome(ending="rejected", late_s=0.0, problem="HTTP 429 slo"),
        Outcome(ending="failed", late_s=0.0, problem="HTTP 502 engine_failed"),
    )

    assert (report.requests, report.completed, report.rejected, report.failed) == (5, 3, 1, 1)
    assert report.effective_capacity == pytest.approx(2 / 5)
    assert report.ttft_p50_s == 5.0
    assert report.tpot_p50_s == pytest.approx(0.1)
    assert report.errors == {"HTTP 429 slo": 1, "HTTP 502 engine_failed": 1}


def test_the_hit_rate_weighs_tokens_and_leaves_out_engines_that_do_not_say() -> None:
    report = summary(completed(1.0, cached=900, prompt=1000), completed(1.0, cached=0), completed(1.0, cached=None))

    assert report.hit_rate == pytest.approx(900 / 1100)


def test_each_instance_has_its_share_in_natural_order() -> None:
    report = summary(*(completed(1.0, instance=f"engine-{n}") for n in (10, 2, 2, 1)))

    assert list(report.per_instance) == ["engine-1", "engine-2", "engine-10"]
    assert report.per_instance["engine-2"].share == 0.5


def test_a_run_without_requests_has_nulls_and_no_crash() -> None:
    report = summary()

    assert report.effective_capacity is report.hit_rate is report.ttft_p99_s is None
    assert set(msgspec.to_builtins(report)) >= ISSUE_KEYS
    Console(quiet=True).print(runs_table([report, report]))


def test_only_lateness_that_matters_is_warned_of() -> None:
    late = Outcome(ending="failed", late_s=0.5)

    assert lateness_warning(summary(completed(1.0))) is None
    assert "P99 0.50 s of engine time (250 ms on the wall)" in str(lateness_warning(summary(late)))


def test_runs_stand_side_by_side_with_the_ratio_to_the_first() -> None:
    console = Console(width=120)
    with console.capture() as printed:
        console.print(runs_table([summary(completed(2.0)), summary(completed(1.0))]))

    line = next(line for line in printed.get().splitlines() if "TTFT P50" in line)
    assert "2.000 s" in line
    assert "0.50x" in line


# --- Streams ---


def test_a_stream_cut_anywhere_gives_its_first_data_and_its_usage() -> None:
    stream = b'data: {"choices":[{"text":"a"}]}\n\n' * 500 + USAGE + b"data: [DONE]\n\n"
    for size in (1, 7, 1000, len(stream)):
        answer = StreamedAnswer()
        for number, at in enumerate(range(0, len(stream), size)):
            answer.feed(stream[at : at + size], float(number))

        assert answer.first_data_at == (len(b"data:") - 1) // size
        assert answer.usage()["prompt_tokens_details"]["cached_tokens"] == 64


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b'data: {"choices":[]}\n\n', "broke off"),
        (b'data: {"error":{"message":"m","code":"engine_failed"}}\n\ndata: [DONE]\n\n', "engine_failed"),
    ],
)
def test_a_stream_that_ends_badly_says_how(stream: bytes, said: str) -> None:
    answer = StreamedAnswer()
    answer.feed(stream, 1.0)

    with pytest.raises(StreamError, match=said):
        answer.usage()


# --- Load ---

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server on the loopback, and the bodies that it received."""
    bodies: list[dict[str, Any]] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await handler(request, bodies[-1])

    app = web.Application(client_max_size=10**8)
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


async def streamed(request: web.Request, *, wait: float = 0.0) -> web.StreamResponse:
    await asyncio.sleep(wait)
    response = web.StreamResponse(headers={"x-pointsman-instance": "engine-1", "x-pointsman-predicted-ttft-ms": "50"})
    await response.prepare(request)
    for part in (b'data: {"choices":[{"text":"a"}]}\n\n', USAGE, b"data: [DONE]\n\n"):
        await response.write(part)
    return response


def requests_at(*arrivals: float) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(arrival_s=at, block_ids=(number,), input_length=100, output_tokens=3)
        for number, at in enumerate(arrivals)
    ]


def target(url: str, **changes: Any) -> Target:
    return replace(Target(url=url, model="m", speed=10.0, seed=1), **changes)


async def test_requests_go_out_at_their_times_while_earlier_answers_are_still_due() -> None:
    released, loop = asyncio.Event(), asyncio.get_running_loop()

    async def held(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await released.wait()
        return await streamed(request)

    async with served(held) as (url, bodies):
        load = LoadGenerator(target(url, slo_ttft_s=2.0), requests_at(0.0, 1.0, 2.0))
        began = loop.time()
        running = asyncio.create_task(load.run())
        await eventually(lambda: load.tally.in_flight == 3)
        assert load.tally.counts["completed"] == 0
        await asyncio.sleep(0.3)
        released.set()

        assert await running
        took = loop.time() - began

    assert [o.ending for o in load.tally.outcomes] == ["completed"] * 3
    for outcome in load.tally.outcomes:
        assert outcome.ttft_s is not None
        assert 3.0 <= outcome.ttft_s < 10.0 * took, "engine time: the wall's times the speed"
        assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (100, 64, 3)
        assert (outcome.instance, outcome.predicted_ttft_s) == ("engine-1", 0.05)
    assert all(len(body["prompt"]) == 100 for body in bodies)
    assert bodies[0]["max_tokens"] == 3
    assert bodies[0]["stream_options"] == {"include_usage": True}


async def test_refusals_and_failures_are_told_apart() -> None:
    answers = iter([429, 503, 0])

    async def refusing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        status = next(answers)
        if not status:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"error": {"message": "m", "code": "busy"}}, status=status or 500)

    async with served(refusing) as (url, _):
        load = LoadGenerator(target(url), requests_at(0.0, 0.5, 1.0))
        await load.run()

    endings = sorted((o.ending, o.problem) for o in load.tally.outcomes)
    assert endings == [
        ("failed", "HTTP 503 busy"),
        ("failed", "connection: ServerDisconnectedError"),
        ("rejected", "HTTP 429 busy"),
    ]


async def test_no_more_are_under_way_than_may_be_and_the_wait_counts_as_lateness() -> None:
    most = 0

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal most
        most = max(most, load.tally.in_flight)
        return await streamed(request, wait=0.1)

    async with served(slow) as (url, _):
        load = LoadGenerator(target(url, in_flight_max=2), requests_at(0.0, 0.0, 0.0))
        await load.run()

    assert most == 2
    assert max(o.late_s for o in load.tally.outcomes) >= 0.9


async def test_a_stop_keeps_what_was_measured_and_forgets_the_rest() -> None:
    waits = iter([0.0])

    async def only_the_first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await streamed(request, wait=next(waits, 60.0))

    async with served(only_the_first) as (url, _):
        load = LoadGenerator(target(url), requests_at(0.0, 1.0, 600.0))
        running = asyncio.create_task(load.run())
        await eventually(lambda: (load.tally.sent, load.tally.counts["completed"]) == (2, 1))
        load.stop()

        assert not await running

    assert load.tally.sent == 2
    assert [o.ending for o in load.tally.outcomes] == ["completed"]


async def test_warm_up_requests_are_sent_but_not_counted() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await streamed(request)

    async with served(answer) as (url, bodies):
        load = LoadGenerator(target(url), requests_at(0.0, 0.1, 0.2), warmup=2)
        await load.run()

    assert (len(bodies), len(load.tally.outcomes)) == (3, 1)


async def test_shrunk_prompts_are_shorter_and_share_what_they_shared() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await streamed(request)

    first, longer = (
        replace(requests_at(0.0)[0], block_ids=blocks, input_length=length, output_tokens=80)
        for blocks, length in (((1, 2), 800), ((1, 2, 3), 1100))
    )
    async with served(answer) as (url, bodies):
        await LoadGenerator(target(url, shrink=8), [first, longer]).run()

    prompts = sorted((body["prompt"] for body in bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [100, 138]
    assert prompts[1][:100] == prompts[0]
    assert {body["max_tokens"] for body in bodies} == {10}


# --- The command ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "nothing answers at http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--trace", "absent.jsonl"], "absent.jsonl: No such file"),
        (["--trace", "a", "--workload", "chat"], "not both"),
        (["--policy", "dualmap,best"], "unknown policy best; there are: "),
        (["--policy", "dualmap", "--rebalance", "x"], "unknown policy x; there are: dualmap_pair, "),
        (["--policy", "dualmap", "--url", "http://x"], "leave --url and --from out"),
        (["--rebalance", "off"], "for the fleets that --policy starts"),
        (["--engine", "vllm"], "for the fleets that --policy starts"),
        (["--policy", "dualmap", "--engine", "vllm", "--speed", "2"], "leave --speed away"),
    ],
)
def test_what_cannot_be_done_is_said_clearly(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(bench_command, arguments)

    assert result.exit_code != 0
    assert said in " ".join(result.output.split())


def test_the_json_has_the_keys_that_others_rely_on() -> None:
    report = BenchReport(runs=[summary(completed(1.0))])

    run = json.loads(json_of(report))["runs"][0]
    assert run.keys() >= ISSUE_KEYS
    assert run["per_instance"]["engine-1"]["requests"] == 1
