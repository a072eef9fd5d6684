"""Gauges of engines show the State, and are set only when they change."""

from uuid import uuid4

import pytest
from prometheus_client import REGISTRY, Gauge

from pointsman.policies.policy_set import policy_set
from pointsman.primitives import PoolName
from pointsman_scheduler.fleet_status import FleetGauges
from tests.support.busy_pool import BusyPool


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines whose gauges were set."""
    found: list[str] = []
    set_gauge = Gauge.set

    def noting(gauge: Gauge, value: float) -> None:
        found.extend(label for label in gauge._labelvalues if label.startswith("engine-"))
        set_gauge(gauge, value)

    monkeypatch.setattr(Gauge, "set", noting)
    return found


def shown(pool: PoolName, name: str, engine: str) -> float | None:
    return REGISTRY.get_sample_value(f"pointsman_engine_{name}", {"pool": pool, "engine": engine})


def test_only_what_changed_is_set(writes: list[str]) -> None:
    pool, busy = PoolName(uuid4().hex), BusyPool(3, "pointsman")
    gauges = FleetGauges(pool, policy_set())
    gauges.show(busy.state)
    assert set(writes) == {"engine-000", "engine-001", "engine-002"}
    writes.clear()

    gauges.show(busy.state)
    assert not writes

    busy.follow(busy.dispatcher.route(busy.arrive(), busy.now))
    gauges.show(busy.state)
    (request,) = busy.state.workload.requests.values()
    assert set(writes) == {request.instance}
    assert [shown(pool, "prefill_requests", name) for name in sorted(busy.engines)] == [
        float(name == request.instance) for name in sorted(busy.engines)
    ]


def test_gauges_of_an_engine_that_left_go_and_come_back_whole() -> None:
    pool, busy = PoolName(uuid4().hex), BusyPool(2, "pointsman")
    gauges, everyone = FleetGauges(pool, policy_set()), busy.state.fleet
    gauges.show(busy.state)
    busy.state.fleet = BusyPool(1, "pointsman").state.fleet
    gauges.show(busy.state)
    assert shown(pool, "cached_blocks", "engine-001") is None
    assert shown(pool, "cached_blocks", "engine-000") == 0.0

    busy.state.fleet = everyone
    gauges.show(busy.state)

    assert shown(pool, "cached_blocks", "engine-001") == 0.0
    labels = {"pool": pool, "engine": "engine-001", "knowledge": str(everyone.instances[1].knowledge)}
    assert REGISTRY.get_sample_value("pointsman_engine_cache_knowledge", labels) == 1.0
