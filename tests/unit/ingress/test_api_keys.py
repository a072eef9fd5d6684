"""API keys: whom they let in, for what, and how changes of the store reach them."""

import asyncio
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.access import ENDPOINTS, ApiKey, key_hash, name_of_key
from pointsman.ports import StoredValue, ValuesRead
from pointsman.primitives import EngineSeconds, engine_time_of
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.endpoints import BY_PATH
from pointsman_ingress.http.api_keys import KEYS_PART, ApiKeys
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.overlap import PATH
from pointsman_lab.memory.stores import MemoryKeyValueStore
from tests.support.api_keys import SECRET, api_key, put_key
from tests.support.waiting import eventually

TODAY = 1_800_000_000.0


class FixedClock(ScaledClock):
    def __init__(self, at: float, speed: float) -> None:
        super().__init__(speed)
        self.at = at

    @override
    def now(self) -> EngineSeconds:
        return engine_time_of(self.at, self.speed)


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def read(*keys: ApiKey, whole: bool = True) -> ValuesRead:
    values = [StoredValue(name_of_key(key.id), msgspec.json.encode(key), n) for n, key in enumerate(keys, 1)]
    return ValuesRead(values, whole=whole)


def keys_with(*keys: ApiKey, at: float = TODAY, speed: float = 10.0) -> tuple[ApiKeys, FixedClock]:
    clock = FixedClock(at, speed)
    known = ApiKeys(SECRET, clock, HealthBoard())
    known.take(read(*keys))
    return known, clock


def refused(keys: ApiKeys, key: str) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        keys.identity(key.encode())
    return refusal.value


@pytest.mark.parametrize("form", ["Bearer sk-1", "bearer sk-1", "Bearer  sk-1 "])
async def test_a_key_names_its_tenant(form: str) -> None:
    keys, _ = keys_with(api_key("sk-1", "alice"), api_key("sk-2", "bob"))
    authentication = Authentication(keys)

    assert await authentication.identity({b"authorization": form.encode()}) == Identity(api_key("sk-1", "alice").tenant)
    assert await authentication.identity({b"x-api-key": b"sk-2"}) == Identity(api_key("sk-2", "bob").tenant)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("sk-9"),
        bearer("sk-expired"),
        bearer("sk-revoked"),
        bearer("sk-other-deployment"),
        bearer(api_key("sk-1", "alice").digest.hex()),
        {b"authorization": b"Bearer " + api_key("sk-1", "alice").digest},
        {b"authorization": b"Basic sk-1"},
        {b"x-api-key": b""},
    ],
)
async def test_all_other_credentials_are_refused_alike(headers: dict[bytes, bytes]) -> None:
    keys, _ = keys_with(
        api_key("sk-1", "alice"),
        api_key("sk-expired", "alice", expires_at=TODAY),
        api_key("sk-revoked", "alice", revoked_at=TODAY - 1),
        api_key("sk-other-deployment", "alice", secret="other"),
    )
    with pytest.raises(ApiError) as refusal:
        await Authentication(keys).identity(headers)

    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
    assert refusal.value.message == refused(keys, "nonsense").message
    assert refusal.value.headers == refused(keys, "nonsense").headers


async def test_without_required_credentials_everybody_is_admitted() -> None:
    authentication = Authentication()

    assert not authentication.required
    assert await authentication.identity({}) is None
    assert await authentication.identity(bearer("anything")) is None


def test_a_key_expires_by_wall_time() -> None:
    keys, clock = keys_with(api_key("sk-1", "alice", expires_at=TODAY + 60))
    clock.at += 59
    assert keys.identity(b"sk-1").tenant == "alice"
    clock.at += 1

    assert refused(keys, "sk-1").status == 401


def test_changes_replace_what_was_known_of_a_key_and_nothing_else() -> None:
    keys, _ = keys_with(api_key("sk-1", "alice"), api_key("sk-2", "bob"))
    keys.take(read(api_key("sk-1", "alice", revoked_at=TODAY), api_key("sk-3", "carol"), whole=False))

    assert refused(keys, "sk-1").status == 401
    assert [keys.identity(key).tenant for key in (b"sk-2", b"sk-3")] == ["bob", "carol"]


def test_all_values_replace_all_keys() -> None:
    keys, _ = keys_with(api_key("sk-1", "alice"), api_key("sk-2", "bob"))
    keys.take(read(api_key("sk-2", "bob")))

    assert refused(keys, "sk-1").status == 401
    assert keys.identity(b"sk-2").tenant == "bob"


