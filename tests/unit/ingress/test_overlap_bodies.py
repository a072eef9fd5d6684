"""Bodies of `POST /kv/overlap` as nobody should write them: an error object for each, and nothing else is raised."""

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.overlap import OverlapRequest
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.overlap import _parsed, _request
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool
from pointsman_ingress.prompt.block_keys import BlockKeys

MODEL = Model("m", "m", "", 0.0)


class OnePool:
    block_keys = BlockKeys(secret=b"s", block_tokens=lambda: 16)


numbers = st.one_of(st.integers(), st.integers(0, 2**32 - 1), st.floats(), st.booleans(), st.none())
anything = st.recursive(
    st.one_of(numbers, st.text()), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)
prompts = st.fixed_dictionaries(
    {}, optional={"token_ids": st.lists(numbers) | anything, "block_keys": st.text() | anything, "x": anything}
)
bodies = st.fixed_dictionaries(
    {"prompts": st.lists(prompts) | anything},
    optional={"model": st.text() | anything, "cache_salt": st.text() | anything, "y": anything},
)


def asked(body: bytes) -> OverlapRequest | ApiError:
    try:
        parsed = _parsed(body)
        return _request(parsed, cast("Pool", OnePool), MODEL, parsed.cache_salt)
    except ApiError as error:
        return error


@given(st.binary(), bodies, st.integers(0, 200))
def test_whatever_is_posted_is_a_request_or_an_error_of_the_asker(noise: bytes, body: Any, cut: int) -> None:
    written = json.dumps(body).encode()
    for sent in (noise, written, written[:cut] + noise + written[cut:]):
        found = asked(sent)

        assert isinstance(found, OverlapRequest) or found.status == 400


@pytest.mark.parametrize("ids", [[0], [2**32 - 1] * 16, list(range(1000))])
def test_token_ids_become_the_keys_of_whole_blocks(ids: list[int]) -> None:
    found = asked(json.dumps({"prompts": [{"token_ids": ids}]}).encode())

    assert isinstance(found, OverlapRequest)
    assert len(found.prompts[0].block_keys) == len(ids) // 16 * 8
