"""The engine's HTTP side: whether it serves, what it is, and how loaded it is.

Reads vLLM's `/health`, `/v1/models`, `/version` and `/metrics`, and nothing of the KV events. Only the few metrics
that matter are looked for, line by line: the page has hundreds and is read every second.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import msgspec

from pointsman.contracts.fleet import ANY_RANK
from pointsman.primitives import Seconds, Tokens

PROBE_SECONDS_MAX: Seconds = 2.0
"""How long one question to the engine may take, by default."""

COMPLETIONS_PATH = "/v1/completions"
VECTOR_PATHS = ("/v1/embeddings", "/pooling")
"""What an engine has instead that was started with vLLM's `--runner pooling`."""

WAITING_METRIC = "vllm:num_requests_waiting"
RUNNING_METRIC = "vllm:num_requests_running"
KV_USAGE_METRICS = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CACHE_CONFIG_METRIC = "vllm:cache_config_info"

_json = msgspec.json.Decoder()
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="([^"]*)"')


class EngineAwayError(Exception):
    """The engine does not answer as a serving engine should. `refused`: nothing listens there at all."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class FurtherNames:
    """Names beside the model's own under which an engine takes requests: the same model, or it with an adapter."""

    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine is. Zero where it does not say."""

    model: str
    max_model_len: Tokens
    version: str
    block_tokens: Tokens
    kv_capacity_tokens: Tokens
    further_names: FurtherNames = FurtherNames()
    completes: bool = True
    """Whether it completes prompts, and does not only make vectors of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine does at the moment; `kv_usage` from 0 to 1. Adapters come and go while it runs: `further_names` None
    means that it did not say."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    further_names: FurtherNames | None = None


class HttpEngine:
    """One engine behind its OpenAI-compatible server. Open it as a context."""

    def __init__(
        self, url: str, *, api_key: str = "", dp_rank: int = ANY_RANK, seconds_max: Seconds = PROBE_SECONDS_MAX
    ) -> None:
        """`dp_rank`: whose load and capacity to read, of an engine with several data-parallel ranks. `seconds_max`: how
        long one question may take."""
        self._url = url.rstrip("/")
        self._seconds_max = seconds_max
        self._dp_rank = dp_rank
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._seconds_max)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def describe(self) -> EngineFacts:
        """What the engine is, once it is healthy. Raises EngineAwayError."""
        await self._get("/health")
        listed = await self._get("/v1/models")
        model, max_model_len = served_model(listed)
        block_tokens, kv_capacity_tokens = cache_size(await self._metrics(), self._dp_rank)
        return EngineFacts(
            model=model,
            max_model_len=max_model_len,
            version=await self._version(),
            block_tokens=block_tokens,
            kv_capacity_tokens=kv_capacity_tokens,
            further_names=further_names(listed) or FurtherNames(),
            completes=await self._has(COMPLETIONS_PATH) or not any([await self._has(path) for path in VECTOR_PATHS]),
        )

    async def load(self) -> EngineLoad:
        """How busy the engine is, if it is healthy. Raises EngineAwayError."""
        await self._get("/health")
        names = further_names(await self._get("/v1/models", refusal_is_fatal=False))
        return replace(load_in(await self._metrics(), self._dp_rank), further_names=names)

    async def _metrics(self) -> str:
        return (await self._get("/metrics", refusal_is_fatal=False)).decode(errors="replace")

    async def _version(self) -> str:
        answer = _decoded(await self._get("/version", refusal_is_fatal=False))
        version = answer.get("version") if isinstance(answer, dict) else None
        return str(version or "")

    async def _has(self, path: str) -> bool:
        """Whether there is something to POST to at this path: a GET is then refused for its method."""
        status, _ = await self._asked(path)
        return status == HTTPStatus.METHOD_NOT_ALLOWED

    async def _get(self, path: str, *, refusal_is_fatal: bool = True) -> bytes:
        """The body of a 200; of another status nothing, where `refusal_is_fatal` is not set."""
        status, body = await self._asked(path)
        if status == HTTPStatus.OK:
            return body
        if refusal_is_fatal:
            msg = f"{self._url}{path}: status {status}"
            raise EngineAwayError(msg)
        return b""

    async def _asked(self, path: str) -> tuple[int, bytes]:
        assert self._session is not None, "open it as a context first"
        where = self._url + path
        try:
            async with self._session.get(where) as response:
                return response.status, await response.read()
        except aiohttp.ClientConnectorError as error:
            msg = f"{where}: {error.strerror or error}"
            raise EngineAwayError(msg, refused=True) from error
        except aiohttp.InvalidURL as error:
            msg = f"{self._url} is no URL like http://127.0.0.1:8000"
            raise EngineAwayError(msg) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            msg = f"{where}: {str(error) or type(error).__name__}"
            raise EngineAwayError(msg) from error


