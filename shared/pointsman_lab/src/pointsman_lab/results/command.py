"""`pointsman-lab results`: run the studies, write `results.md`, its pictures and its numbers."""

import os
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import click
import msgspec
from rich.console import Console

from pointsman_cli.output_file import OUTPUT_FILE, write_file
from pointsman_lab.results.figures import PICTURES, draw_figures
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.page import page
from pointsman_lab.results.runs import Runs, run_studies
from pointsman_lab.results.studies import CONVERSATION, TOOL_AGENT, Study, shortened, studies

DOCS = Path("docs")
NUMBERS = "results.json"


@click.command("results", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--traces",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help=f"Directory with {CONVERSATION} and {TOOL_AGENT}.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where results.md and results/ go. Default: docs for a whole run; with --only or --quick the page is only shown.",
)
@click.option("--only", metavar="STUDY", default="", help="Only studies whose key contains this.")
@click.option("--quick", is_flag=True, help="A taste of everything in minutes: one seed, one rate, few requests.")
@click.option("--list", "list_keys", is_flag=True, help="Name the studies and end.")
@click.option(
    "--page",
    "page_only",
    is_flag=True,
    help=f"Run nothing: write results.md anew from the {PICTURES}/{NUMBERS} beside it.",
)
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write the numbers here too.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    default=lambda: os.cpu_count() or 1,
    help="Processes. Default: one a core.",
)
def results_command(
    traces: Path,
    out: Path | None,
    only: str,
    quick: bool,
    list_keys: bool,
    page_only: bool,
    json_file: Path | None,
    jobs: int,
) -> None:
    """Run every study of docs/results.md and write the page anew (under half an hour on two cores).

    The page begins with where our own policy wins and where it does not, and every sentence that judges is made from
    the numbers of the run.

    \b
    Examples:
      pointsman-lab results --traces ../shared/traces
      pointsman-lab results --traces ../shared/traces --only lag
      pointsman-lab results --traces ../shared/traces --quick --out /tmp/taste
      pointsman-lab results --traces ../shared/traces --page
    """
    chosen = _chosen(traces, only)
    if list_keys:
        for study in chosen:
            click.echo(f"{study.key}: {study.title}, {len(study.cells())} runs")
        return
    console = Console(highlight=False)
    whole = not only and not quick
    target = out or (DOCS if whole else None)
    if page_only:
        _write_page(target or DOCS, chosen, _read(target or DOCS), console)
        return
    if quick:
        chosen = [shortened(study) for study in chosen]
    runs = _run(_checked(traces, chosen), jobs, quick, console)
    if json_file:
        _write(json_file, _encoded(runs.numbers), console)
    if target is None:
        console.print(page(chosen, runs.numbers), markup=False, soft_wrap=True)
        return
    _write(target / PICTURES / NUMBERS, _encoded(runs.numbers), console)
    draw_figures(chosen, runs.results, runs.numbers, target / PICTURES)
    _write_page(target, chosen, runs.numbers, console)


def _chosen(traces: Path, only: str) -> list[Study]:
    every = studies(traces)
    chosen = [study for study in every if only in study.key]
    if not chosen:
        message = f"no study has '{only}' in its key; there are: {', '.join(study.key for study in every)}"
        raise click.UsageError(message)
    return chosen


def _checked(traces: Path, chosen: list[Study]) -> list[Study]:
    """The studies, if the traces that they need are there."""
    needed = {study.source.trace for study in chosen if study.source.trace}
    missing = sorted(trace.name for trace in needed if not trace.is_file())
    if missing:
        message = f"{traces} has no {' and no '.join(missing)}"
        raise click.UsageError(message)
    return chosen


def _run(chosen: list[Study], jobs: int, quick: bool, console: Console) -> Runs:
    try:
        return run_studies(chosen, jobs, console, taste=quick)
    except BrokenProcessPool as error:
        message = "a simulating process died; was there enough memory? --jobs 1 shows more. Nothing was written"
        raise click.ClickException(message) from error


def _read(directory: Path) -> Numbers:
    file = directory / PICTURES / NUMBERS
    try:
        return msgspec.json.decode(file.read_bytes(), type=Numbers)
    except OSError as error:
        message = f"cannot read {file}: {error.strerror}; run without --page first"
        raise click.ClickException(message) from error
    except msgspec.DecodeError as error:
        message = f"{file} is not what this version writes ({error}); run without --page first"
        raise click.ClickException(message) from error


def _encoded(numbers: Numbers) -> bytes:
    return msgspec.json.encode(numbers) + b"\n"


def _write_page(directory: Path, chosen: list[Study], numbers: Numbers, console: Console) -> None:
    _write(directory / "results.md", page(chosen, numbers).encode(), console)


def _write(file: Path, content: bytes, console: Console) -> None:
    write_file(file, content)
    console.print(f"wrote {file}", soft_wrap=True)
