"""A collection of Kubernetes objects, kept up to date by list and watch. In: pages of a list and lines of a watch, raw
JSON. Out: all objects after each change. It knows nothing of what the objects mean.

A list is a quorum read, so it never goes back in time. A watch resumes at the last version heard, bookmarks included.
Every refusal (410 Gone as a status or in the stream), a watch that said nothing and whatever cannot be read start over
with a list. While the API server is away nothing is given out."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
import structlog
from aiohttp.http import HttpProcessingError

from pointsman.adapters.backoff import Backoff, chance
from pointsman.adapters.clocks import loop_seconds
from pointsman.adapters.http_bodies import bounded_body
from pointsman.adapters.kubernetes_api import TEXT_SHOWN_MAX, Cluster, Status, message_of, reason_of
from pointsman.primitives import WallSeconds

log = structlog.get_logger()

CONNECT_WALL_SECONDS = 5.0
LIST_WALL_SECONDS = 30.0
LIST_BYTES_MAX = 64 * 2**20
REFUSAL_BYTES_MAX = 2**16
PAGE_LIMIT = 250
OBJECTS_MAX = 10_000
RETRY_AFTER_SECONDS_MAX = 120

Objects = Mapping[str, bytes]
"""JSON by name of the object."""

List = Callable[..., Awaitable[Any]]
"""A list operation of the client library, bound to namespace and selector."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Wall seconds. `watch`: how long the server is asked to keep a watch; half to all of it, so that processes do not
    return together. `grace`: a watch that is silent for so long after its end hangs. `well`: a watch that lasted this
    long is followed by the next without a wait."""

    watch: float = 60.0
    grace: float = 10.0
    open: float = 10.0
    well: float = 5.0
    first_retry: WallSeconds = WallSeconds(0.5)
    longest_retry: WallSeconds = WallSeconds(30.0)


class WatchError(Exception):
    """The API server refused, or said what cannot be used. `after`: it asked to wait that many seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class GoneError(WatchError):
    """The server has forgotten the version to resume at. Ordinary after an absence."""


