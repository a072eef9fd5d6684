"""The small parts of the ingress: keys that let clients in, request ids, usage, and the view of the fleet."""

import hashlib
import os
import re
from pathlib import Path
from random import Random

import pytest
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.commands import RouteRejected
from pointsman.primitives import RequestId, WallSeconds
from pointsman_ingress.engine.usage import Usage, usage_in
from pointsman_ingress.http.api_keys import Keyring, KeysFileError
from pointsman_ingress.http.call import RequestIds
from pointsman_ingress.http.errors import ApiError, rejected, unknown_model
from pointsman_ingress.prompt.block_keys import BlockKeys


def rejection(reason: str, detail: str = "", *, retry_after: float = 1.0) -> RouteRejected:
    return RouteRejected(
        request=RequestId("r"), attempt=1, status=429, reason=reason, detail=detail, retry_after=retry_after
    )


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# API keys\n\nalice {digest('sk-1')}\nalice {digest('sk-2')}\nbob {digest('sk-3')}\n")
    return path


def test_a_key_names_its_tenant(keys_file: Path) -> None:
    keyring = Keyring(keys_file, ScaledClock())

    assert [keyring.tenant(bearer(key)) for key in ("sk-1", "sk-2", "sk-3")] == ["alice", "alice", "bob"]


@pytest.mark.parametrize(
    "headers", [{}, bearer("sk-4"), bearer(""), bearer(digest("sk-1")), {b"authorization": b"Basic sk-1"}]
)
def test_invalid_keys_are_refused(keys_file: Path, headers: dict[bytes, bytes]) -> None:
    with pytest.raises(ApiError) as refusal:
        Keyring(keys_file, ScaledClock()).tenant(headers)

    assert refusal.value.status == 401
    assert "sk-" not in refusal.value.message


def test_without_a_keys_file_no_key_is_required() -> None:
    assert Keyring(None, ScaledClock()).tenant({}) is None


def test_a_keys_file_with_a_plain_key_in_it_is_refused_without_repeating_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice sk-secret\n")

    with pytest.raises(KeysFileError, match="line 1") as error:
        Keyring(path, ScaledClock())
    assert "sk-secret" not in str(error.value)


# Writing a small file in an async test does not block other tasks.
# ruff: noqa: ASYNC240


async def test_a_deleted_key_stops_working_without_a_restart(keys_file: Path) -> None:
    keyring = Keyring(keys_file, ImpatientClock(stop_after=2))
    keys_file.write_text(f"bob {digest('sk-3')}\n")
    os.utime(keys_file, ns=(1, 1))

    with pytest.raises(StopFollowingError):
        await keyring.follow()

    assert keyring.tenant(bearer("sk-3")) == "bob"
    with pytest.raises(ApiError):
        keyring.tenant(bearer("sk-1"))


async def test_an_unreadable_keys_file_keeps_the_previous_keys(keys_file: Path) -> None:
    keyring = Keyring(keys_file, ImpatientClock(stop_after=3))
    keys_file.write_text("nonsense\n")

    with pytest.raises(StopFollowingError):
        await keyring.follow()

    assert keyring.tenant(bearer("sk-1")) == "alice"


def test_ids_are_fresh_and_long_enough_not_to_be_guessed() -> None:
    ids = RequestIds(Random(0))
    given = [ids.fresh() for _ in range(1000)]

    assert len(set(given)) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{24}", each) for each in given)  # 96 bits


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (
            b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}',
            Usage(7, 2, 4),
        ),
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":null}}', Usage(7, 2, -1)),
        (b'{"usage":null}', Usage()),
        (b"{}", Usage()),
        (b"no json", Usage()),
    ],
)
def test_usage_is_the_engines_or_unknown(answer: bytes, usage: Usage) -> None:
    assert usage_in(answer) == usage


def test_retry_after_is_whole_wall_seconds_and_at_least_one() -> None:
    waits = [
        dict(rejected(rejection("overloaded", retry_after=wall), speed=1.0).headers)[b"retry-after"]
        for wall in (0, 0.2, 1.2)
    ]

    assert waits == [b"1", b"1", b"2"]


@pytest.mark.parametrize(
    ("reason", "detail", "message"),
    [
        ("queue_full", "9 requests wait already", "9 requests wait already. Ask again later."),
        ("slo_tpot", "", "The request was refused. Ask again later, or with a longer objective (x-slo-tpot-ms)."),
    ],
)
def test_a_rejection_has_a_reason_and_advice(reason: str, detail: str, message: str) -> None:
    assert rejected(rejection(reason, detail), speed=1.0).message == message


def test_an_unknown_model_is_answered_with_some_known_ones() -> None:
    few, many = (unknown_model("m", [f"m{number}" for number in range(count)]).message for count in (2, 1000))

    assert few == "The model 'm' does not exist; there is: m0, m1."
    assert many.endswith(", m19, and 980 more in /v1/models.")


def test_salt_and_model_change_the_keys_of_equal_prompts() -> None:
    keys = BlockKeys(secret=b"s", block_tokens=lambda: 4)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]

    assert len(keys.packed("m", tokens)) == 16
    assert keys.last("m", tokens) == keys.packed("m", tokens)[8:]
    assert len({keys.packed("m", tokens), keys.packed("n", tokens), keys.packed("m", tokens, cache_salt="a")}) == 3


class StopFollowingError(Exception):
    """Ends a loop that would go on without end."""


class ImpatientClock(ScaledClock):
    """Sleeps for no time, and only so often."""

    def __init__(self, *, stop_after: int) -> None:
        super().__init__()
        self._left = stop_after

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        self._left -= 1
        if self._left < 0:
            raise StopFollowingError
