"""Options of a workload: a trace or a generator."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from pointsman.primitives import Tokens
from pointsman.simulation.workload import GENERATORS, TraceError, WorkloadRequest, input_capped, read_trace
from pointsman_cli.options import with_all

Command = TypeVar("Command", bound=Callable[..., object])

GENERATED_RATE = 4.0


def workload_options(command: Command) -> Command:
    return with_all(
        click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Mooncake-format trace (JSONL)."),
        click.option("--workload", type=click.Choice(tuple(GENERATORS)), help="Generated workload instead of a trace."),
    )(command)


def check_one_workload(trace: Path | None, workload: str | None) -> None:
    """Raises click.UsageError unless exactly one is given."""
    if (trace is None) == (workload is None):
        raise click.UsageError("give --trace or --workload, one of them")


def workload_name(trace: Path | None, workload: str | None) -> str:
    return trace.name if trace else workload or ""


def workload_requests(
    trace: Path | None,
    workload: str | None,
    *,
    requests: int | None,
    seed: int,
    rate: float | None = None,
    input_tokens_max: Tokens | None = None,
) -> list[WorkloadRequest]:
    """At most `requests`. Generated ones arrive at `rate`, those of a trace at its own times. Raises
    click.ClickException."""
    chance = random.Random(seed)
    if trace is not None:
        try:
            return read_trace(trace, limit=requests, chance=chance, input_tokens_max=input_tokens_max)
        except TraceError as error:
            raise click.ClickException(str(error)) from error
    generated = GENERATORS[workload or ""](requests or 0, rate=rate or GENERATED_RATE, chance=chance)
    return input_capped(generated, input_tokens_max)
