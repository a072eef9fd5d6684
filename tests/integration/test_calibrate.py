"""`pointsman calibrate` against a simulated engine: it finds the cost that the engine was given."""

import asyncio
import json
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from pointsman.adapters.calibration_file import read_calibration
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_cli.calibrate.command import calibrate_command
from pointsman_cli.calibrate.measuring import SHORTEST, Engine, EngineError
from tests.support.engine_sim import running_engine

SPEED = 0.5
"""Slow, so that a busy machine's delays are small beside the engine's times."""

TRUE = PROFILES[DEFAULT_PROFILE].prefill_cost


async def test_the_cost_model_of_a_simulated_engine_is_found(tmp_path: Path) -> None:
    out = tmp_path / "sim.calibration.json"
    async with running_engine(speed=SPEED, block_size=32) as engine:
        arguments = [
            engine.url,
            "--input-tokens-max",
            "1024",
            "--repeat",
            "3",
            "--speed",
            str(SPEED),
            "--out",
            str(out),
            "--json",
        ]
        result = await asyncio.to_thread(CliRunner().invoke, calibrate_command, arguments)

    assert result.exit_code == 0, result.output
    calibration = read_calibration(out)
    assert json.loads(result.stdout)["prefill"]["fixed_s"] == calibration.prefill.fixed_s
    assert {(point.total, point.cached) for point in calibration.measurements} >= {(64, 0), (1024, 0), (1024, 512)}
    for total, cached in ((512, 0), (1024, 0), (1024, 512)):
        found, true = (cost.seconds(total, cached) for cost in (calibration.prefill, TRUE))
        assert 0.9 < found / true < 1.6, calibration
    assert calibration.decode is not None


async def test_where_no_engine_is_the_message_says_so(tmp_path: Path) -> None:
    arguments = ["http://127.0.0.1:9", "--out", str(tmp_path / "x.json")]
    result = await asyncio.to_thread(CliRunner().invoke, calibrate_command, arguments)

    assert result.exit_code == 1
    assert "no engine answers at http://127.0.0.1:9" in result.output
    assert not (tmp_path / "x.json").exists()


async def test_a_model_that_the_engine_does_not_serve_is_not_measured(tmp_path: Path) -> None:
    async with running_engine(model="this") as engine:
        arguments = [engine.url, "--model", "other", "--out", str(tmp_path / "x.json")]
        result = await asyncio.to_thread(CliRunner().invoke, calibrate_command, arguments)

    assert result.exit_code == 1
    assert "serves this, not 'other'" in result.output


async def test_an_engine_that_was_calibrated_before_is_measured_cold_again(tmp_path: Path) -> None:
    async with running_engine(speed=5.0) as engine:
        for name in ("first", "second"):
            arguments = [engine.url, "--input-tokens-max", "512", "--repeat", "2", "--out", str(tmp_path / name)]
            result = await asyncio.to_thread(CliRunner().invoke, calibrate_command, arguments)
            assert result.exit_code == 0, result.output

    first, second = (
        {(point.total, point.cached): point.repeats for point in read_calibration(tmp_path / name).measurements}
        for name in ("first", "second")
    )
    assert second == first
    assert first[512, 0] == 2


async def test_a_prompt_that_should_be_cold_and_is_cached_ends_the_measurement() -> None:
    async with running_engine() as engine:
        for turn in ("cold", "cached"):
            async with Engine(engine.url, api_key="", chance=Random(0)) as measured:
                target = await measured.describe("")
                prompt = measured.fresh_prompt(SHORTEST)
                if turn == "cold":
                    await measured.time(target, prompt, expected_cached=0, output=1)
                    continue
                with pytest.raises(
                    EngineError, match=r"48 of the 64 tokens of a new prompt cached.*empty its prefix cache"
                ):
                    await measured.time(target, prompt, expected_cached=0, output=1)