def served_model(body: bytes) -> tuple[str, Tokens]:
    """Name and longest context of the base model in an answer of `/v1/models` (adapters have a parent).

    Raises EngineAwayError where it lists none.
    """
    models = _listed_models(body)
    if not models:
        msg = "/v1/models lists no model"
        raise EngineAwayError(msg)
    base = _base_of(models)
    length = base.get("max_model_len")
    return str(base["id"]), length if isinstance(length, int) else 0


def further_names(body: bytes) -> FurtherNames | None:
    """What an answer of `/v1/models` lists beside the base model; None where it lists nothing at all."""
    models = _listed_models(body)
    if not models:
        return None
    others = [model for model in models if model is not _base_of(models)]
    return FurtherNames(
        aliases=tuple(str(model["id"]) for model in others if not model.get("parent")),
        adapters=tuple(str(model["id"]) for model in others if model.get("parent")),
    )


def load_in(metrics: str, dp_rank: int = ANY_RANK) -> EngineLoad:
    """Load of one data-parallel rank, or over all of them: counts add up, the fullest cache counts."""
    waiting = running = usage = 0.0
    for name, _, value in _samples(metrics, dp_rank):
        if name == WAITING_METRIC:
            waiting += value
        elif name == RUNNING_METRIC:
            running += value
        elif name in KV_USAGE_METRICS:
            usage = max(usage, value)
    return EngineLoad(waiting=int(waiting), running=int(running), kv_usage=usage)


def cache_size(metrics: str, dp_rank: int = ANY_RANK) -> tuple[Tokens, Tokens]:
    """Block size and capacity of the KV cache in tokens; zeros where the engine does not say."""
    block_tokens = capacity = 0
    for name, labels, _ in _samples(metrics, dp_rank):
        if name != CACHE_CONFIG_METRIC:
            continue
        known = dict(_LABEL.findall(labels))
        block_tokens = _number(known.get("block_size"))
        capacity += _number(known.get("kv_cache_size_tokens")) or block_tokens * _number(known.get("num_gpu_blocks"))
    return block_tokens, capacity


def _samples(metrics: str, dp_rank: int) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of vLLM's samples in a Prometheus text page, of one rank or of all."""
    own = f'engine="{dp_rank}"'
    for line in metrics.splitlines():
        if not line.startswith("vllm:"):
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if dp_rank != ANY_RANK and own not in labels:
            continue
        try:
            yield name, labels, float(value)
        except ValueError:
            continue


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _listed_models(body: bytes) -> list[dict[str, Any]]:
    answer = _decoded(body)
    listed = answer.get("data") if isinstance(answer, dict) else None
    return [m for m in listed if isinstance(m, dict) and m.get("id")] if isinstance(listed, list) else []


def _base_of(models: list[dict[str, Any]]) -> dict[str, Any]:
    return next((model for model in models if not model.get("parent")), models[0])


def _decoded(body: bytes) -> Any:
    try:
        return _json.decode(body)
    except (ValueError, RecursionError):
        return None
