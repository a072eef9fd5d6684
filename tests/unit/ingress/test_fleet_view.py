"""The names that a pool serves, against a twin that asks every instance."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.ports import LogEntry
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.placement import fleet_view
from pointsman_ingress.placement.fleet_view import FleetView
from tests.support.events import joined

NAMES = ["m", "a", "b", "c"]


def view_of(joins: list[dict[str, Any]]) -> FleetView:
    view = FleetView(ScaledClock(), HealthBoard(), EngineUrls())
    for number, fields in enumerate(joins, 1):
        event = joined(f"engine-{number:03}", url="http://127.0.0.1:1", **fields)
        view._apply(LogEntry(sequence=number, subject="", payload=b"", event=event))
    return view


@pytest.mark.parametrize("seed", range(30))
def test_a_name_is_what_most_instances_say_that_it_is(seed: int) -> None:
    chance = Random(seed)
    joins = [{kind: chance.sample(NAMES, chance.randint(0, 3)) for kind in ("aliases", "adapters")} for _ in range(9)]
    told = Counter[tuple[str, str]]()
    for fields in joins:
        adapters = {name: name for name in fields["adapters"] if name != "m"}
        told.update((dict.fromkeys(fields["aliases"], "") | adapters | {"m": ""}).items())

    models = view_of(joins).models

    assert models.keys() == {name for name, _ in told}
    assert all(told[name, model.adapter] == max(told[name, ""], told[name, name]) for name, model in models.items())


def test_instances_that_say_the_same_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress took 20 s to learn of 1,500 instances."""
    asked, names_of = 0, fleet_view._names_of

    def counted(*named: Any) -> Any:
        nonlocal asked
        asked += 1
        return names_of(*named)

    monkeypatch.setattr(fleet_view, "_names_of", counted)
    view_of([{"adapters": ["a"]}] * 50)

    assert asked <= 100
