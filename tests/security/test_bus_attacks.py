"""The attack list on the bus: shown to work on a server without users, and to do nothing on one with them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest
from nats.aio.client import Client

from pointsman.contracts.permissions import ANY_INSTANCE, BusRole, BusUser
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.embedded_nats import start_nats
from tests.security.bus_attacks import ATTACKS, BusAttack
from tests.security.bus_world import OTHER, POOL, WAIT_SECONDS, Attacker, BusWorld, Picture, attacker, inbox
from tests.support.nats import running_nats

ADMINISTRATOR = nkeys.from_seed(nkeys.encode_seed(b"8" * 32, nkeys.PREFIX_BYTE_USER))
STRANGER = nkeys.encode_seed(b"7" * 32, nkeys.PREFIX_BYTE_USER).decode()
SERVICES = ("administrator", "scheduler", "ingress", "scaler", "worker", "operator")


@asynccontextmanager
async def world_at(url: str, credentials: dict[str, dict[str, Any]], file: str = "") -> AsyncIterator[BusWorld]:
    async with AsyncExitStack() as stack:
        services = {}
        for role in SERVICES:
            services[role] = await nats.connect(url, inbox_prefix=inbox(role), **credentials.get(role, {}))
            stack.push_async_callback(services[role].close)
        world = BusWorld(url, services, file)
        await world.set_up()
        await world.listen()
        yield world


async def effect_of(attack: BusAttack, attacking: Attacker, world: BusWorld, before: Picture) -> set[str]:
    told = await attack.run(attacking, world)
    found = (await world.picture()).differences(before)
    return found | {"told"} if told else found


async def successes(role: str, world: BusWorld, credential: dict[str, Any]) -> list[str]:
    """All attacks in a row, then a look; only if there is something to see, one by one."""
    attacks = [attack for attack in ATTACKS if role not in attack.by_right]
    before = await world.picture()
    async with attacker(world.url, role, **credential) as attacking:
        told = [attack.name for attack in attacks if await attack.run(attacking, world)]
    await asyncio.sleep(WAIT_SECONDS)
    if not (told or (await world.picture()).differences(before)):
        return []
    found = []
    for attack in attacks:
        async with attacker(world.url, role, **credential) as attacking:
            effect = await effect_of(attack, attacking, world, await world.picture())
        if effect:
            found.append(f"{attack.name}: {sorted(effect)}")
    return found or ["something that is not seen when they come one by one"]


ATTEMPTS = 2
"""On a busy machine an attack's connection may break before it has had its effect (seen once in CI)."""


async def test_on_an_open_server_each_attack_has_its_effect(tmp_path: Path) -> None:
    without: list[str] = []
    async with running_nats(tmp_path) as url, world_at(url, {}) as world:
        first = await world.picture()
        for attack in ATTACKS:
            effect: set[str] = set()
            for _ in range(ATTEMPTS):
                async with attacker(url, "outsider") as outsider:
                    effect = await effect_of(attack, outsider, world, first)
                if attack.effect in effect:
                    break
            if (attack.effect not in effect) is not attack.closed_anyway:
                without.append(f"{attack.name}: {sorted(effect)}")
            if effect & {"streams", "log", "buckets", "told"}:
                await world.set_back()

    assert not without


def test_attacks_have_names_of_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60


USERS = {
    "scheduler": BusUser(BusRole.SCHEDULER),
    "ingress": BusUser(BusRole.INGRESS),
    "scaler": BusUser(BusRole.SCALER),
    "worker": BusUser(BusRole.WORKER, "engine-1", PoolName(POOL)),
    "other": BusUser(BusRole.WORKER, "engine-1", PoolName(OTHER)),
    "pool": BusUser(BusRole.WORKER, ANY_INSTANCE, PoolName(POOL)),
    "other pool": BusUser(BusRole.WORKER, ANY_INSTANCE, PoolName(OTHER)),
    "operator": BusUser(BusRole.OPERATOR, "alice"),
    "reader": BusUser(BusRole.READER),
    "router": BusUser(BusRole.ROUTER, "other", PoolName(POOL)),
}


@dataclass(frozen=True, slots=True)
class Locked:
    """A nats-server with users. `seeds`: to connect as one of them."""

    url: str
    seeds: dict[str, dict[str, Any]]
    scheduler_file: str


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    credentials = Credentials(tmp_path_factory.mktemp("credentials"))
    workers = [user for user in USERS.values() if user.role is BusRole.WORKER]
    credentials.make(
        [PoolName(POOL), PoolName(OTHER)], workers=workers, operators=["alice", "bob"], routers=[USERS["router"]]
    )
    accounts = credentials.configuration()
    looking = accounts.replace("users = [", f"users = [{{nkey: {ADMINISTRATOR.public_key.decode()}}}", 1)
    assert looking.index("FLEET") < looking.index("nkey") < looking.index("WORKERS")
    server = asyncio.run(start_nats(tmp_path_factory.mktemp("nats"), accounts=looking))
    seeds = {role: {"nkeys_seed_str": credentials.file(user).read_text().strip()} for role, user in USERS.items()}
    seeds["administrator"] = {"nkeys_seed_str": ADMINISTRATOR.seed.decode()}
    yield Locked(server.url, seeds, str(credentials.file(USERS["scheduler"])))
    asyncio.run(server.stop())


async def test_without_a_credential_nobody_gets_in(locked: Locked) -> None:
    for credential in ({}, {"user": "scheduler", "password": ""}, {"token": "x"}, {"nkeys_seed_str": STRANGER}):
        client = Client()
        with pytest.raises(nats.errors.Error):
            await client.connect(locked.url, allow_reconnect=False, **credential)
        await client.close()


@pytest.mark.parametrize("role", ["worker", "other", "pool", "other pool", "reader", "router", "operator"])
async def test_with_users_no_attack_has_an_effect(locked: Locked, role: str) -> None:
    async with world_at(locked.url, locked.seeds, locked.scheduler_file) as world:
        through = await successes(role, world, locked.seeds[role])

    assert not through
