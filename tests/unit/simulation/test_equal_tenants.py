"""Tenants that ask equally much get equally much, past saturation."""

import random

from pointsman.simulation.metrics import summarise
from pointsman.simulation.simulator import Scenario, simulate
from pointsman.simulation.workload import ARRIVALS, GENERATORS


def test_equal_tenants_get_equal_service_without_admission() -> None:
    """Over half a minute, in which each asks for some dozen trees. Without the rules for shares the index is .88."""
    asked = GENERATORS["tree_of_thoughts"](6000, rate=1.0, chance=random.Random(2))
    requests = list(ARRIVALS["poisson"](asked, rate=180.0, chance=random.Random(2)))

    report = summarise(simulate(Scenario(routing="pointsman", ordering="fair_edf"), requests), warmup=1000)

    assert len(report.by_tenant) == 8
    assert report.jain is not None
    assert report.jain >= 0.95
