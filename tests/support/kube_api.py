"""An API server of Kubernetes, as far as lists, watches, scales and RBAC go, with its faults on demand.

What it answers was compared with a real kube-apiserver (tests/contract/test_kubernetes_api.py runs over both). It has no
controllers and no validation of objects."""

import asyncio
import base64
import copy
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.kube_requests import (
    Json,
    Kind,
    RefusedError,
    Request,
    allows,
    check_patch,
    discovery,
    event_line,
    kind_of,
    merged,
    parsed_request,
    scale_of,
    selected,
)

ADMIN_TOKEN = "admin"
FIRST_VERSION = 1000


@dataclass(frozen=True)
class Change:
    version: int
    kind: Kind
    before: Json | None
    after: Json | None


@dataclass
class Faults:
    """`refusals` and `hanging` are by verb (list, watch, patch, ...)."""

    refusals: dict[str, RefusedError] = field(default_factory=dict)
    hanging: set[str] = field(default_factory=set)
    garbage: bytes = b""
    """Sent instead of the next event."""
    cut_lines: bool = False
    """The next event breaks off in the middle of its line."""
    mute: bool = False
    """Watches say nothing: neither events nor bookmarks nor their end."""
    gone_as_status: bool = False

    async def hung(self, verb: str) -> None:
        while verb in self.hanging:  # noqa: ASYNC110 - tests change a plain set
            await asyncio.sleep(0.02)


