"""`pointsman-worker --discover` as an operator runs it: a process apart from its engines, over a real nats-server."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import test_utils, web

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft, InstanceReported
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import Link, LogEntry
from pointsman.primitives import InstanceId
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.state.state import PoolSettings, State
from pointsman_cli.up.scripts import console_script
from pointsman_engine_sim.server import EngineServer
from pointsman_worker.settings import WorkerSettings
from tests.support.engine_sim import running_engine
from tests.support.nats import running_nats
from tests.support.waiting import eventually

NAMES = ("gpu-1", "gpu-2", "gpu-3")
BLOCK = 16


@dataclass
class Deployment:
    """Engines, a log, and what a scheduler would know from it."""

    link: Link
    nats: str
    directory: Path
    engines: dict[str, EngineServer] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    state: State = field(default_factory=lambda: State(PoolSettings(block_tokens=BLOCK)))

    async def follow(self) -> None:
        async for entry in self.link.log.read(1):
            assert isinstance(entry, LogEntry)
            assert entry.event is not None
            self.events.append(entry.event)
            self.state.apply(entry.event, entry.sequence)

    def tell(self, *names: str) -> None:
        tables = [
            f'[[engine]]\nname = "{name}"\nurl = "{engine.url}"\nkv_endpoint = "{engine.events_endpoint}"\n'
            f'kv_replay_endpoint = "{engine.replay_endpoint}"\n'
            for name, engine in self.engines.items()
            if name in names
        ]
        (self.directory / "engines.toml").write_text("".join(tables) or "engine = []\n")

    def of(self, kind: type[Any], name: str) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.instance == name]

    def held(self, name: str) -> int:
        return self.state.index.blocks(InstanceId(name)) if self.state.fleet.get(InstanceId(name)) else 0

    def knows_more_than(self, blocks: int) -> bool:
        """Of each engine, and as its worker reports it."""
        newest = {name: self.of(InstanceReported, name)[-1:] for name in NAMES}
        return all(
            self.held(name) > blocks
            and any(report.serving and report.blocks == self.held(name) for report in newest[name])
            for name in NAMES
        )

    def joins(self) -> list[int]:
        return [len(self.of(InstanceJoined, name)) for name in NAMES]


@asynccontextmanager
async def deployment(directory: Path) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(running_nats(directory))
        settings = WorkerSettings(nats=url)
        user = BusUser(BusRole.SCHEDULER)
        link = await stack.enter_async_context(
            open_link(settings, ScaledClock(), HealthBoard(), name="test", user=user)
        )
        await eventually(lambda: link.commands.connected)
        made = Deployment(link, url, directory)
        for name in NAMES:
            made.engines[name] = await stack.enter_async_context(running_engine(block_size=BLOCK))
        made.tell(*NAMES)
        following = asyncio.create_task(made.follow())
        yield made
        following.cancel()


@dataclass
class RunningWorker:
    process: subprocess.Popen[bytes]
    url: str

    async def ready(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/readyz") as answer:
            found: dict[str, Any] = await answer.json()
            return found | {"status": answer.status}

    async def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        await asyncio.to_thread(self.process.wait, 20)


@asynccontextmanager
async def worker(made: Deployment) -> AsyncIterator[RunningWorker]:
    (port,) = free_ports(1)
    arguments = ["--nats", made.nats, "--port", str(port), "--block-tokens", str(BLOCK)]
    arguments += [
        "--discover",
        f"file:{made.directory / 'engines.toml'}",
        "--state-directory",
        str(made.directory / "w"),
    ]
    with (made.directory / "worker.log").open("ab") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - it is not waited for
            [str(console_script("pointsman-worker")), *arguments], stdout=output, stderr=output, env=os.environ
        )
    running = RunningWorker(process, f"http://127.0.0.1:{port}")
    try:
        await eventually(lambda: _answers(running), seconds=60, what="the worker answering")
        yield running
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def _answers(running: RunningWorker) -> bool:
    assert running.process.poll() is None, "the worker ended"
    try:
        found = await running.ready()
    except aiohttp.ClientError:
        return False
    return bool(found["ready"])


async def complete(engine: EngineServer, *prompts: str) -> None:
    async with aiohttp.ClientSession() as session:
        for prompt in prompts:
            body = {"prompt": prompt * 40, "max_tokens": 1}
            async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()


async def test_a_worker_apart_from_its_engines_is_killed_stopped_and_told_of_other_engines(tmp_path: Path) -> None:
    async with deployment(tmp_path) as made:
        for name, engine in made.engines.items():
            await complete(engine, name)
        async with worker(made) as first:
            await eventually(lambda: made.knows_more_than(0), what="all engines followed")
            await first.end(signal.SIGKILL)
        blocks = max(map(made.held, NAMES))
        for name, engine in made.engines.items():
            await complete(engine, f"{name} while nobody looked")

        async with worker(made) as second:
            await eventually(lambda: made.knows_more_than(blocks), what="missed events read")
            caches, joins = [made.of(InstanceJoined, name)[-1].cache for name in NAMES], made.joins()
            await second.end(signal.SIGTERM)
        left_at_stop = [made.of(InstanceLeft, name) for name in NAMES]
        blocks = max(map(made.held, NAMES))
        for engine in made.engines.values():
            await complete(engine, "during the upgrade")

        async with worker(made) as third:
            await eventually(lambda: made.knows_more_than(blocks), what="the session resumed")
            joins_resumed = made.joins()

            (tmp_path / "engines.toml").write_text("[[engine]\nurl =")
            await eventually(lambda: _lacks(third, "engines.toml"), what="the broken file noticed")
            broken = await third.ready()
            made.tell("gpu-1", "gpu-2")
            await eventually(lambda: not made.of(InstanceReported, "gpu-3")[-1].serving, what="one engine withdrawn")
            serving = [made.of(InstanceReported, name)[-1].serving for name in NAMES]
            await eventually(lambda: _restored(third, "engines.toml"), what="health restored")

    assert caches == ["empty"] * 3
    assert left_at_stop == [[]] * 3
    assert joins == [2] * 3
    assert joins_resumed == joins
    assert broken["status"] == 200
    assert any("not TOML" in why for why in broken["degraded"].values())
    assert serving == [True, True, False]


async def _restored(running: RunningWorker, part: str) -> bool:
    return not await _lacks(running, part)


async def _lacks(running: RunningWorker, part: str) -> bool:
    return any(part in name for name in (await running.ready())["degraded"])


async def test_engines_with_different_keys_are_each_asked_with_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_ENGINE_API_KEY", "gpu-1=first,gpu-*=second")
    shown: dict[str, set[str]] = {name: set() for name in NAMES[:2]}
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(deployment(tmp_path))
        tables = ""
        for name in shown:
            server = test_utils.TestServer(_keeping(shown[name]))
            await stack.enter_async_context(server)
            tables += f'[[engine]]\nname = "{name}"\nurl = "http://127.0.0.1:{server.port}"\n'
        (tmp_path / "engines.toml").write_text(tables)
        async with worker(made):
            await eventually(lambda: all(shown.values()))

    assert shown == {"gpu-1": {"Bearer first"}, "gpu-2": {"Bearer second"}}
    assert "first" not in (tmp_path / "worker.log").read_text()


def _keeping(shown: set[str]) -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        shown.add(request.headers.get("authorization", ""))
        raise web.HTTPUnauthorized

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app
