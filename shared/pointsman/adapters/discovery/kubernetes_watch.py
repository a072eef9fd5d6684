"""A collection of Kubernetes objects, kept up to date by list and watch. In: pages of a list and lines of a watch, raw
JSON. Out: all objects after each change. It knows nothing of what the objects mean.

A list is a quorum read, so it never goes back in time. A watch resumes at the last version seen, bookmarks included;
410 Gone, as a status or in the stream, and anything that cannot be read start over with a list. While the API server is
away nothing is given out."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
import structlog

from pointsman.adapters.backoff import Backoff, chance
from pointsman.adapters.kubernetes_api import Cluster, reason_of
from pointsman.primitives import WallSeconds

log = structlog.get_logger()

CONNECT_WALL_SECONDS = 5.0
LIST_WALL_SECONDS = 30.0
LIST_BYTES_MAX = 64 * 2**20
PAGE_LIMIT = 250
WATCH_WALL_SECONDS = 60.0
"""How long the server is asked to keep a watch; half to all of it, so that processes do not return together."""
WATCH_GRACE_SECONDS = 10.0
"""A watch that is silent for this long after its end hangs."""
OPEN_WALL_SECONDS = 10.0
FIRST_RETRY_SECONDS = WallSeconds(0.5)
LONGEST_RETRY_SECONDS = WallSeconds(30.0)
RETRY_AFTER_SECONDS_MAX = 120.0
RUNS_WELL_SECONDS = 5.0
"""A watch that lasted this long may return without a wait."""

NAME_LENGTH_MAX = 253


class WatchError(Exception):
    """The API server refused, or said what cannot be read. `after`: it asked to wait that many seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class GoneError(WatchError):
    """The version to continue from is forgotten."""