@pytest.mark.parametrize(
    "damage", [b"", b"{", b'{"id": "sk1"}', b'{"x":' + b"[" * 100_000, b'{"\xff\xfe": 1}', b" " * 300_000]
)
def test_a_key_that_no_longer_decodes_is_no_key(damage: bytes) -> None:
    keys, _ = keys_with(api_key("sk-1", "alice"), api_key("sk-2", "bob"))
    keys.take(ValuesRead([StoredValue("key.sk1", damage, 9)], whole=False))

    assert refused(keys, "sk-1").status == 401
    assert keys.identity(b"sk-2").tenant == "bob"


def test_a_value_that_is_stored_under_another_keys_name_is_no_key() -> None:
    keys, _ = keys_with()
    keys.take(ValuesRead([StoredValue("key.other", msgspec.json.encode(api_key("sk-1", "alice")), 1)], whole=False))

    assert refused(keys, "sk-1").status == 401


def test_before_the_first_reading_nobody_is_refused_for_good_and_the_process_is_not_ready() -> None:
    board = HealthBoard()
    keys = ApiKeys(SECRET, FixedClock(TODAY, 1.0), board)
    early = refused(keys, "sk-1")
    unready = KEYS_PART in board.missing_parts
    keys.take(ValuesRead([], whole=True, exists=False))

    assert (early.status, early.code, unready) == (503, "credentials_unread", True)
    assert refused(keys, "sk-1").status == 401
    assert board.ready


def test_a_store_that_is_gone_leaves_the_last_copy() -> None:
    board = HealthBoard()
    keys = ApiKeys(SECRET, FixedClock(TODAY, 1.0), board)
    keys.take(read(api_key("sk-1", "alice")))
    keys.take(ValuesRead([], whole=True, exists=False))

    assert keys.identity(b"sk-1").tenant == "alice"
    assert KEYS_PART in board.degraded_parts

    keys.take(read(api_key("sk-2", "bob")))
    assert refused(keys, "sk-1").status == 401
    assert board.whole


async def test_keys_follow_the_store() -> None:
    store, keys = MemoryKeyValueStore(poll_seconds=0.01), ApiKeys(SECRET, FixedClock(TODAY, 1.0), HealthBoard())
    following = asyncio.create_task(keys.follow(store))
    await put_key(store, api_key("sk-1", "alice"))
    await store.put("tenants", b"{}", after=0)

    await eventually(lambda: admits(keys, b"sk-1"))
    await put_key(store, api_key("sk-1", "alice", revoked_at=TODAY))
    await eventually(lambda: not admits(keys, b"sk-1"))
    following.cancel()


def admits(keys: ApiKeys, key: bytes) -> bool:
    try:
        keys.identity(key)
    except ApiError:
        return False
    return True


def test_keys_that_were_never_read_stay_missing_while_their_store_is_away() -> None:
    board = HealthBoard()
    keys = ApiKeys(SECRET, FixedClock(TODAY, 1.0), board)
    keys.take(ValuesRead([], whole=False, unread="no answer"))

    assert "no answer" in board.missing_parts[KEYS_PART]
    assert refused(keys, "sk-1").status == 503


@pytest.mark.parametrize(
    ("patterns", "model", "may"),
    [
        ([], "anything", True),
        (["llama-3"], "llama-3", True),
        (["llama-3"], "llama-3-70b", False),
        (["llama-*", "qwen"], "llama-3-70b", True),
        (["llama-*", "qwen"], "qwen", True),
        (["llama-*", "qwen"], "Llama-3", False),
        (["llama-?"], "llama-33", False),
        (["*" * 50 + "x"], "a" * 1000, False),
    ],
)
def test_models_are_matched_by_patterns(patterns: list[str], model: str, may: bool) -> None:
    assert Identity(api_key("a", "t").tenant, patterns).may_use(model) == may


def test_a_scope_is_refused_with_403_whether_or_not_there_is_such_a_model() -> None:
    identity = Identity(api_key("a", "t").tenant, ["llama-*"], ["/v1/embeddings"])
    identity.check_endpoint("/v1/embeddings")
    identity.check_model("llama-3")
    for check, asked in ((identity.check_endpoint, "/v1/completions"), (identity.check_model, "qwen")):
        with pytest.raises(ApiError) as refusal:
            check(asked)
        assert refusal.value.status == 403


def test_keys_can_be_restricted_to_exactly_the_endpoints_there_are() -> None:
    assert set(ENDPOINTS) == {*BY_PATH, PATH}


def test_digests_depend_on_the_secret_and_serve_no_other_purpose() -> None:
    import hashlib
    import hmac

    digest = key_hash("secret")(b"sk-1")

    assert len(digest) == 32
    assert digest != key_hash("secret2")(b"sk-1")
    assert digest not in (hmac.digest(b"secret", b"sk-1", "sha256"), hashlib.sha256(b"sk-1").digest())


def test_a_value_of_the_store_has_no_key_in_it() -> None:
    stored: Any = msgspec.json.encode(api_key("sk-very-secret", "alice"))

    assert b"sk-very-secret" not in stored
