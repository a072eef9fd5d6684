"""Engines that have names, while the lookup of names fails, hangs or tells something new."""

import asyncio
import socket
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest

from pointsman.adapters import name_resolver
from pointsman.adapters.name_resolver import NameResolver
from pointsman.primitives import WallSeconds


class Dns:
    """`says`: the address of each name; None: it fails. `hangs`: names whose lookup does not end before `go`."""

    def __init__(self) -> None:
        self.says: dict[str, str | None] = {}
        self.hangs: set[str] = set()
        self.go = Event()
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host)
        if host in self.hangs:
            self.go.wait(30)
        address = self.says.get(host)
        if address is None:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dns]:
    made = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(name_resolver, "LOOKUP_WALL_SECONDS_MAX", WallSeconds(0.2))
    yield made
    made.go.set()


async def address_of(resolver: NameResolver, host: str) -> str:
    (found,) = await resolver.resolve(host, 8000)
    assert (found["hostname"], found["port"]) == (host, 8000)
    return found["host"]


async def test_while_a_lookup_fails_the_last_address_counts_and_a_new_one_replaces_it(dns: Dns) -> None:
    resolver, told = NameResolver(), []
    for said in ("10.0.0.1", None, "10.0.0.2"):
        dns.says["gpu1"] = said
        told.append(await address_of(resolver, "gpu1"))

    assert told == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]


async def test_a_name_that_never_had_an_address_has_none(dns: Dns) -> None:
    with pytest.raises(OSError, match="name resolution"):
        await NameResolver().resolve("gpu1", 8000)
    assert dns.asked == ["gpu1"]


async def test_a_lookup_that_hangs_delays_for_a_bounded_time_and_is_made_once(dns: Dns) -> None:
    resolver = NameResolver()
    dns.says = {"gpu1": "10.0.0.1"}
    await address_of(resolver, "gpu1")
    dns.hangs = {"gpu1", "gpu2"}

    async with asyncio.timeout(10):
        assert [await address_of(resolver, "gpu1") for _ in range(3)] == ["10.0.0.1"] * 3
        with pytest.raises(OSError, match="took more than"):
            await resolver.resolve("gpu2", 8000)
    assert dns.asked == ["gpu1", "gpu1", "gpu2"]


async def test_names_that_hang_hold_up_no_other(dns: Dns) -> None:
    resolver = NameResolver()
    dns.hangs = {f"slow-{number}" for number in range(100)}
    dns.says = {"gpu1": "10.0.0.1"}
    asking = [asyncio.create_task(resolver.resolve(name, 8000)) for name in dns.hangs]
    await asyncio.sleep(0)

    assert await address_of(resolver, "gpu1") == "10.0.0.1"
    assert all(isinstance(error, OSError) for error in await asyncio.gather(*asking, return_exceptions=True))


async def test_without_a_thread_for_it_a_lookup_fails_and_the_next_one_is_made(
    dns: Dns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = NameResolver()
    dns.says = {"gpu1": "10.0.0.1"}
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        with pytest.raises(OSError, match="new thread"):
            await resolver.resolve("gpu1", 8000)

    assert await address_of(resolver, "gpu1") == "10.0.0.1"