class _Meta(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    proceed: str | None = msgspec.field(default=None, name="continue")


class _Object(msgspec.Struct):
    metadata: _Meta


class _Page(msgspec.Struct):
    metadata: _Meta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int | None = None
    reason: str | None = None
    message: str | None = None


Objects = Mapping[str, bytes]
"""JSON by name of the object."""


class ListWatch:
    """`call`: names the list operation of an ApiClient, bound to namespace and selector. Its requests are raw."""

    def __init__(
        self,
        cluster: Cluster,
        call: Callable[[Any], Callable[..., Awaitable[Any]]],
        sleep: Callable[[WallSeconds], Awaitable[None]],
        now: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._call = call
        self._sleep = sleep
        self._now = now
        self._objects: dict[str, bytes] = {}
        self._version = ""
        self.problem = ""

    async def states(self) -> AsyncGenerator[Objects, None]:
        """The objects after each list and each change. Endless; raises nothing that comes from the API server."""
        backoff = Backoff(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS)
        while True:
            began, after = self._now(), 0.0
            try:
                async with self._cluster.api() as api, aclosing(self._session(self._call(api))) as session:
                    async for objects in session:
                        yield objects
            except GoneError:
                self._version = ""
                log.info("watch_starts_over")
            except (WatchError, msgspec.MsgspecError, *self._cluster.errors) as error:
                self._troubled(reason_of(error))
                after = getattr(error, "after", 0.0)
            if self._now() - began >= RUNS_WELL_SECONDS:
                backoff.reset()
            await self._sleep(WallSeconds(max(after, float(backoff.next_wait()))))

    async def _session(self, call: Callable[..., Awaitable[Any]]) -> AsyncIterator[Objects]:
        """One list if it is needed, then watches until one ends early."""
        if not self._version:
            await self._list(call)
            yield self._objects
        while True:
            began = self._now()
            async with aclosing(self._watch(call)) as changes:
                async for _ in changes:
                    yield self._objects
            if self._now() - began < RUNS_WELL_SECONDS:
                return

    async def _list(self, call: Callable[..., Awaitable[Any]]) -> None:
        found: dict[str, bytes] = {}
        size, proceed, version = 0, "", ""
        timeout = aiohttp.ClientTimeout(total=LIST_WALL_SECONDS, sock_connect=CONNECT_WALL_SECONDS)
        while True:
            more = {"_continue": proceed} if proceed else {}
            async with self._opened(call(limit=PAGE_LIMIT, _preload_content=False, _request_timeout=timeout, **more)) as answer:
                body = await _bounded(answer, LIST_BYTES_MAX - size)
            size += len(body)
            page = msgspec.json.decode(body, type=_Page)
            for item in page.items or []:
                found[_named(msgspec.json.decode(item, type=_Object).metadata)] = bytes(item)
            version = page.metadata.resource_version
            proceed = page.metadata.proceed or ""
            if not proceed:
                break
        if not version:
            msg = "the list has no resource version"
            raise WatchError(msg)
        self._objects, self._version = found, version
        self._well()

    async def _watch(self, call: Callable[..., Awaitable[Any]]) -> AsyncIterator[None]:
        """Ends when the server closes the watch. A last line without its end was cut, and comes again."""
        seconds = WATCH_WALL_SECONDS * (0.5 + chance.random() / 2)
        timeout = aiohttp.ClientTimeout(total=seconds + WATCH_GRACE_SECONDS, sock_connect=CONNECT_WALL_SECONDS)
        request = call(
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=self._version,
            timeout_seconds=max(1, round(seconds)),
            _preload_content=False,
            _request_timeout=timeout,
        )
        async with self._opened(request) as answer:
            self._well()
            while (line := await answer.content.readline()).endswith(b"\n"):
                if line.strip() and self._apply(msgspec.json.decode(line, type=_Event)):
                    yield

    def _apply(self, event: _Event) -> bool:
        """Whether the objects changed. Raises WatchError, GoneError."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise _refusal(status.code or 0, f"{status.reason}: {status.message}")
        meta = msgspec.json.decode(event.object, type=_Object).metadata
        if not meta.resource_version:
            msg = f"an event {event.type[:20]!r} has no resource version"
            raise WatchError(msg)
        changed = event.type in ("ADDED", "MODIFIED", "DELETED")
        if event.type == "DELETED":
            self._objects.pop(_named(meta), None)
        elif changed:
            self._objects[_named(meta)] = bytes(event.object)
        self._version = meta.resource_version
        return changed

    @asynccontextmanager
    async def _opened(self, request: Awaitable[Any]) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        import asyncio

        async with asyncio.timeout(OPEN_WALL_SECONDS):
            answer: aiohttp.ClientResponse = await request
        async with answer:
            if answer.status != HTTPStatus.OK:
                body = await _bounded(answer, 2**16)
                raise _refusal(answer.status, _message(body) or answer.reason or "", answer.headers.get("Retry-After", ""))
            yield answer

    def _troubled(self, reason: str) -> None:
        if reason != self.problem:
            log.warning("cluster_trouble", reason=reason)
        self.problem = reason

    def _well(self) -> None:
        if self.problem:
            log.info("cluster_answers_again")
        self.problem = ""


def _named(meta: _Meta) -> str:
    if not 1 <= len(meta.name) <= NAME_LENGTH_MAX:
        msg = "an object has no name"
        raise WatchError(msg)
    return meta.name


def _refusal(code: int, reason: str, after: str = "") -> WatchError:
    if code == HTTPStatus.GONE:
        return GoneError(reason)
    seconds = min(float(after), RETRY_AFTER_SECONDS_MAX) if after.isascii() and after.isdecimal() else 0.0
    return WatchError(f"{code} {reason}"[:500], seconds)


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Status).message or ""
    except msgspec.MsgspecError:
        return ""


async def _bounded(answer: aiohttp.ClientResponse, size_max: int) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > size_max:
            msg = f"an answer is larger than {LIST_BYTES_MAX} bytes"
            raise WatchError(msg)
    return bytes(body)
