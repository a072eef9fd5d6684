"""`pointsman what-if`: simulates recorded traffic under another policy or fleet size, and compares."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from pointsman.adapters.tenants_file import TenantsFileError, read_tenant_policies
from pointsman.analysis.calibration import Calibration
from pointsman.analysis.comparison import Side, fidelity, regret
from pointsman.analysis.recorded_traffic import Record, UnusableTrafficError
from pointsman.analysis.what_if import Change, WhatIf
from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.policy_set import UnknownPolicyError
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.policies.setting_text import SettingTextError
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import History, HistoryError, open_history
from pointsman_cli.history.time_options import moment_in
from pointsman_cli.options import (
    CONTEXT,
    DIRECTORY,
    INSTANCES,
    NOT_NEGATIVE,
    from_options,
    json_switch,
    set_option,
    since_option,
    until_option,
)
from pointsman_cli.output_file import print_json
from pointsman_cli.simulate.drawing import drawing
from pointsman_cli.terminal import output_console, progress_console, say
from pointsman_cli.what_if.comparison import as_json, cells, table_of, tenants_table
from pointsman_cli.what_if.inputs import limits_of, record_of

SLOW_BELOW = 0.9
SPEEDS_SHOWN = 8


@click.command("what-if", context_settings=CONTEXT)
@from_options
@click.option("--policy", type=click.Choice(sorted(ROUTING_POLICIES)), help="Routing policy.")
@set_option
@click.option("--order", type=click.Choice(sorted(ORDERING_POLICIES)), help="Ordering policy.")
@click.option("--admission", type=click.Choice(sorted(ADMISSION_POLICIES)), help="Admission policy.")
@click.option("--instances", type=INSTANCES, metavar="N", help="Number of engines.")
@click.option(
    "--tenants",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Tenants file; --set tenants.NAME.KEY=VALUE changes one limit.",
)
@since_option
@until_option
@click.option(
    "--warmup",
    type=NOT_NEGATIVE,
    metavar="SECONDS",
    help="Engine seconds before --since (a time) whose requests warm the caches.  [default: all]",
)
@click.option("--plot", type=DIRECTORY, help="Write plots to this directory.")
@json_switch
def what_if_command(
    place: str | None,
    pool: str | None,
    policy: str | None,
    settings: Sequence[str],
    order: str | None,
    admission: str | None,
    instances: int | None,
    tenants: Path | None,
    since: str | None,
    until: str | None,
    warmup: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Simulate recorded traffic under another policy, with other limits of tenants or another number of engines.

    \b
      pointsman what-if --policy round_robin                       the running fleet's traffic
      pointsman what-if --from incident.pmlog --instances 6        with two more engines
      pointsman what-if --from incident.pmlog --admission none --order edf --since 08:01:30 --plot pictures
      pointsman what-if --set tenants.acme.requests_per_second=5   with another limit of one tenant
      pointsman what-if --from .pointsman/archive.sqlite --policy dualmap --set routing.ttft_slo_threshold=2 --json

    Shows three columns: the record, its re-simulation (the accuracy of the simulator), and the change. Arrivals, prefixes,
    lengths, tenants and SLOs are those of the record. Each engine is calibrated by its recorded prefills. Failures,
    restarts and drains are not simulated.
    """
    try:
        limits = read_tenant_policies(tenants) if tenants else None
    except TenantsFileError as error:
        raise click.BadParameter(str(error), param_hint="--tenants") from error
    change = Change(
        policy=policy,
        texts=settings,
        ordering=order,
        admission=admission,
        instances=instances,
        tenants=limits,
        tenants_from=tenants.name if tenants else "",
        limits=limits_of(settings),
    )
    if change.is_none:
        raise click.UsageError(
            "choose what is to be different: --policy, --set, --order, --admission, --instances or --tenants"
        )
    console = progress_console() if as_json else output_console()
    draw = drawing(console, plot, "ttft_cdf", "timeline", "prompt_lengths") if plot else None
    with open_history(place, pool) as history:
        record = _read(history, since, until, warmup)
        done = _simulated(record, change)
        sides = (done.recorded, done.again, done.changed[0])
        print_json(_json(record, sides, done.calibration)) if as_json else _show(
            console, record, sides, done.calibration
        )
    if draw:
        name = f"log of {history.header.pool}" if history.header.pool else "recorded log"
        draw(cells(sides, record, name))


