"""The ingress tells the engine whose request it is, and changes nothing else."""

import json
from typing import Any

import pytest

from pointsman.primitives import Tenant
from pointsman_ingress.engine.body_rewrites import add_tenant


@pytest.mark.parametrize(
    ("theirs", "sent"),
    [
        ({}, {}),
        ({"vllm_xargs": {"top": 1, "pointsman_client": "somebody-else"}}, {"top": 1}),
        ({"vllm_xargs": None}, {}),
        ({"metadata": {"vllm_xargs": "not ours"}}, {}),
    ],
)
def test_the_tenants_name_is_added_and_what_the_client_says_in_its_place_does_not_count(
    theirs: dict[str, Any], sent: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": '{"}'}], **theirs}

    named = json.loads(add_tenant(json.dumps(body).encode() + b" \n", Tenant('a"b')))

    assert named.pop("vllm_xargs") == {**sent, "pointsman_client": 'a"b'}
    assert named == {name: value for name, value in body.items() if name != "vllm_xargs"}


def test_a_field_that_is_written_strangely_does_not_win() -> None:
    named = add_tenant(b'{"model": "m", "vllm\\u005fxargs": {"pointsman_client": "x"}}', Tenant("a"))

    assert json.loads(named)["vllm_xargs"] == {"pointsman_client": "a"}
