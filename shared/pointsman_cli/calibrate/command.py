"""`pointsman calibrate URL`: measures one engine, fits its cost model, and writes the calibration file for its worker."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import click
import msgspec

from pointsman.adapters.calibration_file import Calibration, Measurement, write_calibration
from pointsman.bounds import Bounds
from pointsman.contracts.fleet import DecodeCost
from pointsman.primitives import EngineSeconds, Tokens
from pointsman.runtime.engine_keys import ANY, EngineKeys, EngineKeysType
from pointsman.runtime.number_types import Whole
from pointsman_cli.calibrate.fitting import fitted, relative_error
from pointsman_cli.calibrate.measuring import DECODED, SHORTEST, Engine, EngineError, Target, rounds
from pointsman_cli.event_loop import run_command
from pointsman_cli.options import CONTEXT, POSITIVE, http_url, json_switch
from pointsman_cli.output_file import OUTPUT_FILE, print_json
from pointsman_cli.terminal import output_console, print_line, table

LONGEST_DEFAULT: Tokens = 8192
WARMING_PROMPTS = 2
MEASURING_SECONDS_MAX = 180.0


@dataclass
class _Samples:
    seconds: dict[tuple[Tokens, Tokens], list[EngineSeconds]] = field(default_factory=dict)
    token_seconds: list[EngineSeconds] = field(default_factory=list)

    def measurements(self) -> list[Measurement]:
        return [
            Measurement(total=total, cached=cached, seconds=median(times), repeats=len(times))
            for (total, cached), times in sorted(self.seconds.items())
        ]


@click.command("calibrate", context_settings=CONTEXT)
@click.argument("url", callback=http_url)
@click.option("--model", default="", help="Model of the engine. Default: its first.")
@click.option("--out", type=OUTPUT_FILE, help="Output file. Default: MODEL.calibration.json.")
@click.option("--repeat", type=Whole(Bounds(1, 100)), default=3, show_default=True, help="Times each prompt is sent.")
@click.option(
    "--input-tokens-max",
    "longest",
    type=Whole(Bounds(2 * SHORTEST)),
    default=LONGEST_DEFAULT,
    show_default=True,
    help="Longest prompt, limited by the model.",
)
@click.option("--speed", type=POSITIVE, default=1.0, show_default=True, help="Speed-up of a simulated engine.")
@click.option(
    "--api-key",
    envvar="POINTSMAN_ENGINE_API_KEY",
    default="",
    type=EngineKeysType(),
    help="API key of the engine; of [INSTANCE=]KEY,... that of any instance.",
    show_envvar=True,
)
@json_switch
def calibrate_command(
    url: str, model: str, out: Path | None, repeat: int, longest: int, speed: float, api_key: str, as_json: bool
) -> None:
    """Measure prefill times of the engine at URL and fit its cost model.

    Sends prompts of several lengths, cold and partly cached, one at a time, for at most 3 minutes, and fits
    seconds = fixed + max(floor, a * new tokens + b * (total² - cached²)). The engine should be idle; its cache may be
    evicted. The worker later corrects the model by live traffic.

    \b
      pointsman calibrate http://gpu-1:8000
      pointsman-worker --engine-url http://gpu-1:8000 --engine-calibration my-model.calibration.json ...
      POINTSMAN_ENGINE_CALIBRATION=my-model.calibration.json pointsman up --engine http://gpu-1:8000
    """
    report = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    try:
        measuring = _measure(
            url, model, api_key=EngineKeys(api_key).of(ANY), repeat=repeat, longest=longest, report=report
        )
        target, samples = run_command(measuring)
        calibration = _calibrated(target, samples, speed)
    except (EngineError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", target.model).strip("-.") or "engine"
    path = out or Path(f"{name}.calibration.json")
    try:
        write_calibration(path, calibration)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror or error}") from error
    if as_json:
        print_json(calibration)
    else:
        _show(calibration, path)


async def _measure(
    url: str, model: str, *, api_key: str, repeat: int, longest: Tokens, report: Callable[[str], None]
) -> tuple[Target, _Samples]:
    samples = _Samples()
    async with Engine(url, api_key=api_key) as engine:
        target = await engine.describe(model)
        report(f"{target.model} at {target.url}, blocks of {target.block_tokens} tokens")
        if target.busy:
            report(f"it is busy with {target.busy} requests: measured times are too long")
        bound = min(longest, target.max_model_len - DECODED) if target.max_model_len else longest
        if bound < 2 * SHORTEST:
            raise EngineError(f"the model takes {target.max_model_len} tokens, too few to measure anything")
        planned = list(rounds(bound, target.block_tokens))
        for _ in range(WARMING_PROMPTS):
            await engine.time(target, engine.fresh_prompt(SHORTEST), expected_cached=0, output=1)
        deadline = time.monotonic() + MEASURING_SECONDS_MAX
        for turn in range(repeat):
            for plans in planned:
                if time.monotonic() > deadline:
                    done = f"round {turn + 1} of {repeat} ends before {plans[0].total} tokens"
                    report(f"{MEASURING_SECONDS_MAX:g} s are over: {done}")
                    return target, samples
                times = []
                async for timing in engine.measured(target, plans):
                    samples.seconds.setdefault((timing.total, timing.cached), []).append(timing.seconds)
                    times.append(f"{timing.seconds:.3f} s with {timing.cached:,} cached")
                report(f"round {turn + 1}: {plans[0].total:>7,} tokens: {', '.join(times)}")
            timing = await engine.time(target, engine.fresh_prompt(SHORTEST), expected_cached=0, output=DECODED)
            samples.token_seconds.append(timing.token_seconds)
    return target, samples


def _calibrated(target: Target, samples: _Samples, speed: float) -> Calibration:
    """The fit, in engine seconds. Raises ValueError with fewer than three points."""
    points = [msgspec.structs.replace(point, seconds=point.seconds * speed) for point in samples.measurements()]
    cost = fitted(points)
    tokens = samples.token_seconds
    return Calibration(
        model=target.model,
        prefill=cost,
        error=relative_error(cost, points),
        measurements=points,
        decode=DecodeCost(step_s=median(tokens) * speed) if tokens else None,
        engine=target.url,
        engine_version=target.version,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _show(calibration: Calibration, path: Path) -> None:
    rows = table(">tokens", ">cached", ">measured", ">fitted", ">off by")
    for point in calibration.measurements:
        expected = calibration.prefill.seconds(point.total, point.cached)
        rows.add_row(
            f"{point.total:,}",
            f"{point.cached:,}",
            f"{point.seconds:.4f} s",
            f"{expected:.4f} s",
            f"{expected / point.seconds - 1:+.1%}",
        )
    output_console().print(rows)
    cost = calibration.prefill
    print_line(
        f"seconds = {cost.fixed_s:.4g} + max({cost.floor_s:.4g}, {cost.per_token_s:.4g} * new"
        f" + {cost.per_token_squared_s:.4g} * (total² - cached²))"
    )
    if calibration.decode is not None:
        print_line(f"a token of one answer: {calibration.decode.step_s:.4g} s")
    print_line(f"median error {calibration.error:.1%}; written to {path}")
    print_line(f"for its worker: --engine-calibration {path}")
