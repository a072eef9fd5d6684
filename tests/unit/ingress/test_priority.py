"""A client may ask for less than its tenant has, not for more."""

from typing import Any

import pytest

from pointsman.contracts.tenants import Priority
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.http.request_headers import priority_of


@pytest.mark.parametrize(
    ("asks", "tier", "highest", "given"),
    [
        ("", None, "standard", "standard"),
        ("", None, "batch", "batch"),
        ("", "flex", "interactive", "batch"),
        ("", "priority", "interactive", "interactive"),
        ("", "priority", "standard", "standard"),
        ("", "fast", "batch", "batch"),
        ("", "default", "interactive", "standard"),
        ("", "auto", "interactive", "interactive"),
        ("", "standard_only", "interactive", "standard"),
        ("", "no tier", "interactive", "interactive"),
        ("", 7, "interactive", "interactive"),
        ("", ["flex"], "interactive", "interactive"),
        ("batch", None, "interactive", "batch"),
        ("Standard", "flex", "interactive", "standard"),
        ("interactive", None, "standard", "standard"),
    ],
)
def test_the_class_is_the_lower_of_the_tenants_and_the_clients(
    asks: str, tier: Any, highest: Priority, given: Priority
) -> None:
    headers = {b"x-pointsman-priority": asks.encode()} if asks else {}

    assert priority_of(headers, tier, highest) == given


def test_an_objective_of_llm_d_counts_if_it_is_named_as_a_class() -> None:
    assert priority_of({b"x-llm-d-inference-objective": b"batch"}, None, "standard") == "batch"
    assert priority_of({b"x-llm-d-inference-objective": b"premium-traffic"}, "flex", "standard") == "batch"


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ApiError, match="batch, standard, interactive"):
        priority_of({b"x-pointsman-priority": b"urgent"}, None, "interactive")
