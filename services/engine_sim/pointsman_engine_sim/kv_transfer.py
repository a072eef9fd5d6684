"""Transfers a prompt's KV cache between simulated engines, by vLLM's `kv_transfer_params`. {"do_remote_decode": true}:
prefill only; the answer locates the blocks, held for `kv_hold_seconds`. {"do_remote_prefill": true}: fetch at
`kv_transfer_gb_per_s` instead of computing; 500 if the blocks are gone. Transfers from one engine come one after the other."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, RequestId, Tokens
from pointsman_engine_sim.kv_connector import TRANSFER_PATH
from pointsman_engine_sim.openai_bodies import ApiError, FetchAnswer, FetchBody, TransferParams

log = structlog.get_logger()

ANSWER_WALL_SECONDS_MAX = 5.0


class KvTransfer:
    def __init__(
        self,
        *,
        clock: Clock,
        release_kv: Callable[[RequestId], bool],
        block_size: Tokens,
        seconds_per_token: EngineSeconds,
        hold_seconds: EngineSeconds,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        """`release_kv`: frees the blocks of a finished request. Engine seconds. `session`: opened on demand."""
        self._clock = clock
        self._let_go = release_kv
        self._block_size = block_size
        self._seconds_per_token = seconds_per_token
        self._hold_seconds = hold_seconds
        self._engine_id = secrets.token_hex(8)
        self._link_free_at: EngineSeconds = 0.0
        self._held: dict[str, tuple[RequestId, asyncio.TimerHandle]] = {}
        self._session = session
        self.url = ""

    async def close(self) -> None:
        for _, timer in self._held.values():
            timer.cancel()
        if self._session is not None:
            await self._session.close()

    def offer(self, request: RequestId, prompt_tokens: Tokens) -> dict[str, Any]:
        name = f"{self._engine_id}-{request}"
        seconds = self._hold_seconds / self._clock.speed
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, name)
        self._held[name] = (request, timer)
        parts = urlsplit(self.url)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(-(-prompt_tokens // self._block_size)))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": name,
            "remote_host": parts.hostname,
            "remote_port": parts.port,
            "tp_size": 1,
        }

    def give(self, body: FetchBody) -> FetchAnswer | None:
        """None if it is not held. Transfers from this engine come one after the other."""
        if body.request not in self._held:
            return None
        if body.done:
            self._release(body.request)
            return FetchAnswer()
        now = self._clock.now()
        self._link_free_at = max(now, self._link_free_at) + body.tokens * self._seconds_per_token
        return FetchAnswer(self._link_free_at - now)

    async def fetch(self, params: TransferParams, tokens: Tokens) -> None:
        """Fetch the tokens' blocks from `params`. Raises ApiError if they are gone."""
        sent = await self._ask(params, FetchBody(params.remote_request_id or "", tokens=tokens))
        await self._clock.sleep(sent.seconds)
        await self._ask(params, FetchBody(params.remote_request_id or "", done=True))

    async def _ask(self, params: TransferParams, body: FetchBody) -> FetchAnswer:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_WALL_SECONDS_MAX))
        url = f"http://{params.remote_host}:{params.remote_port}{TRANSFER_PATH}"
        try:
            async with self._session.post(url, data=msgspec.json.encode(body)) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _failed(f"{url}: {str(error) or type(error).__name__}") from error
        if answer.status != 200:
            raise _failed(f"{params.remote_request_id} is not held at {url} any more")
        return msgspec.json.decode(content, type=FetchAnswer)

    def _expire(self, name: str) -> None:
        log.warning("kv_not_fetched", request=name, engine_seconds=self._hold_seconds)
        self._release(name)

    def _release(self, name: str) -> None:
        request, timer = self._held.pop(name)
        timer.cancel()
        self._let_go(request)


def _failed(reason: str) -> ApiError:
    return ApiError(500, f"KV transfer failed: {reason}", kind="InternalServerError")
