"""The part of Docker's API that the scaler needs, and no more: who may create containers freely is root on the host. It lets
through what concerns containers of one pool, and creates them of one image with one command, unprivileged, on one network,
without mounts.

Runs as root without capabilities, which opens the socket whatever its group, on a network with the scaler alone."""

import asyncio
import json
import os
import shlex
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web

SOCKET = "/var/run/docker.sock"
PORT = 2375
BODY_BYTES_MAX = 64 * 1024
CALL_SECONDS_MAX = 60
CONTAINERS_MAX = int(os.environ["GATE_CONTAINERS_MAX"])
IMAGE, NETWORK, ALIAS = os.environ["GATE_IMAGE"], os.environ["GATE_NETWORK"], os.environ["GATE_ALIAS"]
COMMAND = shlex.split(os.environ["GATE_COMMAND"])
"""It may contain {instance}. Another one would be code of whoever asks, among the engines that get prompts."""
POOL, PROJECT = os.environ["GATE_POOL"], os.environ["GATE_PROJECT"]
LABELS = {
    "pointsman.pool": POOL,
    "pointsman.part": "engine",
    # `docker compose down --remove-orphans` finds them.
    "com.docker.compose.project": PROJECT,
    "com.docker.compose.service": "scaled-engine",
    "com.docker.compose.config-hash": "docker-gate",
    "com.docker.compose.container-number": "1",
    "com.docker.compose.oneoff": "False",
}
OURS = json.dumps({"label": [f"pointsman.pool={POOL}", f"com.docker.compose.project={PROJECT}"]})
HOST_CONFIG = {
    "NetworkMode": NETWORK,
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "SecurityOpt": ["no-new-privileges:true"],
    "Tmpfs": {"/tmp": "size=64m"},
    "Memory": 1024**3,
    "PidsLimit": 512,
    "Init": True,
    "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "5"}},
}


class Gate:
    def __init__(self, docker: ClientSession) -> None:
        self._docker = docker
        self._creating = asyncio.Lock()

    async def version(self, request: web.Request) -> web.Response:
        return await self._forward("GET", request.path)

    async def containers(self, _request: web.Request) -> web.Response:
        return await self._forward("GET", "/containers/json", {"all": "1", "filters": OURS})

    async def create(self, request: web.Request) -> web.Response:
        name = request.query.get("name", "")
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        command = body.get("Cmd") if isinstance(body, dict) else None
        if not name.startswith(f"pointsman-{POOL}-") or not isinstance(body, dict) or body.get("Image") != IMAGE:
            raise web.HTTPForbidden(text=f"only {IMAGE} as pointsman-{POOL}-*")
        if command != [word.replace("{instance}", name) for word in COMMAND]:
            raise web.HTTPForbidden(text="only the command of GATE_COMMAND")
        made = {
            "Image": IMAGE,
            "Cmd": command,
            "Labels": LABELS,
            "HostConfig": HOST_CONFIG,
            "NetworkingConfig": {"EndpointsConfig": {NETWORK: {"Aliases": [ALIAS]}}},
        }
        async with self._creating:  # so that requests at once do not pass the same count
            there = await self._asked("GET", "/containers/json", {"all": "1", "filters": OURS})
            if len(there) >= CONTAINERS_MAX:
                raise web.HTTPForbidden(text=f"there are {CONTAINERS_MAX} containers already")
            return await self._forward("POST", "/containers/create", {"name": name}, made)

    async def container(self, request: web.Request) -> web.Response:
        """Looks at, starts, stops or removes one of ours."""
        name, verb = request.match_info["name"], request.match_info.get("verb", "")
        found = await self._asked("GET", f"/containers/{name}/json")
        labels = found.get("Config", {}).get("Labels") or {}
        if any(labels.get(key) != value for key, value in LABELS.items()):
            raise web.HTTPNotFound(text=json.dumps({"message": f"no container {name} of this pool"}))
        if verb == "json":
            return await self._forward("GET", f"/containers/{found['Id']}/json")
        if request.method == "DELETE":
            return await self._forward("DELETE", f"/containers/{found['Id']}", {"force": "1"})
        return await self._forward("POST", f"/containers/{found['Id']}/{verb}", {"t": "5"} if verb == "stop" else {})

    async def _asked(self, method: str, path: str, query: dict[str, str] | None = None) -> Any:
        """Raises HTTPNotFound for what Docker does not know."""
        answer = await self._forward(method, path, query)
        if answer.status != web.HTTPOk.status_code:
            raise web.HTTPNotFound(text=answer.text)
        return json.loads(answer.text or "null")

    async def _forward(
        self, method: str, path: str, query: dict[str, str] | None = None, body: Any = None
    ) -> web.Response:
        try:
            async with self._docker.request(method, f"http://docker{path}", params=query, json=body) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        except (ClientError, TimeoutError) as error:
            raise web.HTTPBadGateway(text=f"Docker does not answer: {error}") from error


async def application() -> web.Application:
    session = ClientSession(connector=UnixConnector(SOCKET), timeout=ClientTimeout(total=CALL_SECONDS_MAX))
    gate = Gate(session)
    app = web.Application(client_max_size=BODY_BYTES_MAX)

    async def closed(_app: web.Application) -> None:
        await session.close()

    app.on_cleanup.append(closed)
    for prefix in ("", r"/v{version:1\.\d+}"):
        name = prefix + r"/containers/{name:[A-Za-z0-9][A-Za-z0-9_.-]{0,127}}"
        app.add_routes(
            [
                web.get(prefix + "/_ping", gate.version),
                web.get(prefix + "/version", gate.version),
                web.get(prefix + "/containers/json", gate.containers),
                web.post(prefix + "/containers/create", gate.create),
                web.get(name + "/{verb:json}", gate.container),
                web.post(name + "/{verb:start|stop}", gate.container),
                web.delete(name, gate.container),
            ]
        )
    return app


if __name__ == "__main__":
    web.run_app(application(), port=PORT, access_log=None)
