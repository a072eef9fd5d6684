"""`pointsman-lab scale`: how the control plane of a pool runs with 16 to 512 instances on this machine. Everything but the
engines is real: nats-server, two schedulers with their checkpointers, recorder, rebalancer and scaler. The instances and
their ingress are one process (`load`)."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pointsman.runtime.structured_logs import configure_logging
from pointsman_cli.options import CONTEXT, POSITIVE
from pointsman_cli.output_file import write_file, write_json
from pointsman_cli.terminal import table
from pointsman_lab.scale.measure import ScaleOptions, measured
from pointsman_lab.scale.page import COLUMNS, Row, page, shown

EACH_MAX = 8.0
"""Requests a second and instance: smaller pools get less than the rate."""
FULL = ScaleOptions(instances=0, rate=0.0, seconds=15.0, warm_seconds=12.0, blocks=2_000)
QUICK = ScaleOptions(instances=0, rate=0.0, seconds=3.0, warm_seconds=3.0, blocks=1_000)
PANELS = (
    ("decision", "ms", (("decision_p50_ms", "P50"), ("decision_p99_ms", "P99"))),
    ("log of a request", "bytes", (("log_bytes_a_request", "all kinds"),)),
    ("without a decision", "s", (("take_over_seconds", "take-over"), ("start_seconds", "start from a checkpoint"))),
)
"""Of the picture: what grows with the number of instances, and what does not."""
NUMBERS, PAGE, PICTURE = "results/scale.json", "scale.md", "images/scale.png"


@click.command("scale", context_settings=CONTEXT)
@click.option("--instances", default="16,64,256,512", show_default=True, help="Sizes of the pool, comma-separated.")
@click.option(
    "--rate", type=POSITIVE, default=400.0, show_default=True, help="Requests a second; at most 8 an instance."
)
@click.option("--seconds", type=POSITIVE, help="Measured, for each size. [default: 15]")
@click.option("--quick", is_flag=True, help="A few seconds for each size, with small caches; writes only with --out.")
@click.option("--page", "page_only", is_flag=True, help=f"Measure nothing: render the page from {NUMBERS}.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Directory of {PAGE}, {NUMBERS} and {PICTURE}; other sizes in there stay.",
)
def scale_command(
    instances: str, rate: float, seconds: float | None, quick: bool, page_only: bool, out: Path | None
) -> None:
    """Measure a pool of many simulated instances over real NATS: decisions, log, memory, take-over, start.

    \b
      pointsman-lab scale --out docs                          16, 64, 256 and 512 instances: 8 minutes on two cores
      pointsman-lab scale --instances 512 --out docs          one of them again
      pointsman-lab scale --quick --instances 16 --rate 50
    """
    configure_logging("error", "text")
    rows = _read(out) if out else {}
    for size in [] if page_only else map(int, instances.split(",")):
        options = replace(QUICK if quick else FULL, instances=size, rate=min(rate, EACH_MAX * size))
        rows[size] = asyncio.run(measured(replace(options, seconds=seconds or options.seconds)))
        click.echo(f"{size} instances are measured", err=True)
        if out:
            write_json(out / NUMBERS, {"rows": [rows[size] for size in sorted(rows)]})
    found = [rows[size] for size in sorted(rows)]
    Console().print(_table(found))
    for row in found:
        listed = ", ".join(f"{name} {value:g}" for name, value in row["memory_mb"].items())
        click.echo(f"{row['instances']} instances, MB: {listed}")
    if out:
        _write_page(out, found)


def _read(directory: Path) -> dict[int, Row]:
    file = directory / NUMBERS
    rows = json.loads(file.read_bytes())["rows"] if file.exists() else []
    return {row["instances"]: row for row in rows}


def _write_page(directory: Path, rows: list[Row]) -> None:
    (directory / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    _draw(rows, directory / PICTURE)
    write_file(directory / PAGE, page(rows).encode())


def _table(rows: list[Row]) -> Any:
    made = table(*(f">{title}" for title, _ in COLUMNS), title="A pool of simulated instances, wall time")
    for row in rows:
        made.add_row(*(shown(row[name]) for _, name in COLUMNS))
    return made


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, (title, unit, lines) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for name, label in lines:
            axes.plot(
                [row["instances"] for row in rows], [row[name] or float("nan") for row in rows], marker="o", label=label
            )
        axes.set(title=title, ylabel=unit, xlabel="instances", ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
