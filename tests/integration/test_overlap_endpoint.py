"""`POST /kv/overlap` of an ingress over HTTP: what it asks a scheduler, for whom, and what it answers to anything else."""

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from io import BytesIO
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import AnyCommand, decode_command
from pointsman.contracts.overlap import (
    OVERLAP_KEYS_MAX,
    InstanceOverlap,
    OverlapAnswered,
    OverlapRefused,
    OverlapRequest,
)
from pointsman.ports import Reply
from pointsman.primitives import Term
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.overlap import AT_ONCE_MAX, BODY_BYTES_MAX, TOKENS_MAX
from tests.support.api_keys import SECRET, api_key, put_key
from tests.support.events import BLOCK
from tests.support.ingress_world import ONE, IngressBench, world_with
from tests.support.waiting import eventually

PATH = "/kv/overlap"
TOKENS = list(range(3 * BLOCK + 5))
ANSWER = OverlapAnswered(
    pool="default", model="m", block_tokens=BLOCK, scheduler="s", leading=True, term=Term(1), as_of=7, behind=0, age=0.5,
    instances=[
        InstanceOverlap(
            instance=ONE, url="http://one", status="ready", knowledge="exact", matched_blocks=[2], matched_tokens=[2 * BLOCK]
        )
    ],
)  # fmt: skip


@dataclass
class Answering:
    """A scheduler that answers as a test says."""

    answer: AnyCommand | None = ANSWER
    asked: list[OverlapRequest] = field(default_factory=list)
    held_back: asyncio.Event | None = None

    async def on_payload(self, payload: bytes, reply: Reply) -> None:
        request = decode_command(payload)
        assert isinstance(request, OverlapRequest)
        self.asked.append(request)
        if self.held_back is not None:
            await self.held_back.wait()
        if self.answer is not None:
            await reply(self.answer)


@asynccontextmanager
async def overlap_world(**settings: Any) -> AsyncIterator[tuple[IngressBench, Answering]]:
    async with world_with(**settings) as world:
        scheduler, link = Answering(), world.broker.client(ScaledClock(), name="s")
        async with link.commands.serve_payloads("pm.default.cmd.overlap", scheduler.on_payload, queue="overlap"):
            yield world, scheduler


async def post(world: IngressBench, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with world.client.post(world.admin_url + PATH, data=BytesIO(data), headers=sent) as answer:
        return answer.status, await answer.json(), {name.lower(): value for name, value in answer.headers.items()}


def keys(tokens: list[int], *, salt: str = "") -> bytes:
    """As docs/overlap.md defines them."""
    secret, packed = SECRET.encode(), b""
    root = "\x00".join(("pointsman-1", "m", "", salt, str(BLOCK))).encode()
    digest = blake2b(root, key=secret, digest_size=8).digest()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + BLOCK])
        digest = blake2b(digest + block, key=secret, digest_size=8).digest()
        packed += digest
    return packed


async def test_prompts_are_asked_for_by_their_keys_and_the_answer_is_the_schedulers() -> None:
    async with overlap_world() as (world, scheduler):
        given = base64.b64encode(keys(TOKENS)[:8]).decode()
        status, answer, _ = await post(
            world, {"model": "m", "prompts": [{"token_ids": TOKENS}, {"block_keys": given}, {"token_ids": [1]}]}
        )

        assert status == 200
        assert [prompt.block_keys for prompt in scheduler.asked[0].prompts] == [keys(TOKENS), keys(TOKENS)[:8], b""]
        assert (answer["as_of"], answer["behind"], answer["block_tokens"]) == (7, 0, BLOCK)
        assert answer["instances"] == [
            {"instance": ONE, "url": "http://one", "status": "ready", "knowledge": "exact",
             "matched_blocks": [2], "matched_tokens": [2 * BLOCK]}
        ]  # fmt: skip


async def test_without_keys_the_salt_is_the_one_that_engines_get() -> None:
    async with overlap_world() as (world, scheduler):
        await post(world, {"prompts": [{"token_ids": TOKENS}], "cache_salt": "pepper"})

        assert scheduler.asked[0].prompts[0].block_keys == keys(TOKENS, salt="pepper")


async def test_a_large_prompt_is_read_in_a_thread_and_asked_for_whole() -> None:
    tokens = [123_456] * (OVERLAP_KEYS_MAX * BLOCK // 8)
    async with overlap_world() as (world, scheduler):
        status, _, _ = await post(world, {"prompts": [{"token_ids": tokens}]})

        assert status == 200
        assert len(scheduler.asked[0].prompts[0].block_keys) == OVERLAP_KEYS_MAX


WRONG = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b'{"prompts":[{}],"cache_salt":"\xff"}',
    "half a character": b'{"prompts":[{"token_ids":[1]}],"cache_salt":"\\ud800"}',
    "a list": [],
    "no prompts": {"prompts": []},
    "no field of them": {"model": "m"},
    "too many prompts": {"prompts": [{}] * 65},
    "a negative id": {"prompts": [{"token_ids": [-1]}]},
    "a large id": {"prompts": [{"token_ids": [2**32]}]},
    "a huge id": b'{"prompts":[{"token_ids":[' + b"9" * 5000 + b"]}]}",
    "text": {"prompts": ["Hello"]},
    "half a key": {"prompts": [{"block_keys": "AAAA"}]},
    "ids and keys": {"prompts": [{"token_ids": [1], "block_keys": "AAAAAAAAAAA="}]},
    "another field": {"prompts": [{"token_ids": [1]}], "tenant": "another"},
    "too many ids": {"prompts": [{"token_ids": [1] * TOKENS_MAX}, {"token_ids": [1]}]},
    "too many keys": {"prompts": [{"block_keys": base64.b64encode(bytes(8 * (OVERLAP_KEYS_MAX + 1))).decode()}]},
    "deep nesting": b'{"prompts":' + b"[" * 100_000,
    "deep nesting elsewhere": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"prompts":[{}]}',
}


