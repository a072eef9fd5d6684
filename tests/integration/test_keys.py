"""API keys, whole: `pointsman keys` against a leading scheduler over a real nats-server, and two ingresses that follow."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
import pytest
from click.testing import CliRunner

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.access import ApiKey, ApiKeyChanged, KeyAction
from pointsman.contracts.permissions import ACCESS_BUCKET
from pointsman.ports import Link
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.embedded_nats import EmbeddedNats, start_nats
from pointsman.runtime.settings import FleetSettings
from pointsman.simulation.replay import verify
from pointsman_cli import keys as keys_command
from pointsman_cli.main import main as pointsman
from tests.support.events import joined
from tests.support.log_reading import events_in, whole_log
from tests.support.services import running_ingress, running_scheduler
from tests.support.waiting import eventually

POOL = PoolName("default")
EFFECTIVE_SECONDS = 5.0
GRACE_SECONDS = 6.0


@dataclass
class Fleet:
    nats: EmbeddedNats
    ingresses: list[str]
    link: Link
    http: aiohttp.ClientSession
    directory: Path

    async def keys(self, *arguments: str, fails: bool = False) -> str:
        """The command as an operator gives it; what it prints."""
        ran = await asyncio.to_thread(
            CliRunner().invoke, pointsman, ["keys", *arguments, "--from", self.nats.url], catch_exceptions=False
        )
        assert (ran.exit_code != 0) == fails, ran.output
        return ran.output if fails else ran.stdout

    async def created(self, *arguments: str) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(await self.keys("create", *arguments, "--json"))
        return made

    async def statuses(self, key: str, path: str = "/v1/models") -> list[int]:
        found = []
        for ingress in self.ingresses:
            async with self.http.get(ingress + path, headers={"authorization": f"Bearer {key}"}) as answer:
                found.append(answer.status)
        return found

    async def becomes(self, key: str, status: int, *, seconds: float = EFFECTIVE_SECONDS) -> None:
        """In both ingresses, and in time: looks are counted, so that a busy machine fails nothing."""

        async def has_become() -> bool:
            return await self.statuses(key) == [status] * len(self.ingresses)

        await eventually(has_become, seconds=seconds)


@asynccontextmanager
async def running_fleet(directory: Path) -> AsyncIterator[Fleet]:
    clock = ScaledClock()
    async with AsyncExitStack() as stack:
        nats = await start_nats(directory / "nats")
        stack.push_async_callback(nats.stop)
        links = [
            await stack.enter_async_context(jetstream.connect(nats.url, POOL, clock, name=name))
            for name in ("scheduler", "test", "ingress-1", "ingress-2")
        ]
        await eventually(lambda: all(link.commands.connected for link in links))
        await stack.enter_async_context(running_scheduler(links[0], clock))
        await links[1].log.append(joined("engine-1", at=clock.now()))
        urls = [
            await stack.enter_async_context(
                running_ingress({POOL: link}, clock, require_keys=True, engine_urls=("http://*:*",))
            )
            for link in links[2:]
        ]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(nats, urls, links[1], http, directory)


async def test_keys_are_made_listed_rotated_and_revoked_and_all_ingresses_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no-fleets"))
    async with running_fleet(tmp_path) as fleet:
        assert await fleet.statuses("nonsense") == [401, 401]
        first = await fleet.created("alice", "--expires", "90d", "--model", "m*", "--endpoint", "/v1/completions")
        key = first["key"]
        await fleet.becomes(key, 200)
        assert (first["tenant"], first["models"], first["endpoints"]) == ("alice", ["m*"], ["/v1/completions"])

        listed = await fleet.keys("list", "--json")
        (shown,) = json.loads(listed)["keys"]
        assert (shown["id"], shown["created_by"], shown["status"]) == (first["id"], "local", "active")
        assert key not in listed
        assert "digest" not in listed

        successor = json.loads(await fleet.keys("rotate", key, "--grace", f"{GRACE_SECONDS:g}s", "--json"))
        assert (successor["models"], successor["endpoints"]) == (["m*"], ["/v1/completions"])
        assert successor["expires_at"] == first["expires_at"]
        await fleet.becomes(successor["key"], 200)
        assert await fleet.statuses(key) == [200, 200]

        await fleet.keys("revoke", successor["id"])
        await fleet.becomes(successor["key"], 401)
        await fleet.keys("revoke", successor["id"])
        assert "revoked" in await fleet.keys("rotate", successor["id"], fails=True)
        assert "there is no key" in await fleet.keys("revoke", "nobody", fails=True)
        assert "begins with a letter" in await fleet.keys("create", "=cmd", fails=True)
        assert "there is no endpoint" in await fleet.keys("create", "bob", "--endpoint", "/metrics", fails=True)

        changes = [event for event in await events_in(fleet.link.log) if isinstance(event, ApiKeyChanged)]
        assert [(e.action, e.key, e.tenant, e.by) for e in changes] == [
            ("create", first["id"], "alice", "local"),
            ("create", successor["id"], "alice", "local"),
            ("rotate", first["id"], "alice", "local"),
            ("revoke", successor["id"], "alice", "local"),
        ]
        verdict = verify(await whole_log(fleet.link.log))
        assert (verdict.different, verdict.unchecked.total()) == (0, 0)
        assert verdict.identical >= len(changes)
        stored = await fleet.link.access.read()
        assert not any(key.encode() in value.value or b"pm-" in value.value for value in stored.values)

        await fleet.becomes(key, 401, seconds=GRACE_SECONDS + EFFECTIVE_SECONDS)
        last = await fleet.created("carol")
        await fleet.becomes(last["key"], 200)
        await delete_bucket(fleet)
        await asyncio.sleep(1.5)
        assert await fleet.statuses(last["key"]) == [200, 200]
        await fleet.nats.kill()
        assert await fleet.statuses(last["key"]) == [200, 200]
        assert await fleet.statuses(key) == [401, 401]


async def test_a_rotation_whose_old_key_keeps_its_validity_shows_the_new_key_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no-fleets"))
    change = keys_command._change

    async def refused(link: Link, settings: FleetSettings, action: KeyAction, key: ApiKey) -> None:
        if action == "rotate":
            raise click.ClickException("nothing was changed: the log is full")
        await change(link, settings, action, key)

    monkeypatch.setattr(keys_command, "_change", refused)
    async with running_fleet(tmp_path) as fleet:
        old = await fleet.created("alice")

        told = await fleet.keys("rotate", old["id"], "--grace", "0s", fails=True)

        assert f"the old key {old['id']} has not got its end: nothing was changed: the log is full" in told
        await fleet.becomes(told.split()[-1], 200)


async def delete_bucket(fleet: Fleet) -> None:
    await fleet.link.commands.request_bytes(f"$JS.API.STREAM.DELETE.KV_{ACCESS_BUCKET}", b"", timeout=WallSeconds(2.0))


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("30m", 1800), ("12h", 43_200), ("90d", 7_776_000)])
def test_a_key_is_valid_as_long_as_was_said(text: str, seconds: int) -> None:
    assert keys_command.Duration().convert(text, None, None) == seconds
