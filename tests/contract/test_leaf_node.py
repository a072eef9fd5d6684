"""A process at a leaf node whose JetStream is of another domain than the log's: it names the log's domain."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import CancelAnswered, CancelRequest, RouteGranted
from pointsman.contracts.subjects import command_subject
from pointsman.ports import CheckpointLabel, Link, NoResponderError, Reply
from pointsman.primitives import PoolName, RequestId, Term, WallSeconds
from pointsman.runtime.embedded_nats import nats_server_binary
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.main import main
from pointsman_scheduler.settings import SchedulerSettings
from tests.support.events import joined, reported, route, stored
from tests.support.log_reading import whole_log
from tests.support.services import running_scheduler
from tests.support.waiting import eventually

POOL = PoolName("default")
DOMAIN = "hub"
API = SchedulerSettings(nats_domain=DOMAIN).nats_api


@dataclass(frozen=True)
class Servers:
    hub: str
    leaf: str


def configured(directory: Path, name: str, port: int, leaf_nodes: str) -> Path:
    directory.mkdir()
    file = directory / "nats.conf"
    file.write_text(
        f'server_name: {name}\nlisten: "127.0.0.1:{port}"\nlog_file: "{directory}/log"\n'
        f'jetstream {{ store_dir: "{directory}", domain: {name} }}\nleafnodes {{ {leaf_nodes} }}\n'
    )
    return file


@asynccontextmanager
async def server(directory: Path, name: str, port: int, leaf_nodes: str) -> AsyncIterator[None]:
    file = configured(directory, name, port, leaf_nodes)
    running = subprocess.Popen([nats_server_binary(), "-c", str(file)])  # noqa: ASYNC220 - it starts at once
    try:
        yield
    finally:
        running.terminate()
        await asyncio.to_thread(running.wait, 10)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    hub, leaf, link = free_ports(3)
    remote = f'remotes: [{{ url: "nats://127.0.0.1:{link}" }}]'
    async with (
        server(tmp_path / "hub", DOMAIN, hub, f'listen: "127.0.0.1:{link}"'),
        server(tmp_path / "leaf", "leaf", leaf, remote),
    ):
        yield Servers(f"nats://127.0.0.1:{hub}", f"nats://127.0.0.1:{leaf}")


@asynccontextmanager
async def connected(url: str, name: str, api: str = API) -> AsyncIterator[Link]:
    async with jetstream.connect(url, POOL, ScaledClock(), name=name, api=api) as link:
        await eventually(lambda: link.commands.connected)
        yield link


async def test_everything_of_a_pool_works_through_a_leaf_node_of_another_domain(servers: Servers) -> None:
    async with connected(servers.hub, "hub") as hub, connected(servers.leaf, "leaf") as leaf:
        await eventually(lambda: _answers(hub))
        await eventually(lambda: _answers(leaf), what="the leaf node is linked")
        await leaf.log.append(joined("engine-1"))
        await hub.log.append(stored("engine-1", 1, [1, 2]))
        read = [await whole_log(link.log) for link in (hub, leaf)]
        tenure = await leaf.lease.put("s", Term(1), after=0)
        seen = await hub.lease.look()
        label = CheckpointLabel(identity="i", as_of=2, entry="e", form="6.f")
        await leaf.checkpoints.save(label, b"state" * 100_000)
        content = await hub.checkpoints.load(label)
        revision = await leaf.access.put("k", b"value", after=0)
        value = await hub.access.get("k")
        async with hub.commands.serve(command_subject(POOL, "cancel"), _cancelled):
            answer = await _asked(
                leaf, command_subject(POOL, "cancel"), CancelRequest(request=RequestId("r"), reason="x")
            )

    assert [[entry.sequence for entry in entries] for entries in read] == [[1, 2], [1, 2]]
    assert read[0] == read[1]
    assert seen == tenure
    assert content == b"state" * 100_000
    assert value is not None
    assert (value.value, value.revision) == (b"value", revision)
    assert answer == CancelAnswered(request=RequestId("r"), ended=True)


async def test_a_scheduler_at_a_leaf_node_leads_and_commands_find_it(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ScaledClock()
    async with connected(servers.hub, "hub") as hub, connected(servers.leaf, "leaf") as leaf:
        await eventually(lambda: _answers(leaf), what="the leaf node is linked")
        await leaf.log.append(joined("engine-1", at=clock.now()))
        await leaf.log.append(reported("engine-1", 0, [], at=clock.now()))
        async with running_scheduler(leaf, clock):
            command = route("r1", [1], arrived_at=clock.now())
            granted = await _asked(hub, command_subject(POOL, "route"), command)
            monkeypatch.setenv("POINTSMAN_NATS_DOMAIN", DOMAIN)
            shown = await asyncio.to_thread(CliRunner().invoke, main, ["state", "--from", servers.leaf, "--json"])

    assert isinstance(granted, RouteGranted)
    assert shown.exit_code == 0, shown.output
    assert "engine-1" in shown.output


def test_the_domain_or_the_prefix_is_a_setting_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_NATS_DOMAIN", "hub")

    assert SchedulerSettings().nats_api == "$JS.API."
    assert fleet_settings("nats://127.0.0.1:1", None).nats_api == "$JS.hub.API."
    assert SchedulerSettings(nats_domain="hub", nats_api_prefix="from.hub").nats_api == "from.hub."


async def _asked(link: Link, subject: str, command: AnyCommand) -> AnyCommand:
    """A subscription is known on the other side of a leaf link a moment after it was made."""
    answers: list[AnyCommand] = []

    async def answered() -> bool:
        with suppress(NoResponderError):
            answers.append(await link.commands.request(subject, command, timeout=WallSeconds(5.0)))
        return bool(answers)

    await eventually(answered, what=f"{subject} is served across the leaf link")
    return answers[0]


async def _answers(link: Link) -> bool:
    try:
        await link.log.extent()
    except Exception:  # noqa: BLE001 - not yet
        return False
    return True


async def _cancelled(_command: AnyCommand, reply: Reply) -> None:
    await reply(CancelAnswered(request=RequestId("r"), ended=True))
