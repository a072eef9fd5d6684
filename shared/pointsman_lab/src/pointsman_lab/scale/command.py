"""`pointsman-lab scale`: how the control plane of a pool runs with 16 to 512 instances on this machine. Everything but the
engines is real: nats-server, two schedulers with their checkpointers, recorder, rebalancer and scaler. The instances and
their ingress are one process (`load`)."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pointsman.runtime.telemetry import configure_logging
from pointsman_cli.options import CONTEXT, POSITIVE, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table
from pointsman_lab.scale.measure import ScaleOptions, measured

EACH_MAX = 8.0
"""Requests a second and instance: smaller pools get less than the rate."""
FULL = ScaleOptions(instances=0, rate=0.0, seconds=15.0, warm_seconds=12.0, blocks=2_000)
QUICK = ScaleOptions(instances=0, rate=0.0, seconds=3.0, warm_seconds=3.0, blocks=1_000, followers=False)
COLUMNS = (
    ("instances", "instances"),
    ("decisions_a_second", "decisions/s"),
    ("decision_p50_ms", "P50 ms"),
    ("decision_p99_ms", "P99 ms"),
    ("log_kb_a_second", "log kB/s"),
    ("log_bytes_a_request", "B a request"),
    ("log_bytes_an_engine_and_second", "B an engine, s"),
    ("fold_entries_a_second", "fold/s"),
    ("take_over_seconds", "take-over s"),
    ("start_seconds", "start s"),
)


@click.command("scale", context_settings=CONTEXT)
@click.option("--instances", default="16,64,256,512", show_default=True, help="Sizes of the pool, comma-separated.")
@click.option(
    "--rate", type=POSITIVE, default=400.0, show_default=True, help="Requests a second; at most 8 an instance."
)
@click.option("--seconds", type=POSITIVE, help="Measured, for each size. [default: 15]")
@click.option("--quick", is_flag=True, help="A few seconds for each size, with small caches, without the followers.")
@out_option
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the picture into this file.")
def scale_command(
    instances: str, rate: float, seconds: float | None, quick: bool, out: Path | None, plot: Path | None
) -> None:
    """Measure a pool of many simulated instances over real NATS: decisions, log, memory, take-over, start.

    \b
      pointsman-lab scale                                     16, 64, 256 and 512 instances: 5 minutes on two cores
      pointsman-lab scale --quick --instances 16 --rate 50 --out scale.json
    """
    configure_logging("error", "text")
    found: list[dict[str, Any]] = []
    for size in map(int, instances.split(",")):
        options = replace(QUICK if quick else FULL, instances=size, rate=min(rate, EACH_MAX * size))
        found.append(asyncio.run(measured(replace(options, seconds=seconds or options.seconds))))
        click.echo(f"{size} instances are measured", err=True)
        if out:
            write_json(out, {"rows": found})
    Console().print(_table(found))
    for row in found:
        click.echo(f"{row['instances']} instances, MB: {_listed(row['memory_mb'])}")
        click.echo(f"{row['instances']} instances, CPU ms a request: {_listed(row['cpu_ms_a_request'])}")
    if plot:
        from pointsman_lab.scale.picture import draw  # matplotlib is an extra

        draw(found, plot)


def _table(rows: list[dict[str, Any]]) -> Any:
    made = table(*(f">{title}" for _, title in COLUMNS), title="A pool of simulated instances, wall time")
    for row in rows:
        made.add_row(*("-" if row[name] is None else f"{row[name]:,}" for name, _ in COLUMNS))
    return made


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
