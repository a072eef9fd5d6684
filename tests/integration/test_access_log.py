"""The access log: one line for each request, whatever becomes of it, and nothing of what was said or shown."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pointsman.runtime.line_writer import PENDING_BYTES_MAX, PIECE_BYTES_MAX, LineWriter
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import CHAT, COMPLETIONS, STREAM, TOKENS, IngressBench, open_world
from tests.support.services import ingress_settings
from tests.support.waiting import eventually
from tests.tidy.pages import ROOT

MESSAGES, AUDIO, TOKENIZE = "/v1/messages", "/v1/audio/transcriptions", "/tokenize"
SECRET = "the-launch-code-is-7351"
"""What nobody may find in a line: it is planted in prompts and keys, headers and answers."""


@dataclass
class Output:
    """Standard output, that someone reads or not."""

    written: bytearray = field(default_factory=bytearray)
    pieces: list[int] = field(default_factory=list)
    reads: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.reads.set()

    def write(self, data: bytes, /) -> int:
        self.reads.wait()
        taken = data[: 1 + len(data) // 2]  # as a pipe that is nearly full
        self.written += taken
        self.pieces.append(len(data))
        return len(taken)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written.splitlines()]


@asynccontextmanager
async def logged_world(
    keys: Mapping[str, str] | None = None, **settings: Any
) -> AsyncIterator[tuple[IngressBench, Output]]:
    output = Output()
    told = ingress_settings(
        **{
            "access_log": True,
            "tokenizer": "builtin",
            "require_keys": keys is not None,
            "drain_seconds_max": 0.2,
            **settings,
        }
    )
    async with AsyncExitStack() as stack:
        yield await open_world(stack, told, access_log_out=output, keys=keys), output


async def only_line(output: Output) -> dict[str, Any]:
    await eventually(lambda: output.written.count(b"\n") == 1)
    return output.lines[0]


async def test_a_finished_request_is_told_of_with_all_that_is_known() -> None:
    async with logged_world() as (world, output):
        headers = {"x_request_id": "mine", "user_agent": "test/1", "x_llm_d_inference_fairness_id": "alice"}
        async with world.post(COMPLETIONS, STREAM, **headers) as answer:
            content = await answer.read()
        line = await only_line(output)

    assert line["duration_ms"] >= line["first_byte_ms"] >= line["queue_ms"] >= 0
    assert line.pop("time").endswith("Z")
    for measured in ("duration_ms", "first_byte_ms", "queue_ms"):
        assert 0 <= line.pop(measured) < 10_000
    assert line == {
        "log": "access",
        "request_id": answer.headers["x-pointsman-request-id"],
        "trace_id": None,
        "client_request_id": "mine",
        "client": "127.0.0.1",
        "user_agent": "test/1",
        "tenant": "alice",
        "method": "POST",
        "path": COMPLETIONS,
        "model": "m",
        "pool": "default",
        "stream": True,
        "status": 200,
        "reason": None,
        "instance": "engine-1",
        "prefill_instance": None,
        "retries": 0,
        "predicted_ttft_ms": 250.0,
        "request_bytes": len(json.dumps(STREAM)),
        "response_bytes": len(content),
        "prompt_tokens": 200,
        "completion_tokens": 3,
        "cached_tokens": 64,
        "predicted_cached_tokens": 128,
    }


async def test_the_pages_sample_has_the_fields_of_a_line() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    sample = json.loads(next(text for text in page.splitlines() if text.startswith('{"log":"access"')))

    async with logged_world() as (world, output):
        async with world.post(COMPLETIONS, STREAM) as answer:
            await answer.read()
        line = await only_line(output)

    assert list(sample) == list(line)


async def test_a_request_that_is_not_placed_is_told_of_too() -> None:
    async with logged_world() as (world, output):
        async with world.post(TOKENIZE, {"model": "m", "prompt": "hello"}) as answer:
            await answer.read()
        line = await only_line(output)

    assert (line["path"], line["status"], line["pool"], line["model"]) == (TOKENIZE, 200, "default", "m")
    assert line["instance"] == answer.headers["x-pointsman-instance"]
    assert (line["prompt_tokens"], line["queue_ms"]) == (None, None)


Arrange = Callable[[IngressBench], None]


def rejects(world: IngressBench) -> None:
    world.scheduler.rejection = (429, "slo_ttft", 1.0)


def does(*behaviours: Behaviour) -> Arrange:
    return lambda world: world.one.script.extend(behaviours)


def both_err(world: IngressBench) -> None:
    world.one.script.append(Behaviour.ERRS)
    world.two.script.append(Behaviour.ERRS)


def nothing(_world: IngressBench) -> None:
    pass


CASES: dict[str, tuple[Arrange, str, Any, int, str]] = {
    "no JSON": (nothing, CHAT, b"{", 400, "malformed_body"),
    "no form": (nothing, AUDIO, b"{", 400, "invalid_body"),
    "no such model": (
        nothing,
        MESSAGES,
        {**TOKENS, "model": "nobody", "messages": [{"role": "user"}]},
        404,
        "model_not_found",
    ),
    "too long": (nothing, COMPLETIONS, {**TOKENS, "max_tokens": 5000}, 400, "context_length_exceeded"),
    "too large": (nothing, CHAT, b" " * 9_000_000, 413, "body_too_large"),
    "rejected": (rejects, COMPLETIONS, TOKENS, 429, "slo_ttft"),
    "refused by the engine": (does(Behaviour.REFUSES), COMPLETIONS, TOKENS, 400, "engine_refused"),
    "no such endpoint": (nothing, "/v1/embeddings", {"model": "m", "input": "x"}, 404, "endpoint_not_found"),
    "no engine answers": (both_err, COMPLETIONS, TOKENS, 503, "no_instance"),
    "breaks off": (does(Behaviour.BREAKS_OFF), COMPLETIONS, STREAM, 200, "engine_failed"),
    "takes too long": (does(Behaviour.HANGS), COMPLETIONS, TOKENS, 408, "timeout"),
    "stops in a stream": (does(Behaviour.HANGS_AFTER_FIRST), COMPLETIONS, STREAM, 200, "timeout"),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_ends_badly_has_one_line_that_says_why(case: str) -> None:
    arrange, path, body, status, reason = CASES[case]
    async with logged_world(request_timeout_seconds=1.0) as (world, output):
        arrange(world)
        async with world.post(path, body) as answer:
            await answer.read()
        line = await only_line(output)
        await asyncio.sleep(0.3)

    assert (answer.status, line["status"], line["reason"]) == (status, status, reason)
    assert line["path"] == path
    assert len(output.lines) == 1


async def test_another_method_has_a_line() -> None:
    async with logged_world() as (world, output):
        async with world.client.get(world.url + CHAT) as answer:
            await answer.read()
        line = await only_line(output)

    assert (line["method"], line["status"], line["reason"]) == ("GET", 405, "method_not_allowed")


async def test_a_retry_is_counted_and_the_last_engine_named() -> None:
    async with logged_world() as (world, output):
        world.one.script.append(Behaviour.ERRS)
        async with world.post(COMPLETIONS, TOKENS) as answer:
            await answer.read()
        line = await only_line(output)

    assert (line["status"], line["retries"], line["instance"], line["reason"]) == (200, 1, "engine-2", None)


@pytest.mark.parametrize(
    ("behaviour", "status"), [(Behaviour.HANGS, 499), (Behaviour.HANGS_AFTER_FIRST, 200)], ids=["before", "in a stream"]
)
async def test_a_client_that_hangs_up_has_a_line(behaviour: Behaviour, status: int) -> None:
    async with logged_world() as (world, output):
        world.one.script.append(behaviour)
        asking = asyncio.create_task(_ask(world))
        await eventually(lambda: len(world.one.received) == 1)
        if status == 200:
            await eventually(lambda: asking.done())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        line = await only_line(output)

    assert (line["status"], line["reason"], line["instance"]) == (status, "client_gone", "engine-1")


async def _ask(world: IngressBench) -> None:
    async with world.post(COMPLETIONS, STREAM) as answer:
        await answer.content.readany()
        answer.close()


async def test_a_defect_of_ours_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise AssertionError(SECRET)

    async with logged_world() as (world, output):
        monkeypatch.setattr("pointsman_ingress.resolver.session_of", broken)
        async with world.post(COMPLETIONS, TOKENS) as answer:
            await answer.read()
        line = await only_line(output)

    assert (answer.status, line["status"], line["reason"]) == (500, 500, "internal_error")
    assert SECRET not in output.written.decode()


async def test_nothing_of_what_was_said_or_shown_is_in_a_line() -> None:
    said = [{"role": "user", "content": SECRET}]
    shown: list[dict[str, str]] = [
        {"authorization": f"Bearer {SECRET}", "cookie": SECRET, "x_session_id": SECRET, "traceparent": SECRET},
        {"x_api_key": SECRET},
        {"authorization": f"Bearer {SECRET}-wrong"},
        {"x_api_key": f"{SECRET}-wrong"},
    ]
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"model": "m", "messages": said}),
        (CHAT, {"model": "m", "messages": said, "max_tokens": 100_000}),
        (CHAT, {"model": "m", "messages": SECRET}),
        (CHAT, b'{"messages": "' + SECRET.encode()),
        (f"{CHAT}?key={SECRET}", {"model": "m", "messages": said}),
        (MESSAGES, {"model": "m", "messages": said, "system": SECRET}),
        (COMPLETIONS, {"model": "m", "prompt": SECRET, "cache_salt": SECRET, "stream": True}),
        (TOKENIZE, {"model": "m", "prompt": SECRET}),
        (AUDIO, SECRET.encode()),
    ]
    async with logged_world(keys={SECRET: "alice"}) as (world, output):
        world.one.says[CHAT] = {"id": SECRET, "choices": [{"message": {"content": SECRET}}]}
        for headers in shown:
            for path, body in bodies:
                async with world.post(path, body, **headers) as answer:
                    await answer.read()
        await eventually(lambda: output.written.count(b"\n") == len(shown) * len(bodies))

    assert {line["status"] for line in output.lines} >= {200, 400, 401, 404}
    assert SECRET not in output.written.decode()
    assert SECRET[::-1] not in output.written.decode()
    assert {line["tenant"] for line in output.lines} == {"alice", None}


async def test_who_does_not_read_holds_up_no_request() -> None:
    async with logged_world() as (world, output):
        output.reads.clear()
        for _ in range(20):
            async with world.post(TOKENIZE, {"model": "m", "prompt": "hello"}) as answer:
                assert answer.status == 200
        assert output.written == b""
        output.reads.set()
        await eventually(lambda: len(output.lines) == 20)


async def test_what_nobody_reads_is_bounded_and_what_is_written_are_whole_lines() -> None:
    output = Output()
    output.reads.clear()
    taken = []
    with LineWriter(output) as lines:
        for number in range(3000):
            taken.append(lines.write(json.dumps({"number": number, "text": "x" * 2000}).encode()))
            if number == 0:
                await asyncio.sleep(0.3)  # the first is being written, for ever as it seems
        output.reads.set()

    kept = [number for number, was in enumerate(taken) if was]
    assert 0 < len(kept) < 3000
    assert sum(map(len, output.written.splitlines())) < PENDING_BYTES_MAX + 10_000
    assert [line["number"] for line in output.lines] == kept
    assert max(output.pieces) <= PIECE_BYTES_MAX


async def test_the_last_lines_are_written_at_the_end() -> None:
    output = Output()
    with LineWriter(output) as lines:
        lines.write(b"{}")

    assert output.written == b"{}\n"


NOBODY_READS = """
import asyncio, sys
from io import FileIO
from pointsman.runtime.line_writer import LineWriter

async def main():
    with LineWriter(FileIO(sys.stdout.fileno(), "w", closefd=False)) as lines:
        for _ in range(1000):
            lines.write(b"x" * 1000)
        await asyncio.sleep(0.5)

asyncio.run(main())
"""


def test_a_process_whose_lines_nobody_reads_ends_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", NOBODY_READS], stdout=subprocess.PIPE) as process:
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