def _read(history: History, since: str | None, until: str | None, warmup: float | None) -> Record:
    """Raises HistoryError, click.UsageError."""
    entries = shown(history, "reading the record")
    first, end = moment_in(history, since, begins=True), moment_in(history, until)
    if warmup is not None and first.at is None:
        raise click.UsageError("--warmup counts back from a time: give --since as a time")
    try:
        return record_of(history, entries, first, end, warmup)
    except UnusableTrafficError as error:
        raise HistoryError(str(error)) from error


def _simulated(record: Record, change: Change) -> WhatIf:
    """Raises click.UsageError for an unknown policy or setting, HistoryError for a log that cannot be simulated."""
    try:
        what_if = WhatIf(record, [change])
    except (UnknownPolicyError, SettingTextError, TenantsFileError) as error:
        raise click.UsageError(str(error)) from error
    with _progress(record) as say_step:
        said = 0
        try:
            for progress in what_if.run():
                if progress.run != said:
                    said = progress.run
                    say_step(f"{progress.what} (run {said} of {progress.runs})")
        except UnusableTrafficError as error:
            raise HistoryError(str(error)) from error
    return what_if


@contextmanager
def _progress(record: Record) -> Iterator[Callable[[str], None]]:
    console = progress_console()
    what = f"simulating {len(record.requests):,} requests"
    if not console.is_terminal:
        yield lambda step: say(console, f"{what}: {step}")
        return
    with console.status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")


def _show(console: Console, record: Record, sides: tuple[Side, Side, Side], calibration: Calibration) -> None:
    recorded, again, changed = sides
    scenario = recorded.scenario
    say(console, record.origin, "dim")
    warmed = f", after {record.warmup:,} that warm the caches" if record.warmup else ""
    say(
        console,
        f"{recorded.report.requests:,} requests{warmed}; {scenario.instances} instances, {record.policy}, order "
        f"{scenario.ordering}, admission {scenario.admission}",
    )
    say(console, _calibrated(calibration))
    for note in record.notes:
        say(console, note, "yellow")
    console.print(table_of(recorded, again, changed))
    if recorded.scenario.tenant_policies or changed.scenario.tenant_policies:
        console.print(tenants_table(recorded, again, changed, record.warmup))
    well, text = fidelity(recorded.report, again.report)
    say(console, text, "" if well else "yellow")


def _calibrated(calibration: Calibration) -> str:
    slow = [(n, s) for n, s in calibration.speeds.items() if s < SLOW_BELOW or s > 1 / SLOW_BELOW]
    shown_speeds = ", ".join(f"{name} at {speed:.2f} times" for name, speed in slow[:SPEEDS_SHOWN])
    more = ", ..." if len(slow) > SPEEDS_SHOWN else ""
    pace = f"{shown_speeds}{more} the speed of its cost model" if slow else "engines as fast as their cost models say"
    return (
        f"calibrated by {len(calibration.ways):,} prefills: {pace}; {calibration.way_seconds:.3f} s in other processes"
    )


def _json(record: Record, sides: tuple[Side, Side, Side], calibration: Calibration) -> dict[str, Any]:
    recorded, again, changed = sides
    well, text = fidelity(recorded.report, again.report)
    return {
        "origin": record.origin,
        "requests": recorded.report.requests,
        "warmup": record.warmup,
        "notes": record.notes,
        "calibration": {
            "speeds": calibration.speeds,
            "way_seconds": calibration.way_seconds,
            "prefills": len(calibration.ways),
        },
        "reproduced": well,
        "fidelity": text,
        "recorded": as_json(recorded, record.warmup),
        "resimulated": as_json(again, record.warmup),
        "changed": as_json(changed, record.warmup),
        "regret": msgspec.to_builtins(regret(again, changed)),
    }
