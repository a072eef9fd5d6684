"""What a fetch of a prefix asks of both engines, and what it makes of their silence."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.commands import PrefixCopy, PrefixFetch
from pointsman.contracts.requests import PrefixCopyEnded
from pointsman.ports import Clock
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime.supervision import Supervisor
from pointsman_ingress.engine import prefix_fetch
from pointsman_ingress.engine.client import EngineClient, EngineRequest
from pointsman_ingress.engine.disaggregation import (
    NO_PREFILL,
    REMOTE_DECODE,
    TRANSFER_BYTES_MAX,
    SplitBody,
    read_prefill,
)
from pointsman_ingress.engine.prefix_fetch import FetchOutcome, PrefixFetcher, PrefixPrompt
from pointsman_ingress.placement.pools import Pool
from pointsman_ingress.prefix_copies import PrefixCopier
from pointsman_ingress.work_threads import WorkThreads
from tests.support.events import grant
from tests.support.settable_clock import SettableClock

FETCH = PrefixFetch(source=InstanceId("a"), url="http://a", prefix_tokens=129, seconds=0.01, dp_rank=1)
GRANT = grant("r", "b", attempt=2, url="http://b", hit_tokens=128, predicted_ttft=0.1, fetch=FETCH)
PROMPT = PrefixPrompt("m", range(500), salt="s")
PARAMETERS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


class Answer:
    def __init__(self, body: dict[str, Any], status: int = 200) -> None:
        self.status = status
        self.body = msgspec.json.encode(body)


class Engines:
    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[EngineRequest] = []

    async def ask(self, request: EngineRequest, *, bytes_max: int) -> tuple[int, bytes]:
        assert bytes_max <= 2 * TRANSFER_BYTES_MAX
        self.asked.append(request)
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        return answer.status, answer.body


async def outcome_of(
    engines: Engines, prompt: PrefixPrompt | None = PROMPT, *, clock: Clock | None = None
) -> FetchOutcome:
    fetcher = PrefixFetcher(cast("EngineClient", engines), clock or ScaledClock(1.0), WorkThreads())
    return await fetcher.run(GRANT, FETCH, prompt, {})


@pytest.mark.parametrize("step", [3_600.0, -3_600.0])
async def test_a_clock_that_is_set_lengthens_no_fetch(step: float) -> None:
    clock = SettableClock(2.0)

    class SettingEngines(Engines):
        @override
        async def ask(self, request: EngineRequest, *, bytes_max: int) -> tuple[int, bytes]:
            await asyncio.sleep(0.01)
            clock.set_by += step
            return await super().ask(request, bytes_max=bytes_max)

    engines = SettingEngines(Answer({"kv_transfer_params": PARAMETERS}), Answer({}))
    began = time.monotonic()

    outcome = await outcome_of(engines, clock=clock)

    assert 2 * 0.01 <= outcome.source_seconds <= outcome.seconds - 2 * 0.01
    assert outcome.seconds <= 2 * (time.monotonic() - began)


async def test_the_source_gets_the_prefix_and_the_target_the_parameters_of_its_answer() -> None:
    engines = Engines(Answer({"kv_transfer_params": PARAMETERS}), Answer({}))

    outcome = await outcome_of(engines)

    assert (outcome.tokens, outcome.failure) == (128, "")
    bodies = [msgspec.json.decode(request.body) for request in engines.asked]
    common = {"model": "m", "prompt": list(range(129)), "max_tokens": 1, "cache_salt": "s"}
    assert bodies == [common | {"kv_transfer_params": REMOTE_DECODE}, common | {"kv_transfer_params": PARAMETERS}]
    assert [(r.instance, r.url, r.path, r.dp_rank, r.request_id) for r in engines.asked] == [
        ("a", "http://a", "/v1/completions", 1, "r-2-give"),
        ("b", "http://b", "/v1/completions", -1, "r-2-take"),
    ]


async def test_a_copy_is_taken_from_the_rank_of_the_grant_to_the_rank_that_the_scheduler_chose() -> None:
    engines, ended = Engines(Answer({"kv_transfer_params": PARAMETERS}), Answer({})), list[PrefixCopyEnded]()
    copy = PrefixCopy(target=InstanceId("c"), url="http://c", prefix_tokens=129, seconds=0.01, dp_rank=3)
    granted = msgspec.structs.replace(GRANT, copy=copy, fetch=None, dp_rank=2)
    pool = SimpleNamespace(name=PoolName("p"), events=SimpleNamespace(append_soon=ended.append))
    async with asyncio.TaskGroup() as tasks:
        supervisor = SimpleNamespace(start=lambda work, name: tasks.create_task(work, name=name))
        fetcher = PrefixFetcher(cast("EngineClient", engines), ScaledClock(1.0), WorkThreads())
        PrefixCopier(fetcher, cast("Supervisor", supervisor)).start(
            cast("Pool", pool), granted, ScaledClock(), PROMPT, {}
        )

    assert [(r.instance, r.url, r.dp_rank) for r in engines.asked] == [("b", "http://b", 2), ("c", "http://c", 3)]
    assert [(e.source, e.instance, e.tokens, e.failure) for e in ended] == [("b", "c", 128, "")]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([Answer({}, 404)], "the source refused with status 404"),
        ([Answer({})], "the source gave no kv_transfer_params that can be used: has it a connector?"),
        ([Answer({"kv_transfer_params": PARAMETERS}), Answer({}, 400)], "the target refused with status 400"),
        ([], "not done within 0.05 s"),
        ([Answer({"kv_transfer_params": PARAMETERS})], "not done within 0.05 s"),
    ],
)
async def test_what_fails_says_why(answers: list[Answer], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_fetch, "FETCH_WALL_SECONDS_MIN", 0.05)

    outcome = await outcome_of(Engines(*answers))

    assert (outcome.tokens, outcome.failure) == (0, why)


async def test_without_the_prompts_tokens_nobody_is_asked() -> None:
    engines = Engines()

    assert (await outcome_of(engines, None)).failure == "the prompt's tokens are not known"
    assert (await outcome_of(engines, PrefixPrompt("m", range(100)))).failure
    assert engines.asked == []


def handed_on(parameters: bytes) -> bytes | None:
    """What the decode engine gets of a prefill engine's `kv_transfer_params`."""
    split = SplitBody(b'{"prompt":"a"}', splittable=True)
    prefill = read_prefill(b'{"choices":[],"kv_transfer_params":%b}' % parameters)
    body: dict[str, msgspec.Raw] = msgspec.json.decode(split.for_decode(prefill), type=dict[str, msgspec.Raw])
    assert bytes(body["prompt"]) == b'"a"'
    return bytes(body["kv_transfer_params"]) if "kv_transfer_params" in body else None


