"""Reads facts and load from vLLM's `/health`, `/v1/models`, `/version` and `/metrics`. Engines are untrusted: answers
are bounded, invalid numbers count as missing. Metrics are searched by a pattern: `prometheus_client.parser` takes 15 ms
for 1000 lines (4 s for a hostile page), this 0.05 ms (8 ms)."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import islice
from typing import Self, TypeVar

import aiohttp
import msgspec
import structlog

from pointsman.adapters.engine_connector import EngineConnector
from pointsman.adapters.http_bodies import bounded_body
from pointsman.adapters.name_resolver import NameResolver
from pointsman.contracts.fleet import ANY_RANK
from pointsman.primitives import BLOCK_TOKENS_MAX, Seconds, Tokens

PROBE_SECONDS_MAX: Seconds = 2.0
COMPLETIONS_PATH = "/v1/completions"
VECTOR_PATHS = ("/v1/embeddings", "/pooling")
"""Paths of an engine started with `--runner pooling`."""
HEALTH_BYTES_MAX = 0
MODELS_BYTES_MAX = 1024 * 1024
VERSION_BYTES_MAX = 16 * 1024
METRICS_BYTES_MAX = 8 * 1024 * 1024
"""A larger answer is ignored. vLLM's metrics take about 60 KB per rank."""
SAMPLES_MAX = 1024
SAMPLE_CHARACTERS_MAX = 4096
NAME_BYTES_MAX = 256
NAMES_MAX = 512
LISTED_MAX = 1024
"""Entries of `/v1/models` that are looked at; engines list the base model first."""
NAMES_BYTES_MAX = 16 * 1024
"""Bound on all further names together, since each report repeats them."""
COUNT_MAX = 1_000_000_000
CAPACITY_TOKENS_MAX = 1_000_000_000_000
VERSION_CHARACTERS_MAX = 100
WAITING_METRIC = "vllm:num_requests_waiting"
RUNNING_METRIC = "vllm:num_requests_running"
KV_USAGE_METRICS = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CACHE_CONFIG_METRIC = "vllm:cache_config_info"
REASON_CHARACTERS_MAX = 200

_LABEL = re.compile(r'[{,]([A-Za-z_][A-Za-z0-9_]*)="([^"]*)"')
_SAMPLE = re.compile(
    r"\n(" + "|".join((WAITING_METRIC, RUNNING_METRIC, *KV_USAGE_METRICS, CACHE_CONFIG_METRIC)) + r")(?=[{ ])"
)

log = structlog.get_logger()

T = TypeVar("T")


class _Version(msgspec.Struct):
    version: str


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: msgspec.Raw = msgspec.Raw(b"null")


_versions = msgspec.json.Decoder(_Version)
_lists = msgspec.json.Decoder(_List)
_models = msgspec.json.Decoder(_Model)
_lengths = msgspec.json.Decoder(int)


