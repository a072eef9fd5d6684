"""The small parts of the ingress: request ids, usage, and the view of the fleet."""

import re
from random import Random

import pytest

from pointsman.contracts.commands import RouteRejected
from pointsman.primitives import RequestId
from pointsman_ingress.engine.usage import Usage, usage_in
from pointsman_ingress.http.call import RequestIds
from pointsman_ingress.http.errors import rejected, unknown_model
from pointsman_ingress.prompt.block_keys import BlockKeys


def rejection(reason: str, detail: str = "", *, retry_after: float = 1.0) -> RouteRejected:
    return RouteRejected(
        request=RequestId("r"), attempt=1, status=429, reason=reason, detail=detail, retry_after=retry_after
    )


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
