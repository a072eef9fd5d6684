"""A stream that an earlier release made gets what is new and takes nothing away; its sizes stay the operator's."""

import json
from pathlib import Path

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.subjects import stream_name
from pointsman.primitives import PoolName, WallSeconds
from tests.support.events import joined
from tests.support.log_worlds import RememberingListener
from tests.support.nats import running_nats
from tests.support.waiting import eventually

POOL = PoolName("default")
SMALL = 50_000_000


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