class _Meta(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    proceed: str = msgspec.field(default="", name="continue")


class _Object(msgspec.Struct):
    metadata: _Meta


class _Page(msgspec.Struct):
    metadata: _Meta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class ListWatch:
    def __init__(
        self, cluster: Cluster, operation: Callable[[Any], List], pace: Pace, on_problem: Callable[[str], None]
    ) -> None:
        """`operation` makes the List of an ApiClient. `on_problem` hears why the server cannot be read, "" when it can."""
        self._cluster = cluster
        self._operation = operation
        self._pace = pace
        self._objects: dict[str, bytes] = {}
        self._version = ""
        """Empty: a list is needed."""
        self._problem = ""
        self._on_problem = on_problem

    async def states(self) -> AsyncGenerator[Objects, None]:
        """The objects after each list and each change. Endless; raises nothing that comes from the API server."""
        backoff = Backoff(self._pace.first_retry, self._pace.longest_retry)
        unusable: tuple[type[Exception], ...] = (
            WatchError,
            msgspec.MsgspecError,
            RecursionError,
            *self._cluster.errors,
        )
        while True:
            began, after = loop_seconds(), 0.0
            try:
                async with self._cluster.api() as api, aclosing(self._turn(self._operation(api))) as turn:
                    async for objects in turn:
                        yield objects
            except GoneError as error:
                self._version = ""
                log.info("watch_starts_over", reason=str(error))
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                self._tell(reason_of(error))  # the version may still be known when the server is back
            except unusable as error:
                self._version = ""
                self._tell(reason_of(error))
                after = error.after if isinstance(error, WatchError) else 0.0
            if loop_seconds() - began >= self._pace.well:
                backoff.reset()
            await asyncio.sleep(max(after, float(backoff.next_wait())))

    async def _turn(self, call: List) -> AsyncGenerator[Objects, None]:
        """A list if one is needed, then watches until one ends early or was silent."""
        if not self._version:
            await self._list(call)
            yield self._objects
        lasted = self._pace.well
        while self._version and lasted >= self._pace.well:
            began, heard = loop_seconds(), False
            async with aclosing(self._watch(call)) as events:
                async for changed in events:
                    heard = True
                    if changed:
                        yield self._objects
            lasted = loop_seconds() - began
            if not heard and lasted >= self._pace.well:
                self._version = ""

    async def _list(self, call: List) -> None:
        found: dict[str, bytes] = {}
        size, proceed = 0, ""
        while True:
            request = call(limit=PAGE_LIMIT, _continue=proceed or None, **_raw(LIST_WALL_SECONDS))
            async with self._opened(request) as answer:
                body = await _bounded(answer, LIST_BYTES_MAX - size)
            size += len(body)
            page = msgspec.json.decode(body, type=_Page)
            for item in page.items or []:
                found[_named(msgspec.json.decode(item, type=_Object).metadata)] = bytes(item)
            proceed = page.metadata.proceed
            if not proceed:
                break
        self._version, self._objects = _versioned(page.metadata), found
        self._tell("")

    async def _watch(self, call: List) -> AsyncGenerator[bool, None]:
        """Whether an event changed the objects. Ends when the server closes the watch; a last line that was cut comes
        again."""
        seconds = self._pace.watch * (0.5 + chance.random() / 2)
        request = call(
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=self._version,
            timeout_seconds=max(1, round(seconds)),
            **_raw(seconds + self._pace.grace),
        )
        async with self._opened(request) as answer:
            self._tell("")
            while (line := await _line(answer)).endswith(b"\n"):
                yield self._apply(msgspec.json.decode(line, type=_Event))

    def _apply(self, event: _Event) -> bool:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            raise _refusal(status.code or 0, f"{status.reason}: {status.message}")
        meta = msgspec.json.decode(event.object, type=_Object).metadata
        changed = event.type in ("ADDED", "MODIFIED", "DELETED")
        if event.type == "DELETED":
            self._objects.pop(_named(meta), None)
        elif changed:
            self._objects[_named(meta)] = bytes(event.object)
            if len(self._objects) > OBJECTS_MAX:
                raise WatchError(f"more than {OBJECTS_MAX} objects")
        self._version = _versioned(meta)
        return changed

    @asynccontextmanager
    async def _opened(self, request: Awaitable[aiohttp.ClientResponse]) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        async with asyncio.timeout(self._pace.open):
            answer = await request
        async with answer:
            if answer.status != HTTPStatus.OK:
                message = message_of(await _bounded(answer, REFUSAL_BYTES_MAX)) or answer.reason or ""
                raise _refusal(answer.status, message, answer.headers.get("Retry-After", ""))
            yield answer

    def _tell(self, problem: str) -> None:
        problem = problem[:TEXT_SHOWN_MAX]
        if bool(problem) != bool(self._problem):
            log.warning("cluster_trouble", reason=problem) if problem else log.info("cluster_answers_again")
        self._problem = problem
        self._on_problem(problem)


def _raw(seconds: float) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_WALL_SECONDS)
    return {"_preload_content": False, "_request_timeout": timeout}


def _named(meta: _Meta) -> str:
    if not meta.name:
        raise WatchError("an object has no name")
    return meta.name


def _versioned(meta: _Meta) -> str:
    if not meta.resource_version:
        raise WatchError("a list or an event has no resource version")
    return meta.resource_version


def _refusal(code: int, reason: str, after: str = "") -> WatchError:
    if code == HTTPStatus.GONE:
        return GoneError(reason[:TEXT_SHOWN_MAX])
    waits = after.isascii() and after.isdecimal() and len(after) < 10
    return WatchError(f"{code} {reason}"[:TEXT_SHOWN_MAX], min(int(after), RETRY_AFTER_SECONDS_MAX) if waits else 0.0)


async def _line(answer: aiohttp.ClientResponse) -> bytes:
    try:
        return await answer.content.readline()  # bounded by the library's buffer
    except (HttpProcessingError, ValueError) as error:
        raise WatchError("a line of the watch is too long") from error


async def _bounded(answer: aiohttp.ClientResponse, size_max: int) -> bytes:
    body = await bounded_body(answer, size_max)
    if body is None:
        raise WatchError(f"an answer is larger than {size_max} bytes")
    return body
