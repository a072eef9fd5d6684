"""`pointsman-lab results`: runs the studies, writes `results.md`, its picture and its numbers."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from pointsman_cli.options import COUNT
from pointsman_cli.output_file import write_file
from pointsman_cli.simulate.experiment import CellResult
from pointsman_lab.results.numbers import Numbers
from pointsman_lab.results.page import page
from pointsman_lab.results.runs import run_studies
from pointsman_lab.results.studies import measurements, studies
from pointsman_lab.results.studies.rows import CONVERSATION, TOOL_AGENT
from pointsman_lab.results.study import Study, shortened
from pointsman_lab.results.tables import study_section

DOCS = Path("docs")
PICTURES = "results"
NUMBERS = "results.json"


@click.command("results", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--traces",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help=f"Directory with {CONVERSATION} and {TOOL_AGENT}.",
)
@click.option("--only", metavar="STUDY", default="", help="Only studies whose key contains this; prints their tables.")
@click.option(
    "--add", is_flag=True, help=f"With --only: into {PICTURES}/{NUMBERS} and results.md, beside what is there."
)
@click.option("--quick", is_flag=True, help="One seed, few requests, to find faults; writes only with --out.")
@click.option("--page", "page_only", is_flag=True, help=f"Run nothing: render results.md from {PICTURES}/{NUMBERS}.")
@click.option("--jobs", type=COUNT, help="Processes. Default: one a core.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Directory of results.md and results/. Default: {DOCS}.",
)
def results_command(
    traces: Path, only: str, add: bool, quick: bool, page_only: bool, jobs: int | None, out: Path | None
) -> None:
    """Run every study of docs/results.md and write the page (40 minutes on two cores).

    \b
    Examples:
      pointsman-lab results --traces ../shared/traces
      pointsman-lab results --traces ../shared/traces --only lag
      pointsman-lab results --traces ../shared/traces --only lag --add
      pointsman-lab results --traces ../shared/traces --quick --out /tmp/page
      pointsman-lab results --traces ../shared/traces --page
    """
    chosen = _chosen(traces, only)
    console = Console(highlight=False)
    directory = DOCS if out is None else out
    if page_only:
        _write_page(directory, traces, _read(directory), console)
        return
    file = directory / PICTURES / NUMBERS
    before = _read(directory) if add else Numbers(taste=quick, studies={})

    def keep(found: Numbers) -> None:
        write_file(file, msgspec.json.encode(before.overlaid(found)) + b"\n")

    writes = add or (not only and not (quick and out is None))
    studied = [shortened(study) if quick else study for study in chosen]
    _check_traces(traces, studied)
    measured = [one for one in measurements() if only in one.key]
    try:
        runs = run_studies(
            studied,
            jobs or os.cpu_count() or 1,
            console,
            taste=quick,
            measurements=measured,
            traces=traces,
            keep=keep if writes else lambda _: None,
        )
    except BrokenProcessPool as error:
        raise click.ClickException(
            "a simulating process died, perhaps for lack of memory; the page was not written"
        ) from error
    _print_account(runs.seconds, console)
    if writes:
        _draw(runs.results, directory / PICTURES)
        if not runs.failed:
            _write_page(directory, traces, before.overlaid(runs.numbers), console)
    else:
        _print_tables(chosen, runs.numbers, console)
    _raise_failures(runs.failed, file if writes else None)


def _chosen(traces: Path, only: str) -> list[Study]:
    every = studies(traces)
    chosen = [study for study in every if only in study.key]
    if not chosen and not any(only in one.key for one in measurements()):
        raise click.UsageError(
            f"no study has '{only}' in its key; there are: {', '.join(study.key for study in every)}"
        )
    return chosen


def _check_traces(traces: Path, chosen: list[Study]) -> None:
    """Raises click.UsageError for a missing one."""
    needed = {study.source.trace for study in chosen if study.source.trace}
    missing = sorted(trace.name for trace in needed if not trace.is_file())
    if missing:
        raise click.UsageError(f"{traces} has no {' and no '.join(missing)}")


def _raise_failures(failed: Mapping[str, str], file: Path | None) -> None:
    """Raises click.ClickException with what studies raised, if any."""
    if failed:
        told = [f"{key}: {error}" for key, error in failed.items()]
        if file is not None:
            told.append(f"{file} has the others; run these with --only and --add, which writes the page too")
        raise click.ClickException("\n".join(told))


def _print_account(seconds: Mapping[str, float], console: Console) -> None:
    """CPU seconds of each study, longest first."""
    for key, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        console.print(f"{spent:8.1f} s  {key}", markup=False)
    console.print(f"{sum(seconds.values()) / 60:.1f} core-minutes")


def _print_tables(chosen: Sequence[Study], numbers: Numbers, console: Console) -> None:
    for study in chosen:
        if study.key in numbers.studies:
            console.print(study_section(study, numbers), markup=False, soft_wrap=True)
    for key, values in numbers.measurements.items():
        console.print(f"{key}: " + ", ".join(f"{name} {value:g}" for name, value in values.items()), markup=False)
    if numbers.taste:
        console.print("A taste only: one seed, few requests. These numbers mean little.")


def _read(directory: Path) -> Numbers:
    file = directory / PICTURES / NUMBERS
    try:
        return msgspec.json.decode(file.read_bytes(), type=Numbers)
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}; run without --page first") from error
    except msgspec.DecodeError as error:
        raise click.ClickException(
            f"{file} is not what this version writes ({error}); run without --page first"
        ) from error


def _draw(results: Mapping[str, Sequence[CellResult]], out: Path) -> None:
    """The picture of the study over time, if it ran. Raises OSError."""
    # Imported late: matplotlib takes a second, and --page does not need it.
    from pointsman_cli.simulate import plots

    if "elasticity" in results:
        plots.save_figure(partial(plots.timeline, results["elasticity"]), out / "elasticity.png")


def _write_page(directory: Path, traces: Path, numbers: Numbers, console: Console) -> None:
    try:
        text = page(studies(traces), numbers)
    except KeyError as error:
        raise click.ClickException(
            f"{directory / PICTURES / NUMBERS} lacks {error}: run it with --only and --add"
        ) from error
    file = directory / "results.md"
    write_file(file, text.encode())
    console.print(f"wrote {file}", soft_wrap=True)
