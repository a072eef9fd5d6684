"""`pointsman-lab mutation`: runs a sample of mutants, or the listed defects, against unit tests and torture."""

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from pointsman_cli.options import CONTEXT, out_option
from pointsman_cli.output_file import write_json
from pointsman_lab.torture.mutation import LIBRARIES, Outcome, judge, sampled
from pointsman_lab.torture.planted import SEEDS
from pointsman_lab.torture.planted import planted as planted_mutants

TORTURE_SEEDS = (61, 27, 67, 30)
"""Together they produce every kind of entry. Choose again when seeds shift."""
SHOWN_MAX = 110


@click.command("mutation", context_settings=CONTEXT)
@click.option("--sample", default=200, show_default=True, help="Mutants to run.")
@click.option("--seed", default=1, show_default=True, help="Chooses the sample.")
@click.option(
    "--only", default="", metavar="PART", help="Only files whose path, or planted defects whose name, contains this."
)
@click.option("--planted", is_flag=True, help="Run the listed defects of `planted.py` instead of a sample.")
@out_option
def mutation_command(sample: int, seed: int, only: str, planted: bool, out: Path | None) -> None:
    """Plant defects in dispatcher, state and translator, and report which of them unit tests and torture find.

    Run it in the root of the repository.
    """
    root = Path.cwd()
    for name in LIBRARIES:
        importlib.import_module(name)
    outcomes = []
    for outcome in _planted_outcomes(root, only) if planted else _outcomes(root, sample, seed, only):
        outcomes.append(outcome)
        _show(outcome)
        if out is not None:
            write_json(out, [asdict(one) for one in outcomes])
    fates = Counter(outcome.fate for outcome in outcomes)
    killed = len(outcomes) - fates["survived"]
    counts = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
    click.echo(f"{killed} of {len(outcomes)} found ({killed / max(1, len(outcomes)):.0%}): {counts}")


def _outcomes(root: Path, sample: int, seed: int, only: str) -> Iterator[Outcome]:
    for mutant in sampled(root, sample, seed, only):
        yield judge(mutant, root, TORTURE_SEEDS)


def _planted_outcomes(root: Path, only: str) -> Iterator[Outcome]:
    for mutant in planted_mutants(root, only):
        yield judge(mutant, root, ())
        yield judge(mutant, root, SEEDS, with_tests=False)


def _show(outcome: Outcome) -> None:
    click.echo(
        f"{outcome.fate:18} {outcome.seconds:6.1f} s  {outcome.file}:{outcome.line}  {outcome.what}  {outcome.by}"
    )
    if outcome.fate == "survived":
        click.echo(f"    - {outcome.before[:SHOWN_MAX]}\n    + {outcome.after[:SHOWN_MAX]}")
