"""The names that a pool serves, against a twin that asks every instance."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceLeft
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.placement import fleet_view
from pointsman_ingress.placement.fleet_view import FleetView
from tests.support.events import joined, reported

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


@pytest.mark.parametrize("seed", range(30))
def test_names_follow_reports_departures_and_other_models(seed: int) -> None:
    """A view that is told of each change, and one that is told of those that are left in their order, know the same names."""
    chance, view, said = Random(seed), view_of([]), dict[str, dict[str, Any]]()
    for number in range(60):
        name, fields = (
            f"engine-{chance.randrange(6)}",
            dict[str, Any](aliases=chance.sample(NAMES, chance.randrange(3))),
        )
        kind = chance.choice(["join", "report", "leave"])
        event: LogEvent | None = None
        if kind == "join":
            fields["model"] = chance.choice("mn")
            event = joined(
                name, epoch=number + 1, url="http://127.0.0.1:1", block_tokens=chance.choice([16, 32]), **fields
            )
            said[name] = {"epoch": event.epoch, "block_tokens": event.block_tokens, **fields}
        elif name in said and kind == "report":
            event = replace(reported(name, 0, [], epoch=said[name]["epoch"]), **fields)
            said[name] |= fields
        elif name in said:
            event = InstanceLeft(at=0.0, instance=InstanceId(name), epoch=said.pop(name)["epoch"], reason="")
        if event is not None:
            view._apply(LogEntry(sequence=number + 1, subject="", payload=b"", event=event))
        serving = [i for i in view.instances if not i.unschedulable]

        if serving:
            assert view.models.keys() == {name for i in serving for name in (i.model, *said[i.id]["aliases"])}
            assert view.block_tokens == serving[0].block_tokens


def test_a_report_that_changes_no_name_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cost a millisecond with 1,500 instances."""
    view, updates = view_of([{"adapters": ["a"]}] * 5), list[None]()
    monkeypatch.setattr(view, "_update_models", lambda: updates.append(None))
    for number in range(1, 6):
        event = replace(reported(f"engine-{number:03}", 3, [], at=float(number)), adapters=["a"])
        view._apply(LogEntry(sequence=5 + number, subject="", payload=b"", event=event))

    assert not updates


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
