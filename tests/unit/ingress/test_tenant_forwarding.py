"""The ingress adds the tenant to request bodies and changes nothing else."""

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
def test_the_tenant_is_added_and_overrides_the_clients_value(theirs: dict[str, Any], sent: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": '{"}'}], **theirs}

    named = json.loads(add_tenant(json.dumps(body).encode() + b" \n", Tenant('a"b')))

    assert named.pop("vllm_xargs") == {**sent, "pointsman_client": 'a"b'}
    assert named == {name: value for name, value in body.items() if name != "vllm_xargs"}


def test_an_escaped_field_name_does_not_override_the_tenant() -> None:
    named = add_tenant(b'{"model": "m", "vllm\\u005fxargs": {"pointsman_client": "x"}}', Tenant("a"))

    assert json.loads(named)["vllm_xargs"] == {"pointsman_client": "a"}
