"""Tenants that ask equally much get equally much, past saturation."""

import random

from pointsman.simulation.metrics import summarise
from pointsman.simulation.simulator import Scenario, simulate
from pointsman.simulation.workload import ARRIVALS, GENERATORS


def test_equal_tenants_get_equal_service_without_admission() -> None:
    asked = GENERATORS["tree_of_thoughts"](3500, rate=1.0, chance=random.Random(0))
    requests = list(ARRIVALS["poisson"](asked, rate=180.0, chance=random.Random(0)))

    report = summarise(simulate(Scenario(routing="pointsman", ordering="fair_edf"), requests), warmup=1000)

    assert len(report.by_tenant) == 8
    assert report.jain is not None
    assert report.jain >= 0.95
