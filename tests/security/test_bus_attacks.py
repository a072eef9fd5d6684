"""The attack list on the bus: shown to work on a server without users, and to do nothing on one with them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats

from tests.security.bus_attacks import ATTACKS, BusAttack
from tests.security.bus_world import Attacker, BusWorld, attacker, inbox
from tests.support.nats import running_nats

SERVICES = ("scheduler", "ingress", "scaler", "worker", "operator")


@asynccontextmanager
async def world_at(url: str, credentials: dict[str, dict[str, Any]]) -> AsyncIterator[BusWorld]:
    async with AsyncExitStack() as stack:
        services = {}
        for role in SERVICES:
            services[role] = await nats.connect(url, inbox_prefix=inbox(role), **credentials.get(role, {}))
            stack.push_async_callback(services[role].close)
        world = BusWorld(url, services)
        await world.set_up()
        await world.listen()
        yield world


async def effect_of(attack: BusAttack, attacking: Attacker, world: BusWorld) -> set[str]:
    before = await world.picture()
    told = await attack.run(attacking, world)
    found = (await world.picture()).differences(before)
    return found | {"told"} if told else found


async def test_on_an_open_server_each_attack_has_its_effect(tmp_path: Path) -> None:
    without: list[str] = []
    async with running_nats(tmp_path) as url, world_at(url, {}) as world:
        for attack in ATTACKS:
            async with attacker(url, "outsider") as outsider:
                effect = await effect_of(attack, outsider, world)
            if (attack.effect not in effect) is not attack.closed_anyway:
                without.append(f"{attack.name}: {sorted(effect)}")
            if effect & {"streams", "log", "buckets", "told"}:
                await world.set_back()

    assert not without


def test_attacks_have_names_of_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60
