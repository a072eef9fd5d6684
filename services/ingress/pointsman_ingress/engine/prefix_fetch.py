"""Has a target engine fetch the first tokens of a prompt from another, by vLLM's `kv_transfer_params` (NixlConnector):
the source gets these tokens with `max_tokens` 1 and holds their blocks; the target gets the same tokens with the
parameters of the answer, loads the blocks and caches them. The request itself then hits them. Two requests, since the
connector loads whole prompts only. A source that has evicted the tokens computes them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.contracts.commands import PrefixFetch, RouteGranted
from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, InstanceId, Tokens, WallSeconds, engine_seconds
from pointsman.runtime.tracing import NO_SPAN, Span
from pointsman_ingress.engine.answer import EngineFailedError
from pointsman_ingress.engine.client import EngineClient, EngineRequest
from pointsman_ingress.engine.disaggregation import NO_TRANSFER, REMOTE_DECODE, TRANSFER_BYTES_MAX, read_prefill
from pointsman_ingress.http.json_form import LIGHT_BYTES_MAX
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.token_ids import SLICE_TOKENS, json_list
from pointsman_ingress.work_threads import WorkThreads

COMPLETIONS = "/v1/completions"
OWNER = "prefix fetches"
"""Their share of the work threads: a copy serves no single tenant."""
FAILURE_CHARACTERS_MAX = 500
ANSWER_BYTES_MAX = 2 * TRANSFER_BYTES_MAX
"""Of an engine in a fetch: its parameters and one token."""
FETCH_WALL_SECONDS_MIN: WallSeconds = WallSeconds(2.0)
PREDICTED_TIMES_MAX = 4.0
"""A fetch that takes longer than so many times its prediction, and longer than the minimum, is given up."""


@dataclass(frozen=True, slots=True)
class PrefixPrompt:
    """`model` as the client named it, `salt` as the engine gets it."""

    model: str
    tokens: Sequence[int]
    salt: str = ""

    def body(self, tokens: Tokens, transfer: dict[str, Any]) -> bytes:
        fields: dict[str, Any] = {"model": self.model} if self.model else {}
        prompt = msgspec.Raw(json_list(self.tokens[:tokens]))
        fields |= {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": transfer}
        return msgspec.json.encode(fields | {"cache_salt": self.salt} if self.salt else fields)


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """`seconds`: in all; `source_seconds`: until the source answered. `failure`: why nothing was fetched."""

    tokens: Tokens
    seconds: EngineSeconds
    source_seconds: EngineSeconds
    failure: str = ""


class _FetchFailedError(Exception): ...


@dataclass(eq=False)
class PrefixFetcher:
    engines: EngineClient
    clock: Clock
    work: WorkThreads

    async def run(
        self,
        grant: RouteGranted,
        fetch: PrefixFetch,
        prompt: PrefixPrompt | None,
        headers: Headers,
        span: Span = NO_SPAN,
    ) -> FetchOutcome:
        """Never raises for what an engine does. `prompt` None: its tokens are not known."""
        started = self.clock.wall()
        answered = started
        bound = max(float(FETCH_WALL_SECONDS_MIN), float(PREDICTED_TIMES_MAX * fetch.seconds / self.clock.speed))

        def outcome(failure: str = "") -> FetchOutcome:
            tokens = 0 if failure else fetch.prefix_tokens - 1
            seconds, source_seconds = (
                engine_seconds(until - started, self.clock.speed) for until in (self.clock.wall(), answered)
            )
            return FetchOutcome(tokens, seconds, source_seconds, failure[:FAILURE_CHARACTERS_MAX])

        if prompt is None or len(prompt.tokens) < fetch.prefix_tokens:
            return outcome("the prompt's tokens are not known")

        async def body(transfer: dict[str, Any]) -> bytes:
            few = fetch.prefix_tokens <= SLICE_TOKENS
            return await self.work.run_unless(few, OWNER, prompt.body, fetch.prefix_tokens, transfer)

        async def ask(instance: InstanceId, url: str, rank: int, name: str, transfer: dict[str, Any]) -> EngineRequest:
            request_id = f"{grant.request}-{grant.attempt}-{name}"
            return EngineRequest(instance, url, COMPLETIONS, await body(transfer), headers, request_id, rank, span=span)

        try:
            async with asyncio.timeout(bound):
                give = await ask(fetch.source, fetch.url, fetch.dp_rank, "give", REMOTE_DECODE)
                whole = await self._whole(give, "the source")
                given = await self.work.run_unless(len(whole) <= LIGHT_BYTES_MAX, OWNER, read_prefill, whole)
                answered = self.clock.wall()
                if not given.transfer:
                    return outcome(f"the source {NO_TRANSFER}")
                take = await ask(grant.instance, grant.url, grant.dp_rank, "take", given.transfer)
                await self._whole(take, "the target")
        except TimeoutError:
            return outcome(f"not done within {bound:.3g} s")
        except _FetchFailedError as error:
            return outcome(str(error))
        return outcome()

    async def _whole(self, request: EngineRequest, who: str) -> bytes:
        try:
            status, body = await self.engines.ask(request, bytes_max=ANSWER_BYTES_MAX)
        except EngineFailedError as error:
            raise _FetchFailedError(f"{who}: {error}") from error
        if status >= 400:
            raise _FetchFailedError(f"{who} refused with status {status}")
        return body
