"""The fit of the cost model, its file, and what the worker makes of it; and how far off predictions were."""

from pathlib import Path
from random import Random

import pytest

from pointsman.adapters.calibration_file import (
    Calibration,
    CalibrationError,
    Measurement,
    read_calibration,
    write_calibration,
)
from pointsman.contracts.fleet import PrefillCost
from pointsman.state.correction import ERRORS_MAX, Correction
from pointsman.state.engine_profiles import PROFILES
from pointsman_cli.calibrate.fitting import fitted, relative_error
from pointsman_cli.calibrate.measuring import SHORTEST, rounds

COSTS = [
    *(profile.prefill_cost for profile in PROFILES.values()),
    PrefillCost(fixed_s=0.05, per_token_s=3e-3, per_token_squared_s=1e-6),
    PrefillCost(fixed_s=0.0, per_token_s=1e-3, per_token_squared_s=0.0),
]


def measured(cost: PrefillCost, *, noise: float = 0.0, seed: int = 1) -> list[Measurement]:
    chance = Random(seed)
    return [
        Measurement(
            total=plan.total,
            cached=plan.cached,
            seconds=cost.seconds(plan.total, plan.cached) * (1 + chance.uniform(-noise, noise)),
        )
        for plans in rounds(8192, 16)
        for plan in plans
    ]


@pytest.mark.parametrize("cost", COSTS)
def test_what_a_cost_model_makes_is_fitted_exactly(cost: PrefillCost) -> None:
    points = measured(cost)

    assert relative_error(fitted(points), points) < 1e-3


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_the_fit_by_less_than_itself(cost: PrefillCost, seed: int) -> None:
    found = fitted(measured(cost, noise=0.1, seed=seed))

    assert relative_error(found, measured(cost)) < 0.05
    assert min(found.fixed_s, found.per_token_s, found.per_token_squared_s, found.floor_s) >= 0


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fitted(measured(COSTS[0])[:2])


def test_rounds_cover_lengths_and_hits_in_whole_blocks() -> None:
    planned = list(rounds(1000, 32))

    assert [plans[0].total for plans in planned] == [64, 128, 256, 512, 1000]
    assert all(plans[0].cached == 0 for plans in planned)
    assert [plan.cached for plan in planned[-1]] == [0, 480, 928]
    assert all(plan.cached % 32 == 0 and plan.total - plan.cached >= 32 for plans in planned for plan in plans)
    assert SHORTEST == 64


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = Calibration(model="m", prefill=COSTS[0], error=0.02, measurements=measured(COSTS[0]), engine="http://e")
    write_calibration(tmp_path / "m.calibration.json", written)

    assert read_calibration(tmp_path / "m.calibration.json") == written


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"model": "m"'])
def test_what_is_no_calibration_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CalibrationError, match=r"other\.json"):
        read_calibration(path)


def test_how_far_off_predictions_were_is_told_of_the_newest() -> None:
    correction = Correction()
    assert correction.error is None

    correction.learn(predicted=1.0, observed=2.0, tokens=100)
    assert correction.error == pytest.approx(0.5)

    for _ in range(2 * ERRORS_MAX):
        correction.learn(predicted=1.0, observed=2.0, tokens=100)
    assert correction.error == pytest.approx(0.0, abs=0.01)
    assert len(correction.errors) == ERRORS_MAX
