"""A stream that an earlier release made gets what is new and takes nothing away; its sizes stay the operator's."""

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import StreamSettings
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import stream_name
from pointsman.ports import LogUnavailableError
from pointsman.primitives import PoolName, WallSeconds
from tests.support.events import joined
from tests.support.log_worlds import RememberingListener
from tests.support.nats import running_nats
from tests.support.waiting import eventually

POOL = PoolName("default")
SMALL = 50_000_000
SECOND = 1_000_000_000


async def test_an_earlier_releases_stream_is_brought_up_and_its_size_is_left_alone(tmp_path: Path) -> None:
    earlier = {"name": stream_name(POOL), "subjects": ["pm.default.fleet.*"], "storage": "file", "max_bytes": SMALL}
    listener = RememberingListener()
    async with running_nats(tmp_path) as url:  # noqa: SIM117 - the inner one needs its URL
        async with jetstream.connect(url, PoolName("other"), ScaledClock(), name="before") as before:
            await eventually(lambda: before.commands.connected)
            await before.commands.request_bytes(
                f"$JS.API.STREAM.CREATE.{stream_name(POOL)}", json.dumps(earlier).encode(), timeout=WallSeconds(3.0)
            )
            async with jetstream.connect(url, POOL, ScaledClock(), name="now", listener=listener) as now:
                await now.log.append(joined("engine-1"))
                await eventually(lambda: listener.troubles)
            told = await before.commands.request_bytes(
                f"$JS.API.STREAM.INFO.{stream_name(POOL)}", b"", timeout=WallSeconds(3.0)
            )
    config = json.loads(told)["config"]

    assert (config["compression"], config["allow_direct"], config["max_bytes"]) == ("s2", True, SMALL)
    assert "pm.default.leader" in config["subjects"]
    assert "max_bytes" in listener.troubles[0]
    assert "compression" not in listener.troubles[0]


async def test_another_programs_stream_of_the_same_name_is_neither_read_nor_changed(tmp_path: Path) -> None:
    listener = RememberingListener()
    async with running_nats(tmp_path) as url:
        before = await _made(url, {"subjects": ["orders.>"]})
        async with (
            jetstream.connect(url, POOL, ScaledClock(), name="now", listener=listener),
            jetstream.connect(url, POOL, ScaledClock(), name="r", user=BusUser(BusRole.READER)) as reader,
        ):
            await eventually(lambda: listener.missing and reader.commands.connected)
            with pytest.raises(LogUnavailableError, match=r"is another's, with orders\.>: remove it, or choose"):
                await reader.log.extent()
        after = await _made(url, {"subjects": ["orders.>"]})

    assert after["subjects"] == ["orders.>"]
    assert after == before
    assert "is another's" in listener.missing[0]


async def test_a_larger_size_and_age_that_are_asked_for_are_set_and_smaller_ones_are_not(tmp_path: Path) -> None:
    asked = StreamSettings(bytes_max=2 * SMALL, age_seconds_max=3600.0)
    less = StreamSettings(bytes_max=SMALL, age_seconds_max=60.0)
    async with running_nats(tmp_path) as url:
        await _made(url, {"max_bytes": SMALL, "max_age": 60 * SECOND})
        grown, _ = await _met(url, asked)
        kept, told = await _met(url, less)
        await _made(url, {"max_bytes": -1, "max_age": 0}, pool="endless")
        endless, _ = await _met(url, asked, pool="endless")

    assert (grown["max_bytes"], grown["max_age"]) == (2 * SMALL, 3600 * SECOND)
    assert (kept["max_bytes"], kept["max_age"]) == (2 * SMALL, 3600 * SECOND)
    assert f"max_bytes is {2 * SMALL}, not {SMALL}" in told
    assert (endless["max_bytes"], endless["max_age"]) == (-1, 0)


async def test_a_size_that_the_server_has_no_room_for_is_refused_in_its_words_and_keeps_nothing_else_back(
    tmp_path: Path,
) -> None:
    async with running_nats(tmp_path) as url:
        await _made(url, {"max_bytes": SMALL})
        config, told = await _met(url, StreamSettings(bytes_max=2**60))

    assert config["max_bytes"] == SMALL
    assert config["compression"] == "s2"
    assert "max_bytes was not changed: insufficient storage resources" in told


async def test_a_server_whose_store_is_reserved_says_so_and_not_that_its_disk_is_full(tmp_path: Path) -> None:
    listener = RememberingListener()
    asked = StreamSettings(bytes_max=2**40)
    async with (
        running_nats(tmp_path) as url,
        jetstream.connect(url, POOL, ScaledClock(), name="now", stream=asked, listener=listener),
    ):
        await eventually(lambda: listener.missing)

    assert listener.missing[0] == (
        "insufficient storage resources available: a new log reserves 1024 GiB (--log-bytes-max) of the server's max_file_store"
    )


async def _made(url: str, settings: dict[str, Any], pool: str = "default") -> dict[str, Any]:
    """The configuration; empty if there is a stream with another."""
    config = {"name": stream_name(PoolName(pool)), "subjects": [f"pm.{pool}.fleet.*"], "storage": "file"} | settings
    async with jetstream.connect(url, PoolName("other"), ScaledClock(), name="before") as before:
        await eventually(lambda: before.commands.connected)
        told = await before.commands.request_bytes(
            f"$JS.API.STREAM.CREATE.{config['name']}", json.dumps(config).encode(), timeout=WallSeconds(3.0)
        )
    made: dict[str, Any] = json.loads(told).get("config", {})
    return made


async def _met(url: str, settings: StreamSettings, pool: str = "default") -> tuple[dict[str, Any], str]:
    """The stream's configuration after a process with these settings has come, and what that process says of it."""
    listener = RememberingListener()
    async with jetstream.connect(
        url, PoolName(pool), ScaledClock(), name="now", listener=listener, stream=settings
    ) as now:
        await now.log.append(joined("engine-1"))
        await eventually(lambda: listener.troubles)  # at least the window of duplicates is not given here
        told = await now.commands.request_bytes(
            f"$JS.API.STREAM.INFO.{stream_name(PoolName(pool))}", b"", timeout=WallSeconds(3.0)
        )
    config: dict[str, Any] = json.loads(told)["config"]
    return config, "; ".join(listener.troubles)
