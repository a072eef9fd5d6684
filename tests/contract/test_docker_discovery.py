"""Engines from Docker's labels, against a server that answers as Docker 20.10 did; a real one: tests/containers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

pytest.importorskip("docker", reason="Docker's client is not installed")

from pointsman.adapters.discovery.docker import DockerDiscovery, engines_of
from pointsman.ports import EngineTarget
from pointsman.primitives import WallSeconds
from tests.support.discovered import Discovered, discovered
from tests.support.waiting import eventually

STARTED = "2026-11-22T07:00:00.5Z"


class FakeDocker:
    def __init__(self) -> None:
        self.containers: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}
        """Instead of the true answer, by what was asked."""
        self.silent = False
        """Changes make no events."""
        self._listening: list[web.StreamResponse] = []
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None
        self._listening.clear()

    async def put(self, container: dict[str, Any]) -> None:
        self.containers[container["Id"]] = container
        await self._tell()

    async def remove(self, identity: str) -> None:
        del self.containers[identity]
        await self._tell()

    async def _tell(self) -> None:
        for response in [] if self.silent else self._listening:
            await response.write(b'{"Type":"container","Action":"start"}\n')

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        what = parts[-1] if parts[-1] == "version" else parts[1]
        if what in self.answers:
            return web.Response(text=self.answers[what], content_type="application/json")
        if what == "version":
            return web.json_response({"ApiVersion": "1.41", "MinAPIVersion": "1.12", "Version": "20.10.24"})
        if what == "events":
            self.asked.append(json.loads(request.query["filters"]))
            response = web.StreamResponse()
            await response.prepare(request)
            self._listening.append(response)
            await asyncio.sleep(3600)
            return response
        if parts[2] == "json":
            return web.json_response([{"Id": identity} for identity in self.containers])
        found = self.containers.get(parts[2])
        return web.json_response(found or {"message": "No such container"}, status=200 if found else 404)


def container(
    name: str, *, identity: str = "", started: str = STARTED, status: str = "running", health: str = "",
    labels: dict[str, str] | None = None, networks: dict[str, str] | None = None, exposed: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    addresses = {"fleet": "172.18.0.2"} if networks is None else networks
    state = {"Status": status, "StartedAt": started, **({"Health": {"Status": health}} if health else {})}
    return {
        "Id": identity or f"id-of-{name}",
        "Name": f"/{name}",
        "State": state,
        "Config": {
            "Labels": {"pointsman.io/port": "8000"} if labels is None else labels,
            "ExposedPorts": {port: {} for port in exposed} or None,
        },
        "NetworkSettings": {"Networks": {network: {"IPAddress": address} for network, address in addresses.items()}},
    }


@pytest_asyncio.fixture
async def docker() -> AsyncGenerator[FakeDocker, None]:
    fake = FakeDocker()
    await fake.start()
    yield fake
    await fake.stop()


def following(docker: FakeDocker, poll_seconds: float = 0.1) -> AbstractAsyncContextManager[Discovered]:
    url = f"tcp://127.0.0.1:{docker.port}"
    return discovered(DockerDiscovery("role=engine", url=url, poll_seconds=WallSeconds(poll_seconds)))


async def test_containers_come_change_their_health_are_replaced_and_go(docker: FakeDocker) -> None:
    """By events alone: nothing is polled within the test."""
    await docker.put(
        container("engine-1", health="starting", labels={"pointsman.io/port": "8000", "pointsman.io/kv-port": "5557"})
    )
    async with following(docker, poll_seconds=3600) as engines:
        await engines.until("engine-1")
        starting = engines["engine-1"]
        await eventually(lambda: bool(docker.asked))
        await docker.put(container("engine-1", health="healthy"))
        await eventually(lambda: engines["engine-1"].ready)
        await docker.put(container("engine-2"))
        await engines.until("engine-1", "engine-2")
        await docker.put(container("engine-1", started="2026-11-22T08:00:00Z"))
        await eventually(lambda: engines["engine-1"].identity != starting.identity)
        await docker.put(container("engine-2", status="exited"))
        await engines.until("engine-1")
        await docker.remove("id-of-engine-1")
        await engines.until()

    assert starting == EngineTarget(
        instance=starting.instance, url="http://engine-1:8000", kv_endpoint="tcp://engine-1:5557",
        identity=f"id-of-engine-1@{STARTED}", ready=False,
    )  # fmt: skip
    assert docker.asked[0]["label"] == ["role=engine"]


async def test_what_no_event_told_is_found_by_asking(docker: FakeDocker) -> None:
    docker.silent = True
    async with following(docker) as engines:
        await engines.until()
        await docker.put(container("engine-1"))
        await engines.until("engine-1")


async def test_a_daemon_that_failed_to_answer_is_asked_for_events_anew(docker: FakeDocker) -> None:
    """Its connection may have been lost without a word, and the former stream be silent for ever."""
    async with following(docker) as engines:
        await eventually(lambda: len(docker.asked) == 1)
        docker.answers = {"containers": "not JSON"}
        await eventually(lambda: bool(engines.discovery.problem))
        docker.answers = {}
        await eventually(lambda: len(docker.asked) == 2)


async def test_while_the_daemon_is_away_or_absurd_the_last_list_stays(docker: FakeDocker) -> None:
    await docker.put(container("engine-1"))
    async with following(docker) as engines:
        await engines.until("engine-1")
        for absurd in ("not JSON", "{}", "[7]", '[{"Id": 7}]', "[" * 100_000):
            docker.answers = {"containers": absurd}
            await eventually(lambda: bool(engines.discovery.problem), what=absurd[:20])
            docker.answers = {}
            await eventually(lambda: not engines.discovery.problem)
        await docker.stop()
        await eventually(lambda: "does not answer" in engines.discovery.problem)
        lists = len(engines.lists)
        await docker.start()
        await docker.put(container("engine-2"))
        await engines.until("engine-1", "engine-2")

    assert lists == 1
    assert engines.discovery.problem == ""


def test_addresses_and_ports() -> None:
    found, problem = engines_of([
        container("named", networks={"bridge": "172.17.0.2", "own": "172.18.0.2"}),
        container("bridged", networks={"bridge": "172.17.0.3"}),
        container("exposing", labels={}, exposed=("8100/tcp", "53/udp")),
        container("host", networks={"host": ""}),
        container("paused", status="paused"),
        container("ranks", labels={"pointsman.io/port": "8000", "pointsman.io/data-parallel-size": "2"}),
        {"Id": 7},
    ])  # fmt: skip

    assert {target.instance: target.url for target in found} == {
        "named": "http://named:8000",
        "bridged": "http://172.17.0.3:8000",
        "exposing": "http://exposing:8100",
        "paused": "http://paused:8000",
        "ranks-rank-0": "http://ranks:8000",
        "ranks-rank-1": "http://ranks:8000",
    }
    assert [target.instance for target in found if not target.ready] == ["paused"]
    assert "host has no network" in problem
    assert "1 more" in problem


@pytest.mark.parametrize("text", ["=x", "a\nb", "x" * 2000])
def test_a_malformed_label_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="LABEL"):
        DockerDiscovery(text)


def test_a_container_that_cannot_be_reached_as_described_any_more_stays_as_it_was_known_until_it_restarts() -> None:
    first, _ = engines_of([container("a"), container("b")])
    apart = container("a", networks={"none": ""})
    kept, problem = engines_of([apart, container("b")], first)
    apart["State"]["StartedAt"] = "2030-01-01T00:00:00Z"
    restarted, _ = engines_of([apart, container("b")], kept)

    assert kept == first
    assert "a has no network of its own" in problem
    assert [target.instance for target in restarted] == ["b"]
