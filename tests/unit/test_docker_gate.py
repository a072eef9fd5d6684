"""deploy/compose/docker_gate.py: what the scaler may ask of Docker, against a daemon of ours on a Unix socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.support.deploy_scripts import deploy_script

OURS = "pointsman-default-scaled-1"
COMMAND = ["pointsman-engine-sim", "--model=m", "--kv='x'"]


class FakeDaemon:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.labels: dict[str, dict[str, str]] = {"postgres": {"com.docker.compose.project": "compose"}}

    async def answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.calls.append((request.method, request.path, json.loads(text) if text else None))
        if request.path == "/containers/json":
            return web.json_response([{"Id": name} for name in self.labels if name != "postgres"])
        if request.path == "/containers/create":
            self.labels[request.query["name"]] = self.calls[-1][2]["Labels"]
            return web.json_response({"Id": request.query["name"]}, status=201)
        if request.path == "/version":
            return web.json_response({"ApiVersion": "1.41"})
        name = request.path.split("/")[2]
        if name not in self.labels:
            return web.json_response({"message": "no such container"}, status=404)
        return web.json_response({"Id": name, "Config": {"Labels": self.labels[name]}})


@asynccontextmanager
async def gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[TestClient[Any, Any], FakeDaemon]]:
    for name, value in {
        "IMAGE": "pointsman", "NETWORK": "compose_engines", "ALIAS": "engine", "POOL": "default", "PROJECT": "compose",
        "CONTAINERS_MAX": "2", "COMMAND": """pointsman-engine-sim --model=m "--kv='x'\"""",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"GATE_{name}", value)
    module = deploy_script("compose/docker_gate.py")
    monkeypatch.setattr(module, "SOCKET", str(tmp_path / "docker.sock"))
    daemon = FakeDaemon()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", daemon.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "docker.sock")).start()
    try:
        async with TestClient(TestServer(await module.application())) as client:
            yield client, daemon
    finally:
        await runner.cleanup()


async def create(client: TestClient[Any, Any], name: str = OURS, **changed: Any) -> int:
    body = {"Image": "pointsman", "Cmd": COMMAND, **changed}
    async with client.post(f"/v1.41/containers/create?name={name}", json=body) as answer:
        return answer.status


async def test_an_engine_is_created_confined_whatever_else_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gate(tmp_path, monkeypatch) as (client, daemon):
        status = await create(
            client,
            HostConfig={"Privileged": True, "Binds": ["/:/host"], "CapAdd": ["SYS_ADMIN"], "PidMode": "host"},
            User="0:0",
            Env=["LD_PRELOAD=/x"],
            Labels={"com.docker.compose.service": "nats"},
        )
        async with client.post(f"/v1.41/containers/{OURS}/start") as answer:
            started = answer.status
    made = next(body for method, path, body in daemon.calls if path == "/containers/create")

    assert (status, started) == (201, 200)
    assert set(made) == {"Image", "Cmd", "Labels", "HostConfig", "NetworkingConfig"}
    assert not {"Privileged", "Binds", "CapAdd", "PidMode"} & set(made["HostConfig"])
    assert made["HostConfig"]["CapDrop"] == ["ALL"]
    assert made["HostConfig"]["ReadonlyRootfs"] is True
    assert made["NetworkingConfig"] == {"EndpointsConfig": {"compose_engines": {"Aliases": ["engine"]}}}
    assert made["Labels"]["com.docker.compose.service"] == "scaled-engine"


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "nats"},
        {"Image": "alpine"},
        {"Image": None},
        {"Cmd": "sh -c id"},
        {"Cmd": [1]},
        {"Cmd": ["sh", "-c", "id"]},
        {"Cmd": [*COMMAND, "--also"]},
        {"Cmd": None},
    ],
    ids=str,
)
async def test_nothing_but_an_engine_is_created(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gate(tmp_path, monkeypatch) as (client, daemon):
        status = await create(client, **changed)

    assert status == 403
    assert not [path for _, path, _ in daemon.calls if path.endswith("create")]


async def test_no_more_engines_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate(tmp_path, monkeypatch) as (client, _):
        statuses = [await create(client, f"pointsman-default-scaled-{number}") for number in (1, 2, 3)]

    assert statuses == [201, 201, 403]


async def test_requests_at_once_pass_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate(tmp_path, monkeypatch) as (client, _):
        names = [f"pointsman-default-scaled-{number}" for number in range(6)]
        statuses = await asyncio.gather(*(create(client, name) for name in names))

    assert sorted(statuses) == [201, 201, 403, 403, 403, 403]


async def test_a_body_that_nests_deeply_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        gate(tmp_path, monkeypatch) as (client, _),
        client.post(f"/containers/create?name={OURS}", data=b"[" * 60_000) as answer,
    ):
        assert answer.status == 400


async def test_a_large_body_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate(tmp_path, monkeypatch) as (client, daemon):
        status = await create(client, Env=["x" * 70_000])

    assert (status, daemon.calls) == (413, [])


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1.41/containers/postgres/json", 404),
        ("POST", "/v1.41/containers/postgres/stop", 404),
        ("DELETE", "/v1.41/containers/postgres", 404),
        ("POST", "/v1.41/containers/nobody/start", 404),
        ("POST", f"/v1.41/containers/{OURS}/exec", 404),
        ("POST", f"/v1.41/containers/{OURS}/update", 404),
        ("GET", f"/v1.41/containers/{OURS}/archive?path=/", 404),
        ("GET", "/v1.41/containers/..%2F..%2Fimages/json", 404),
        ("POST", "/v1.41/images/create?fromImage=x", 404),
        ("GET", "/v1.41/secrets", 404),
        ("POST", "/v1.41/containers/create", 400),
    ],
)
async def test_all_else_is_refused(
    method: str, path: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gate(tmp_path, monkeypatch) as (client, daemon):
        await create(client)
        daemon.calls.clear()
        async with client.request(method, path, data=b"no json" if path.endswith("create") else None) as answer:
            status = answer.status

    assert status == expected
    assert not [call for call in daemon.calls if call[0] != "GET"]


@pytest.mark.parametrize("label", ["pointsman.pool", "com.docker.compose.project", "com.docker.compose.service"])
async def test_a_container_that_differs_in_one_label_is_not_ours(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gate(tmp_path, monkeypatch) as (client, daemon):
        await create(client)
        daemon.labels["other"] = daemon.labels[OURS] | {label: "another"}
        async with client.delete("/containers/other") as answer:
            assert answer.status == 404

    assert ("DELETE", "/containers/other") not in [call[:2] for call in daemon.calls]


async def test_a_daemon_that_is_gone_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate(tmp_path, monkeypatch) as (client, _):
        (tmp_path / "docker.sock").unlink()
        async with client.get("/_ping") as answer:
            assert answer.status == 502


async def test_an_engine_of_the_pool_is_stopped_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate(tmp_path, monkeypatch) as (client, daemon):
        await create(client)
        async with (
            client.post(f"/containers/{OURS}/stop?t=500") as stopped,
            client.delete(f"/containers/{OURS}") as gone,
        ):
            assert (stopped.status, gone.status) == (200, 200)

    assert [path for method, path, _ in daemon.calls if method != "GET"][1:] == [
        f"/containers/{OURS}/stop",
        f"/containers/{OURS}",
    ]