async def test_what_is_no_request_gets_an_error_and_no_scheduler_hears_of_it() -> None:
    async with overlap_world() as (world, scheduler):
        answers = {name: await post(world, body) for name, body in WRONG.items()}

        assert {name: status for name, (status, _, _) in answers.items() if status != 400} == {}
        assert all(body["error"]["message"] for _, body, _ in answers.values())
        assert scheduler.asked == []


async def test_only_json_in_a_body_of_bounded_size_is_posted() -> None:
    async with overlap_world() as (world, _):
        body: dict[str, Any] = {"prompts": [{}]}
        assert (await post(world, body, content_type="text/plain"))[0] == 400
        assert (await post(world, b" " * (BODY_BYTES_MAX + 1)))[0] == 413
        assert (await post(world, {**body, "model": "another"}))[0] == 404
        for method in ("GET", "PUT", "DELETE"):
            async with world.client.request(method, world.admin_url + PATH) as answer:
                assert (answer.status, answer.headers["allow"]) == (405, "POST")
        async with world.client.post(world.url + PATH, json=body) as answer:
            assert answer.status == 404, "it is on the admin port alone"


@pytest.mark.parametrize(
    ("refused", "status", "code"),
    [
        (OverlapRefused(reason="too_often", detail="again in 0.034 s", retry_after=0.034), 429, "too_often"),
        (OverlapRefused(reason="invalid", detail="no"), 400, "invalid"),
    ],
)
async def test_a_refusal_is_told_with_its_reason(refused: OverlapRefused, status: int, code: str) -> None:
    async with overlap_world() as (world, scheduler):
        scheduler.answer = refused
        found, answer, headers = await post(world, {"prompts": [{}]})

        assert (found, answer["error"]["code"]) == (status, code)
        if status == 429:
            assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "34")


async def test_without_a_scheduler_it_says_so() -> None:
    async with world_with() as world:
        status, answer, headers = await post(world, {"prompts": [{}]})

        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "no_scheduler", "1")


async def test_before_an_engine_has_joined_nothing_can_be_asked() -> None:
    async with world_with(engines_join=False) as world:
        status, answer, _ = await post(world, {"prompts": [{}]})

        assert (status, answer["error"]["code"]) == (503, "no_engines")


async def test_only_so_many_are_asked_at_once() -> None:
    async with overlap_world() as (world, scheduler):
        scheduler.held_back = asyncio.Event()
        waiting = [asyncio.create_task(post(world, {"prompts": [{}]})) for _ in range(AT_ONCE_MAX)]
        await eventually(lambda: bool(scheduler.asked))

        async def is_refused() -> bool:
            return (await post(world, {"prompts": [{}]}))[0] == 429

        await eventually(is_refused)
        scheduler.held_back.set()
        assert {status for status, _, _ in await asyncio.gather(*waiting)} == {200}
        assert (await post(world, {"prompts": [{}]}))[0] == 200


async def test_a_key_must_name_the_path_and_sees_its_own_tenants_prefixes() -> None:
    async with overlap_world(keys={"client-key": "alice"}) as (world, scheduler):
        await put_key(world.broker.access, api_key("router-key", "alice", endpoints=[PATH]))
        await put_key(world.broker.access, api_key("narrow-key", "alice", endpoints=[PATH], models=["other-*"]))
        body = {"prompts": [{"token_ids": TOKENS}], "cache_salt": "own"}

        async def may() -> bool:
            return (await post(world, body, authorization="Bearer router-key"))[0] == 200

        await eventually(may)
        assert (await post(world, body))[0] == 401
        assert (await post(world, body, authorization="Bearer wrong"))[0] == 401
        assert (await post(world, body, authorization="Bearer client-key"))[0] == 403
        assert (await post(world, body, authorization="Bearer narrow-key"))[0] == 403

        group = b"tenant:alice"
        message = b"pointsman-cache-salt-1\x00" + b"%d\x00" % len(group) + group + b"own"
        salt = hmac.new(SECRET.encode(), message, "sha256").hexdigest()[:43]
        assert {request.prompts[0].block_keys for request in scheduler.asked} == {keys(TOKENS, salt=salt)}


async def test_a_mistake_of_ours_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> Identity:
        raise RuntimeError

    async with overlap_world() as (world, _):
        monkeypatch.setattr(Authentication, "identity", fails)
        status, answer, _ = await post(world, {"prompts": [{}]})

        assert (status, answer["error"]["code"]) == (500, "internal_error")
