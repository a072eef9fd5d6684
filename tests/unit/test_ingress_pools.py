"""Several pools behind one ingress: which of them has the model that a client names, and when the ingress is ready."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.memory_log import MemoryBroker
from pointsman.chassis.health import HealthBoard
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceLeft, InstanceReported
from pointsman.ports import EventLog
from pointsman.primitives import Epoch, InstanceId, PoolName
from pointsman_ingress.fleet_view import FleetView
from pointsman_ingress.openai_errors import Refusal
from pointsman_ingress.pools import Pool, Pools, PoolsBoard
from tests.support.events import joined, reported
from tests.support.fake_engine import eventually

CHAT, CODE = PoolName("chat"), PoolName("code")


@dataclass
class Rig:
    pools: Pools
    fleets: dict[PoolName, FleetView]
    logs: dict[PoolName, EventLog]

    async def tell(self, pool: PoolName, *events: LogEvent) -> None:
        """Append to the pool's log, and wait until the ingress has read it."""
        last = [await self.logs[pool].append(event) for event in events][-1]
        await eventually(lambda: self.fleets[pool]._state.sequence >= last)

    def found(self, name: str) -> tuple[str, str, str]:
        """Pool, base model and adapter."""
        pool, model = self.pools.find(name)
        return pool.name, model.base, model.adapter

    def refusal(self, name: str) -> tuple[int, str]:
        with pytest.raises(Refusal) as refusal:
            self.pools.find(name)
        return refusal.value.status, refusal.value.code


@asynccontextmanager
async def rig(*names: PoolName) -> AsyncIterator[Rig]:
    clock = ScaledClock()
    logs: dict[PoolName, EventLog] = {name: MemoryBroker(name).client(clock, name="test").log for name in names}
    fleets = {name: FleetView(clock, HealthBoard()) for name in names}
    following = [asyncio.create_task(fleets[name].follow(logs[name])) for name in names]
    unused = cast(Any, None)
    pools = [
        Pool(name=name, fleet=fleets[name], router=unused, tokenising=unused, keys=unused, events=logs[name])
        for name in names
    ]
    yield Rig(Pools(pools), fleets, logs)
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


def naming(instance: str, *, at: float, **names: list[str]) -> InstanceReported:
    """A report of an instance with these adapters and aliases."""
    return msgspec.structs.replace(reported(instance, 0, [], at=at), **names)


async def test_a_model_is_found_in_its_pool_under_its_name_its_aliases_and_its_adapters() -> None:
    async with rig(CHAT, CODE) as one:
        await one.tell(CHAT, joined("a", model="m", at=1), naming("a", at=2, adapters=["poet"], aliases=["m-latest"]))
        await one.tell(CODE, joined("b", model="coder", at=1))

        assert one.found("m") == one.found("m-latest") == ("chat", "m", "")
        assert one.found("poet") == ("chat", "m", "poet")
        assert one.found("coder") == ("code", "coder", "")
        assert [model.name for _, model in one.pools.offered()] == ["m", "m-latest", "poet", "coder"]
        assert one.refusal("nobody") == (404, "model_not_found")
        assert one.refusal("") == (400, "invalid_request")


async def test_as_long_as_a_pool_has_had_no_engine_nobody_knows_that_a_model_does_not_exist() -> None:
    async with rig(CHAT, CODE) as one:
        await one.tell(CHAT, joined("a", model="m", at=1))

        assert one.refusal("coder") == (503, "no_engines")
        assert one.found("") == ("chat", "m", "")


async def test_an_adapter_is_offered_while_an_instance_has_it_and_the_others_are_to_be_excluded() -> None:
    async with rig(CHAT) as one:
        await one.tell(CHAT, joined("a", at=1), joined("b", at=1), naming("b", at=2, adapters=["poet"]))
        without = one.fleets[CHAT].without("poet")
        await one.tell(CHAT, naming("b", at=3))

        assert without == ["a"]
        assert one.fleets[CHAT].without("") == []
        assert one.refusal("poet") == (404, "model_not_found")


async def test_a_pool_whose_engines_have_all_gone_still_has_its_model() -> None:
    async with rig(CHAT) as one:
        await one.tell(CHAT, joined("a", at=1))
        await one.tell(CHAT, InstanceLeft(at=2, instance=InstanceId("a"), epoch=Epoch(1), reason="stopped"))

        assert one.found("m") == ("chat", "m", "")


async def test_a_pool_whose_engines_were_replaced_by_those_of_another_model_forgets_the_first() -> None:
    async with rig(CHAT) as one:
        await one.tell(CHAT, joined("a", model="old", at=1), joined("b", model="new", at=2))
        await one.tell(CHAT, InstanceLeft(at=3, instance=InstanceId("a"), epoch=Epoch(1), reason="stopped"))

        assert one.refusal("old") == (404, "model_not_found")
        assert one.found("") == ("chat", "new", "")


def test_an_ingress_is_ready_while_one_of_its_pools_is_and_says_what_the_others_lack() -> None:
    board = PoolsBoard([CHAT, CODE])
    board.pools[CODE].missing("fleet", "no engine is ready")
    one_left = board.answer("/ready")
    board.pools[CHAT].missing("fleet", "no engine is ready")
    none_left = board.answer("/ready")

    assert one_left is not None
    assert (one_left[0], json.loads(one_left[2])["missing"]) == (200, {"fleet of code": "no engine is ready"})
    assert none_left is not None
    assert none_left[0] == 503