class KubeApi:
    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self.forgotten = 0
        """Changes up to this version cannot be watched any more."""
        self.objects: dict[tuple[Kind, str, str], Json] = {}
        self.changes: list[Change] = []
        self.users: dict[str, str] = {}
        self.open_to_all = False
        """kubectl sends no token over plain HTTP."""
        self.faults = Faults()
        self.seen: list[Request] = []
        self.bookmark_seconds = 60.0
        self.watching = 0
        self._wake = asyncio.Event()
        self.url = ""
        self._port = 0
        self._runner: web.AppRunner | None = None

    def count(self, verb: str) -> int:
        return sum(request.verb == verb for request in self.seen)

    def forget(self) -> None:
        """What etcd's compaction does."""
        self.forgotten = self.version

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator["KubeApi", None]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        assert site._server is not None
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Connections break; the port stays its own for `start`."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    # Requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if known := discovery(request.path.strip("/")):
                return web.json_response(known)
            parsed = parsed_request(request)
            self.seen.append(parsed)
            user = self._user(request)
            self._authorize(user, parsed)
            if refusal := self.faults.refusals.get(parsed.verb):
                raise refusal
            await self.faults.hung(parsed.verb)
            if parsed.verb == "watch":
                return await self._watch(request, parsed)
            body = await request.json() if request.can_read_body else None
            code, answer = await self._answer(parsed, body, request.content_type)
            return web.json_response(answer, status=code)
        except RefusedError as refused:
            return web.json_response(refused.status, status=refused.code, headers=refused.headers)

    def _user(self, request: web.Request) -> str:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if token == ADMIN_TOKEN or (not token and self.open_to_all):
            return ADMIN_TOKEN
        if token not in self.users:
            raise RefusedError(401, "Unauthorized", "Unauthorized")
        return self.users[token]

    def _authorize(self, user: str, request: Request) -> None:
        if user == ADMIN_TOKEN:
            return
        resource = f"{request.kind.plural}/{request.part}" if request.part else request.kind.plural
        if any(allows(rule, request, resource) for rule in self._rules(user, request.namespace)):
            return
        what = f'cannot {request.verb} resource "{resource}" in API group "{request.kind.group}"'
        where = f' in the namespace "{request.namespace}"' if request.namespace else " at the cluster scope"
        named = f' "{request.name}"' if request.name else ""
        message = f'{request.kind.full_name}{named} is forbidden: User "{user}" {what}{where}'
        raise RefusedError(403, "Forbidden", message)

    def _rules(self, user: str, namespace: str) -> list[Json]:
        _, _, home, account = user.split(":")
        subject = {"kind": "ServiceAccount", "name": account, "namespace": home}
        rules: list[Json] = []
        for (kind, where, _), binding in self.objects.items():
            if kind.plural == "rolebindings" and where == namespace:
                subjects = [{key: of.get(key) for key in subject} for of in binding.get("subjects", [])]
                role = self.objects.get((kind_of("roles"), where, binding["roleRef"]["name"]))
                if subject in subjects and role:
                    rules += role["rules"]
        return rules

    async def _answer(self, request: Request, body: Any, content_type: str) -> tuple[int, Json]:
        key = (request.kind, request.namespace, request.name)
        match request.verb:
            case "list":
                return 200, self.list_objects(request)
            case "create" if request.part == "token":
                return 201, self._token(request)
            case "create":
                return 201, await self._create(request, body)
            case _:
                pass
        found = self.objects.get(key)
        if found is None:
            raise RefusedError(404, "NotFound", f'{request.kind.full_name} "{request.name}" not found')
        if request.part == "scale":
            if request.verb in ("patch", "update"):
                if request.verb == "patch":
                    check_patch(content_type)
                self._check_version(request, found, body)
                await self.write(key, {**found, "spec": {**found["spec"], "replicas": body["spec"]["replicas"]}})
            return 200, scale_of(self.objects[key])
        if request.part == "status":
            check_patch(content_type)
            return 200, await self.write(key, merged(found, {"status": body["status"]}))
        match request.verb:
            case "get":
                return 200, found
            case "patch":
                check_patch(content_type)
                self._check_version(request, found, body)
                return 200, await self.write(key, merged(found, body))
            case "update":
                self._check_version(request, found, body)
                return 200, await self.write(key, {**body, "metadata": {**found["metadata"], **body["metadata"]}})
            case "delete":
                await self.remove(key)
                return 200, found
            case _:
                raise RefusedError(
                    405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
                )

    def _check_version(self, request: Request, found: Json, body: Json) -> None:
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted and wanted != found["metadata"]["resourceVersion"]:
            modified = "the object has been modified; please apply your changes to the latest version and try again"
            message = f'Operation cannot be fulfilled on {request.kind.full_name} "{request.name}": {modified}'
            raise RefusedError(409, "Conflict", message)

    def list_objects(self, request: Request) -> Json:
        version, after = self.version, ""
        if token := request.query.get("continue"):
            version, after = json.loads(base64.b64decode(token))
            if version < self.forgotten:
                raise RefusedError(
                    410, "Expired", "The provided continue parameter is too old to display a consistent list result."
                )
        found = [
            (f"{namespace}/{name}", item)
            for (kind, namespace, name), item in sorted(self.objects.items(), key=lambda pair: pair[0][1:])
            if kind == request.kind and selected(request, item) and f"{namespace}/{name}" > after
        ]
        limit = int(request.query.get("limit") or 0) or len(found) + 1
        metadata: Json = {"resourceVersion": str(version)}
        if len(found) > limit:
            metadata["continue"] = base64.b64encode(json.dumps([version, found[limit - 1][0]]).encode()).decode()
            metadata["remainingItemCount"] = len(found) - limit
        items = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for _, item in found[:limit]]
        return {
            "kind": f"{request.kind.kind}List",
            "apiVersion": request.kind.api_version,
            "metadata": metadata,
            "items": items,
        }

    def _token(self, request: Request) -> Json:
        token = str(uuid.uuid4())
        self.users[token] = f"system:serviceaccount:{request.namespace}:{request.name}"
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {},
            "status": {"token": token},
        }

    # Writes

    async def _create(self, request: Request, body: Json) -> Json:
        name = body["metadata"]["name"]
        key = (request.kind, request.namespace, name)
        if key in self.objects:
            raise RefusedError(409, "AlreadyExists", f'{request.kind.full_name} "{name}" already exists')
        own = {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-11-22T00:00:00Z"}
        if request.namespace:
            own["namespace"] = request.namespace
        head = {"kind": request.kind.kind, "apiVersion": request.kind.api_version}
        return await self.write(key, {**head, **body, "metadata": {**body["metadata"], **own}})

    async def write(self, key: tuple[Kind, str, str], body: Json) -> Json:
        self.version += 1
        body = copy.deepcopy(body)
        body["metadata"]["resourceVersion"] = str(self.version)
        self.changes.append(Change(self.version, key[0], self.objects.get(key), body))
        self.objects[key] = body
        await self._notify()
        return body

    async def remove(self, key: tuple[Kind, str, str]) -> None:
        self.version += 1
        before = self.objects.pop(key)
        self.changes.append(Change(self.version, key[0], before, None))
        await self._notify()

    async def _notify(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()

    # Watches

    async def _watch(self, request: web.Request, parsed: Request) -> web.StreamResponse:
        asked = int(parsed.query.get("resourceVersion") or 0)
        if asked and asked < self.forgotten:
            gone = RefusedError(410, "Expired", f"too old resource version: {asked} ({self.forgotten})")
            if self.faults.gone_as_status:
                raise gone
        else:
            gone = None
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.watching += 1
        try:
            with suppress(ConnectionError):
                if gone:
                    await _send(response, "ERROR", gone.status)
                else:
                    await self._stream(request, response, parsed, asked)
        finally:
            self.watching -= 1
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, parsed: Request, asked: int) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + float(parsed.query.get("timeoutSeconds") or 1800)
        at = asked
        if not asked:
            at = self.version
            for (kind, _, _), item in list(self.objects.items()):
                if kind == parsed.kind and selected(parsed, item):
                    await _send(response, "ADDED", item)
        bookmark_at = loop.time() + self.bookmark_seconds
        while True:
            wake = self._wake
            for change in [change for change in self.changes if change.version > at]:
                if self.faults.mute:
                    break
                at = change.version
                await self._tell(request, response, parsed, change)
            now = loop.time()
            if not self.faults.mute and (now >= bookmark_at or now >= ends_at):
                bookmark_at = now + self.bookmark_seconds
                if parsed.query.get("allowWatchBookmarks") in ("true", "True", "1"):
                    at = self.version
                    head = {"kind": parsed.kind.kind, "apiVersion": parsed.kind.api_version}
                    body = {**head, "metadata": {"resourceVersion": str(at), "creationTimestamp": None}}
                    await _send(response, "BOOKMARK", body)
                if now >= ends_at:
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.02, min(ends_at, bookmark_at) - now)):
                    await wake.wait()

    async def _tell(self, request: web.Request, response: web.StreamResponse, parsed: Request, change: Change) -> None:
        if change.kind != parsed.kind:
            return
        was = change.before is not None and selected(parsed, change.before)
        is_now = change.after is not None and selected(parsed, change.after)
        if not (was or is_now):
            return
        event = "MODIFIED" if was and is_now else "ADDED" if is_now else "DELETED"
        body = change.after if is_now else change.before
        assert body is not None
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(change.version)}}
        if self.faults.garbage:
            garbage, self.faults.garbage = self.faults.garbage, b""
            await response.write(garbage)
        elif self.faults.cut_lines:
            self.faults.cut_lines = False
            await response.write(event_line(event, body)[:60])
            assert request.transport is not None
            request.transport.close()
            raise ConnectionResetError
        else:
            await _send(response, event, body)


async def _send(response: web.StreamResponse, event: str, body: Json) -> None:
    await response.write(event_line(event, body))