class EngineUnreachableError(Exception):
    """The engine does not answer as a serving engine should. `refused`: nothing listens on the port. `late`: no answer in
    time."""

    def __init__(self, reason: str, *, refused: bool = False, late: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused
        self.late = late


@dataclass(frozen=True, slots=True)
class FurtherNames:
    """Aliases of the model and adapters. `dropped`: listed names that are invalid or too many."""

    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ListedModels:
    """`model`: the base model. `max_model_len`: 0 if unknown."""

    model: str
    max_model_len: Tokens
    further_names: FurtherNames


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Zero or empty where unknown."""

    model: str
    max_model_len: Tokens
    version: str
    block_tokens: Tokens
    kv_capacity_tokens: Tokens
    further_names: FurtherNames = FurtherNames()
    completes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """`kv_usage`: 0 to 1. `further_names` None, `model` empty, `max_model_len` 0: unknown. `late`: why a page is missing."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    further_names: FurtherNames | None = None
    model: str = ""
    max_model_len: Tokens = 0
    late: str = ""


class HttpEngine:
    def __init__(
        self, url: str, *, api_key: str = "", dp_rank: int = ANY_RANK, seconds_max: Seconds = PROBE_SECONDS_MAX
    ) -> None:
        self._url = url.rstrip("/")
        self._seconds_max = seconds_max
        self._dp_rank = dp_rank
        self._headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._too_large: set[str] = set()
        self._numbers = EngineLoad()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._seconds_max)
        self._session = aiohttp.ClientSession(
            connector=EngineConnector(resolver=NameResolver()),
            headers=self._headers,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def describe(self) -> EngineFacts:
        """Raises EngineUnreachableError."""
        await self._get("/health", HEALTH_BYTES_MAX)
        listed = listed_models(await self._get("/v1/models", MODELS_BYTES_MAX))
        if listed is None:
            raise EngineUnreachableError(
                f"/v1/models lists no model with a name of at most {NAME_BYTES_MAX} printable bytes"
            )
        block_tokens, kv_capacity_tokens = cache_size(await self._metrics(), self._dp_rank)
        return EngineFacts(
            model=listed.model,
            max_model_len=listed.max_model_len,
            version=await self._version(),
            block_tokens=block_tokens,
            kv_capacity_tokens=kv_capacity_tokens,
            further_names=listed.further_names,
            completes=await self._has(COMPLETIONS_PATH) or not any([await self._has(path) for path in VECTOR_PATHS]),
        )

    async def load(self) -> EngineLoad:
        """Raises EngineUnreachableError. An engine that answers /health serves, though the other pages be late; the numbers of
        late metrics are those before."""
        await self._get("/health", HEALTH_BYTES_MAX)
        late, listed = "", None
        try:
            listed = listed_models(await self._get("/v1/models", MODELS_BYTES_MAX, refusal_is_fatal=False))
        except EngineUnreachableError as error:
            late = _reason_if_late(error)
        try:
            self._numbers = load_in(await self._metrics(), self._dp_rank)
        except EngineUnreachableError as error:
            late = _reason_if_late(error)
        load = replace(self._numbers, late=late)
        if listed is None:
            return load
        names = listed.further_names
        return replace(load, further_names=names, model=listed.model, max_model_len=listed.max_model_len)

    async def _metrics(self) -> str:
        return (await self._get("/metrics", METRICS_BYTES_MAX, refusal_is_fatal=False)).decode(errors="replace")

    async def _version(self) -> str:
        answer = _decoded(_versions, await self._get("/version", VERSION_BYTES_MAX, refusal_is_fatal=False))
        return answer.version[:VERSION_CHARACTERS_MAX] if answer is not None and answer.version.isprintable() else ""

    async def _has(self, path: str) -> bool:
        status, _ = await self._request(path, HEALTH_BYTES_MAX)
        return status == HTTPStatus.METHOD_NOT_ALLOWED

    async def _get(self, path: str, bytes_max: int, *, refusal_is_fatal: bool = True) -> bytes:
        """Returns the body of a 200; empty if it is too large or, without `refusal_is_fatal`, for another status."""
        status, body = await self._request(path, bytes_max)
        if status == HTTPStatus.OK:
            return body
        if refusal_is_fatal:
            raise EngineUnreachableError(f"{self._url}{path}: status {status}")
        return b""

    async def _request(self, path: str, bytes_max: int) -> tuple[int, bytes]:
        assert self._session is not None, "open it as a context first"
        where = self._url + path
        try:
            async with self._session.get(where, allow_redirects=False) as response:
                return response.status, await self._body(response, path, bytes_max)
        except aiohttp.ClientConnectorError as error:
            msg = f"{where}: {error.strerror or error}"
            refused = isinstance(error.os_error, ConnectionRefusedError)  # so for several addresses that all refuse
            raise EngineUnreachableError(msg, refused=refused) from error
        except aiohttp.InvalidURL as error:
            raise EngineUnreachableError(f"{self._url} is no URL like http://127.0.0.1:8000") from error
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, TimeoutError, OSError, ValueError) as error:
            msg = f"{where}: {str(error)[:REASON_CHARACTERS_MAX] or type(error).__name__}"
            raise EngineUnreachableError(msg, late=isinstance(error, TimeoutError)) from error

    async def _body(self, response: aiohttp.ClientResponse, path: str, bytes_max: int) -> bytes:
        if not bytes_max or response.status != HTTPStatus.OK:
            return b""
        body = await bounded_body(response, bytes_max)
        if body is None and path not in self._too_large:
            self._too_large.add(path)
            log.warning("engine_answer_too_large", path=path, bytes_max=bytes_max)
        return body or b""


