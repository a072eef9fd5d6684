"""What the leader does with commands about API keys: refusals, repeats, and others who write at the same moment."""

import asyncio
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.access import ApiKey, KeyAction, decode_key, name_of_key, secret_proof
from pointsman.contracts.commands import ChangeApiKey
from pointsman.ports import StoreUnavailableError
from pointsman.primitives import EngineSeconds, engine_time_of
from pointsman_lab.memory.stores import MemoryKeyValueStore
from pointsman_scheduler.api_keys import ApiKeyWriter, KeyRefusedError
from tests.support.api_keys import SECRET, api_key, put_key

NOW = 1_800_000_000.0


class FixedClock(ScaledClock):
    @override
    def now(self) -> EngineSeconds:
        return engine_time_of(NOW, self.speed)


class KeyStore:
    def __init__(self) -> None:
        self.available = True
        self.store = MemoryKeyValueStore(lambda: self.available)
        self.writer = ApiKeyWriter(self.store, FixedClock(20.0), SECRET)

    async def change(self, action: KeyAction, key: ApiKey, by: str = "alice", secret: str = SECRET) -> ApiKey | None:
        return await self.writer.change(
            ChangeApiKey(action=action, key=key, secret_proof=secret_proof(secret, key.id)), by
        )

    async def refusal(self, action: KeyAction, key: ApiKey) -> str:
        before = [value.value for value in (await self.store.read()).values]
        with pytest.raises(KeyRefusedError) as refused:
            await self.change(action, key)
        assert [value.value for value in (await self.store.read()).values] == before
        return str(refused.value)

    async def stored(self, key: ApiKey) -> ApiKey:
        found = await self.store.get(name_of_key(key.id))
        assert found is not None
        return decode_key(found.value)


async def test_a_new_key_is_stored_with_the_leaders_time_and_the_commands_sender() -> None:
    keys, asked = KeyStore(), api_key("k1", "acme", created_by="mallory", revoked_at=5.0, expires_at=NOW + 60)
    made = await keys.change("create", asked)

    assert made == await keys.stored(asked)
    assert made == msgspec.structs.replace(asked, created_at=NOW, created_by="alice", revoked_at=0.0)


async def test_a_command_that_comes_twice_changes_nothing_the_second_time() -> None:
    keys, asked = KeyStore(), api_key("k1", "acme")
    assert await keys.change("create", asked) is not None
    assert await keys.change("create", asked) is None
    assert await keys.change("rotate", msgspec.structs.replace(asked, expires_at=NOW + 60)) is not None
    assert await keys.change("rotate", msgspec.structs.replace(asked, expires_at=NOW + 60)) is None
    assert await keys.change("revoke", asked) is not None
    assert await keys.change("revoke", asked) is None
    assert await keys.change("create", asked) is None

    assert (await keys.stored(asked)).revoked_at == NOW


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "=1+1"}, "tenant"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"tenant": "\x1b[31m"}, "tenant"),
        ({"expires_at": NOW - 1}, "expired"),
        ({"models": [""]}, "pattern"),
        ({"models": ["a"] * 101}, "more than"),
        ({"endpoints": ["/metrics"]}, "no endpoint"),
    ],
)
async def test_a_key_that_makes_no_sense_is_refused(fields: dict[str, Any], reason: str) -> None:
    key = msgspec.structs.replace(api_key("k1", "acme"), **fields)

    assert reason in await KeyStore().refusal("create", key)


async def test_a_key_that_was_hashed_with_another_secret_is_refused() -> None:
    keys, key = KeyStore(), api_key("k1", "acme")
    with pytest.raises(KeyRefusedError, match="different secrets"):
        await keys.change("create", key, secret="another")
    with pytest.raises(KeyRefusedError, match="different secrets"):
        await keys.writer.change(ChangeApiKey(action="create", key=key), "alice")
    await keys.change("create", key)

    assert await keys.change("revoke", key, secret="another") is not None


async def test_a_taken_id_is_refused_and_an_unknown_one_cannot_be_changed() -> None:
    keys = KeyStore()
    await keys.change("create", api_key("k1", "acme"))

    assert "already" in await keys.refusal("create", api_key("K-1", "other"))
    for action in ("rotate", "revoke"):
        assert "there is no key" in await keys.refusal(action, api_key("k2", "acme"))


@pytest.mark.parametrize(
    ("ends", "asked", "then"),
    [(0.0, NOW + 60, NOW + 60), (NOW + 90, NOW + 60, NOW + 60), (NOW + 30, NOW + 60, NOW + 30), (0.0, 5.0, NOW)],
)
async def test_rotating_never_lengthens_a_key(ends: float, asked: float, then: float) -> None:
    keys, key = KeyStore(), api_key("k1", "acme", expires_at=ends)
    await put_key(keys.store, key)
    await keys.change("rotate", msgspec.structs.replace(key, expires_at=asked, tenant="mallory", models=["*"]))

    assert await keys.stored(key) == msgspec.structs.replace(key, expires_at=then)


@pytest.mark.parametrize("fields", [{"revoked_at": NOW - 1}, {"expires_at": NOW}])
async def test_a_key_that_is_no_longer_valid_is_not_rotated(fields: dict[str, float]) -> None:
    keys, key = KeyStore(), msgspec.structs.replace(api_key("k1", "acme"), **fields)
    await put_key(keys.store, key)

    assert "no longer valid" in await keys.refusal("rotate", msgspec.structs.replace(key, expires_at=NOW + 60))


async def test_of_two_leaders_that_change_a_key_at_once_both_changes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, key = KeyStore(), api_key("k1", "acme")
    await put_key(keys.store, key)
    get, waits = keys.store.get, asyncio.Event()

    async def slow(name: str) -> Any:
        found = await get(name)
        if not waits.is_set():
            waits.set()
            await keys.change("rotate", msgspec.structs.replace(key, expires_at=NOW + 60))
        return found

    monkeypatch.setattr(keys.store, "get", slow)
    await keys.change("revoke", key)

    stored = await keys.stored(key)
    assert (stored.expires_at, stored.revoked_at) == (NOW + 60, NOW)


async def test_a_store_that_is_away_and_a_damaged_value_are_refusals() -> None:
    keys, key = KeyStore(), api_key("k1", "acme")
    await keys.store.put(name_of_key(key.id), b"{", after=0)
    assert "does not decode" in await keys.refusal("revoke", key)

    keys.available = False
    with pytest.raises(KeyRefusedError, match="does not answer"):
        await keys.change("revoke", key)
    with pytest.raises(StoreUnavailableError):
        await keys.store.read()
