"""Sources of engines against a real file and a DNS server of our own: what changes the list, and what must not."""

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dns.rcode
import pytest

from pointsman.adapters.discovery.dns import AddressDiscovery, DnsDiscovery, ServiceDiscovery
from pointsman.adapters.discovery.file import FileDiscovery
from pointsman.ports import EngineDiscovery, EngineTarget
from pointsman.primitives import WallSeconds
from pointsman_lab.background import background
from tests.support.dns_server import DnsServer, running_dns
from tests.support.waiting import eventually

POLL = WallSeconds(0.02)
HOST, SERVICE = "vllm.example", "_http._tcp.vllm.example"
ONE, TWO = "10-0-0-1-8000", "10-0-0-2-8000"


@dataclass
class Lists:
    source: EngineDiscovery
    all: list[list[EngineTarget]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [target.instance for target in self.all[-1]] if self.all else ["nothing yet"]


@asynccontextmanager
async def read(source: EngineDiscovery) -> AsyncIterator[Lists]:
    lists = Lists(source)

    async def collect() -> None:
        async with aclosing(source.targets()) as found:
            async for targets in found:
                lists.all.append(targets)

    async with background(collect()) as (task,):
        yield lists
        assert not task.done(), "a source goes on for ever"


@asynccontextmanager
async def asking(
    kind: type[DnsDiscovery], text: str, records: dict[tuple[str, str], list[str]], *, empty_seconds: float = 60.0
) -> AsyncIterator[tuple[DnsServer, Lists]]:
    async with running_dns() as server:
        server.records = records
        source = kind(text, resolver=server.resolver(), poll_seconds_min=POLL, empty_seconds=WallSeconds(empty_seconds))
        async with read(source) as lists:
            yield server, lists


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.adapters.discovery.dns.RETRY_WALL_SECONDS", 0.02)


async def test_each_address_is_a_target_and_only_changes_are_told() -> None:
    async with asking(AddressDiscovery, f"{HOST}:8000", {(HOST, "A"): ["10.0.0.2", "10.0.0.1"]}) as (server, lists):
        await eventually(lambda: lists.names == [ONE, TWO])
        server.records[HOST, "A"] = ["10.0.0.1", "10.0.0.2"]
        await eventually(lambda: server.asked > 5)
        told = len(lists.all)
        server.records[HOST, "A"] = ["10.0.0.1"]
        await eventually(lambda: lists.names == [ONE])

    assert told == 1
    assert lists.all[0][0].url == "http://10.0.0.1:8000"


async def test_a_search_list_and_addresses_of_ip_6_only() -> None:
    records = {("vllm.cluster.local", "AAAA"): ["fd00::5"]}
    async with asking(AddressDiscovery, "vllm:8000", records) as (_, lists):
        await eventually(lambda: lists.names == ["fd00-5-8000"])

    assert lists.all[0][0].url == "http://[fd00::5]:8000"


@pytest.mark.parametrize("failure", ["refused", "server failure", "silence", "garbage", "no such name", "no record"])
async def test_a_lookup_that_fails_drops_nobody_and_health_says_so(failure: str) -> None:
    async with asking(AddressDiscovery, f"{HOST}:8000", {(HOST, "A"): ["10.0.0.1"]}) as (server, lists):
        await eventually(lambda: lists.names == [ONE])
        match failure:
            case "refused":
                server.code = dns.rcode.REFUSED
            case "server failure":
                server.code = dns.rcode.SERVFAIL
            case "silence":
                server.silent = True
            case "garbage":
                server.garbage = True
            case "no such name":
                server.records = {}
            case _:
                server.records = {(HOST, "TXT"): ["x"]}
        await eventually(lambda: lists.source.problem)
        asked, lost = server.asked, lists.names
        await eventually(lambda: server.asked > asked + 1)
        server.records, server.code = {(HOST, "A"): ["10.0.0.1", "10.0.0.2"]}, None
        server.silent = server.garbage = False
        await eventually(lambda: lists.names == [ONE, TWO])
        mended = lists.source.problem

    assert lost == [ONE]
    assert mended == ""


async def test_a_machine_that_gets_other_name_servers_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/resolv.conf is written anew when a network comes up."""
    async with running_dns() as before, running_dns() as now:
        before.code, now.records = dns.rcode.SERVFAIL, {(HOST, "A"): ["10.0.0.1"]}
        resolvers = [before.resolver(), now.resolver()]
        monkeypatch.setattr("dns.asyncresolver.Resolver", lambda: resolvers[0])
        async with read(AddressDiscovery(f"{HOST}:8000", poll_seconds_min=POLL)) as lists:
            await eventually(lambda: lists.source.problem)
            del resolvers[0]
            await eventually(lambda: lists.names == [ONE])


async def test_an_empty_answer_is_believed_when_it_was_repeated_for_long_enough() -> None:
    records = {(HOST, "A"): ["10.0.0.1"]}
    async with asking(AddressDiscovery, f"{HOST}:8000", records, empty_seconds=0.5) as (server, lists):
        await eventually(lambda: lists.names == [ONE])
        server.records = {}
        await eventually(lambda: lists.source.problem)
        kept, doubt = lists.names, lists.source.problem
        await eventually(lambda: lists.names == [])
        believed = lists.source.problem

    assert kept == [ONE]
    assert "the known engines stay" in doubt
    assert believed, "the source still finds no engine"
    assert "stay" not in believed


async def test_services_have_hosts_and_ports_of_their_own_and_wrong_ones_are_left_out() -> None:
    records = {
        (SERVICE, "SRV"): [
            "0 5 8000 gpu-0.vllm.example.",
            "0 5 9000 gpu-1.vllm.example.",
            "0 5 9000 gpu-1.vllm.example.",
            "0 5 0 gpu-2.vllm.example.",
            "0 5 8000 .",
            "0 5 8000 b\\032ad\\010.example.",
        ]
    }
    async with asking(ServiceDiscovery, SERVICE, records) as (_, lists):
        await eventually(lambda: len(lists.all) == 1)

    assert lists.names == ["gpu-0-vllm-example-8000", "gpu-1-vllm-example-9000"]


async def test_an_address_needs_no_server() -> None:
    async with read(AddressDiscovery("127.0.0.1:8000")) as lists:
        await eventually(lambda: lists.names == ["127-0-0-1-8000"])


async def test_a_file_is_read_again_and_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    async with read(FileDiscovery(str(path), poll_seconds=POLL)) as lists:
        await eventually(lambda: "No such file" in lists.source.problem)
        never = list(lists.all)
        path.write_text("[[engine]]\nurl = 'http://10.0.0.1:8000'")
        await eventually(lambda: lists.names == [ONE])
        for broken in ("", "[[engine]", "[[engine]]\nurl = 'nonsense'"):
            path.write_text(broken)
            await eventually(lambda: lists.source.problem)
            kept = lists.names
            path.write_text("[[engine]]\nurl = 'http://10.0.0.1:8000'")
            await eventually(lambda: not lists.source.problem)
            assert kept == [ONE]
        path.unlink()
        await eventually(lambda: lists.source.problem)
        gone = lists.names
        path.write_text("engine = []")
        await eventually(lambda: lists.names == [])

    assert never == []
    assert gone == [ONE]


async def test_a_pipe_that_nobody_writes_blocks_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    os.mkfifo(path)
    async with read(FileDiscovery(str(path), poll_seconds=POLL)) as lists:
        await eventually(lambda: "no regular file" in lists.source.problem)
        path.unlink()
        path.write_text("[[engine]]\nurl = 'http://10.0.0.1:8000'")
        await eventually(lambda: lists.names == [ONE])