def _reason_if_late(error: EngineUnreachableError) -> str:
    if not error.late:
        raise error
    return str(error)


def listed_models(body: bytes) -> ListedModels | None:
    """None without a base model that has a valid name."""
    listed = _decoded(_lists, body)
    if listed is None:
        return None
    found = [model for entry in listed.data[:LISTED_MAX] if (model := _decoded(_models, entry)) is not None]
    base = next((model for model in found if not model.parent), found[0] if found else None)
    if base is None or not _is_name(base.id):
        return None
    others = [model for model in found if model.id != base.id]
    aliases, adapters, seen, size = list[str](), list[str](), {base.id}, 0
    for model in others:
        if model.id in seen or not _is_name(model.id):
            continue
        size += len(model.id.encode())
        if len(seen) > NAMES_MAX or size > NAMES_BYTES_MAX:
            break
        seen.add(model.id)
        (adapters if model.parent else aliases).append(model.id)
    left_out = len(others) - len(aliases) - len(adapters) + len(listed.data[LISTED_MAX:])
    length = _decoded(_lengths, base.max_model_len) or 0
    names = FurtherNames(tuple(aliases), tuple(adapters), dropped=left_out)
    return ListedModels(base.id, length if 0 < length <= COUNT_MAX else 0, names)


def load_in(metrics: str, dp_rank: int = ANY_RANK) -> EngineLoad:
    """Load of one data-parallel rank, or of all: counts are summed, cache usage is the maximum."""
    waiting = running = usage = 0.0
    for name, _, value in _samples(metrics, dp_rank):
        if name == WAITING_METRIC:
            waiting += value
        elif name == RUNNING_METRIC:
            running += value
        elif name in KV_USAGE_METRICS and value <= 1:
            usage = max(usage, value)
    return EngineLoad(waiting=int(min(waiting, COUNT_MAX)), running=int(min(running, COUNT_MAX)), kv_usage=usage)


def cache_size(metrics: str, dp_rank: int = ANY_RANK) -> tuple[Tokens, Tokens]:
    """Block size and capacity of the KV cache in tokens; 0 if unknown."""
    block_tokens = capacity = 0
    for name, labels, _ in _samples(metrics, dp_rank):
        if name != CACHE_CONFIG_METRIC:
            continue
        values = dict(_LABEL.findall(labels))
        block_tokens = _number(values.get("block_size"), BLOCK_TOKENS_MAX)
        capacity += _number(values.get("kv_cache_size_tokens")) or block_tokens * _number(values.get("num_gpu_blocks"))
    return block_tokens, capacity if capacity <= CAPACITY_TOKENS_MAX else 0


def _samples(metrics: str, dp_rank: int) -> Iterator[tuple[str, str, float]]:
    own, page = f'engine="{dp_rank}"', f"\n{metrics}\n"
    for found in islice(_SAMPLE.finditer(page), SAMPLES_MAX):
        name, begin = found[1], found.end()
        end = page.find("\n", begin, begin + SAMPLE_CHARACTERS_MAX)
        labels, _, text = page[begin:end].rpartition(" ") if end >= 0 else ("", "", "")
        value = _value(text)
        if value is not None and (dp_rank == ANY_RANK or own in labels):
            yield name, labels, value


def _value(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _number(text: str | None, most: int = COUNT_MAX) -> int:
    if text is None or not text.isdecimal() or len(text) > len(str(most)):
        return 0
    return number if (number := int(text)) <= most else 0


def _is_name(text: str) -> bool:
    return bool(text) and text.isprintable() and len(text.encode()) <= NAME_BYTES_MAX


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T | None:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