def test_the_blocks_of_a_million_tokens_are_handed_on_as_they_are() -> None:
    blocks = list(range(10_000_000, 10_000_000 + 2**20 // 16))
    parameters = msgspec.json.encode(
        PARAMETERS | {"remote_block_ids": [blocks], "remote_port": 5600, "new": {"a": [1.0]}}
    )

    assert handed_on(parameters) == parameters


LISTS = b"[%b[]]" % (b"[]," * (16 * 2**20 // 3))
HOSTILE = {
    "lists": b'{"a":%b}' % LISTS,
    "as many lists as have room": b'{"a":%b]}' % LISTS[: TRANSFER_BYTES_MAX // 2].rpartition(b",")[0],
    "nesting": b'{"a":%b%b}' % (b"[" * 1000, b"]" * 1000),
    "fields": b"{%b}" % b",".join([b'"":0'] * 205_000),
    "text": b'"text"',
    "null": b"null",
    "list": b"[1]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_parameters_that_are_none_or_too_much_are_not_handed_on_and_cost_little(name: str) -> None:
    began = time.process_time()
    handed = handed_on(HOSTILE[name])

    assert handed is None
    assert time.process_time() - began < 1.0


async def test_a_source_whose_parameters_are_too_much_is_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its long answer is read in a thread."""
    run = list[str]()

    async def noted(_self: WorkThreads, owner: str, work: Any, *arguments: Any) -> Any:
        run.append(owner)
        return work(*arguments)

    monkeypatch.setattr(WorkThreads, "run", noted)
    answer = Answer({})
    answer.body = b'{"kv_transfer_params":%b}' % HOSTILE["as many lists as have room"]

    outcome = await outcome_of(Engines(answer))

    assert outcome.failure == "the source gave no kv_transfer_params that can be used: has it a connector?"
    assert run == [prefix_fetch.OWNER]
    assert read_prefill(b"{}").transfer == NO_PREFILL.transfer
