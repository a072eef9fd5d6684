"""`pointsman-lab tenants`: a fleet of real processes; its limits under overload, and a flood beside others' requests."""

import asyncio
import os
import sys
from pathlib import Path

import click
import msgspec

from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.ports import Commands
from pointsman.runtime.settings import FleetSettings
from pointsman.state.tenants import BURST_SECONDS
from pointsman_cli.bench.fresh_fleet import FreshFleet
from pointsman_cli.command_client import connected_link
from pointsman_cli.discovery import FleetFile
from pointsman_cli.history.live import LiveHistory
from pointsman_cli.options import CONTEXT, COUNT, POSITIVE, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.tenants import replace_policies
from pointsman_cli.terminal import output_console, say, table
from pointsman_lab.tenants.flood import LIMITED, SETTLE_SECONDS, VARIANTS, FloodRound, round_of, traffic_of
from pointsman_lab.tenants.limits import POLICIES, LimitsReport, judged, overload
from pointsman_lab.tenants.load import TenantClients

INGRESSES, SCHEDULERS, INSTANCES = 3, 2, 2
LIMIT_TOLERANCE, FLOOD_TOLERANCE = 1.02, 1.1
WARM_UP_SECONDS = 4.0
MISSED_EXIT_CODE = 1


class TenantsReport(msgspec.Struct, kw_only=True):
    """`load_average`: of the machine, at the end. `quietest_round`: with the least TTFT P90 without a flood."""

    limits: LimitsReport
    rounds: list[FloodRound]
    quietest_round: int
    load_average: float
    limits_hold: bool
    flood_contained: bool


@click.command("tenants", context_settings=CONTEXT)
@click.option("--seconds", type=POSITIVE, default=24.0, show_default=True, help="Of the overload, and of each flood.")
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Of floods; the quietest counts.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@out_option
def tenants_command(seconds: float, rounds: int, seed: int, out: Path | None) -> None:
    """Measure on real processes whether tenants' limits hold, and what a flooding tenant does to the others.

    Three ingresses, two schedulers. Limits: three tenants send far too much while the leading scheduler is killed; the
    log shows what was admitted. Flood: TTFT of four well-behaved tenants beside a fifth that behaves or floods. Exit code
    1 if more than a limit, its full bucket and 2% are admitted, or if their TTFT P90 is more than 10% higher beside a
    limited flood.
    """
    report = asyncio.run(_measure(seconds, rounds, seed))
    _show(report)
    if out is not None:
        write_json(out, report)
    sys.exit(0 if report.limits_hold and report.flood_contained else MISSED_EXIT_CODE)


async def _measure(seconds: float, rounds: int, seed: int) -> TenantsReport:
    arguments = ["--schedulers", str(SCHEDULERS), "--ingresses", str(INGRESSES)]
    fresh = FreshFleet(policy=DEFAULT_ROUTING, instances=INSTANCES, speed=1.0, arguments=arguments)
    async with fresh.running() as fleet:
        settings = fleet.settings(acts=True)
        async with connected_link(settings, name="tenants") as link:
            limits = await _limits(fleet, settings, link.commands, seconds=seconds, seed=seed)
            runs = [await _round(fleet, settings, link.commands, seconds, seed + number) for number in range(rounds)]
    quietest = min(range(rounds), key=lambda number: runs[number].behaved_p90)
    most = max(limits.requests_most, limits.tokens_most) / (1 + BURST_SECONDS / limits.window_s)
    return TenantsReport(
        limits=limits,
        rounds=runs,
        quietest_round=quietest,
        load_average=os.getloadavg()[0],
        limits_hold=max(most, limits.requests, limits.tokens) <= LIMIT_TOLERANCE
        and limits.concurrency_most <= limits.concurrency_limit,
        flood_contained=runs[quietest].p90_ratios.get(LIMITED, 0.0) <= FLOOD_TOLERANCE,
    )


async def _limits(
    fleet: FleetFile, settings: FleetSettings, commands: Commands, *, seconds: float, seed: int
) -> LimitsReport:
    clients = _clients(fleet, seed)
    await replace_policies(commands, settings, POLICIES)
    samples = await overload(clients, seconds, commands, settings)
    entries = await asyncio.to_thread(lambda: list(LiveHistory(settings).entries()))
    events = [entry.event for entry in entries if entry.event is not None]
    return judged(events, samples, seconds=seconds, window_s=min(20.0, seconds))


async def _round(
    fleet: FleetFile, settings: FleetSettings, commands: Commands, seconds: float, seed: int
) -> FloodRound:
    clients, taken = _clients(fleet, seed), []
    await replace_policies(commands, settings, VARIANTS[0].policies)
    await clients.run(traffic_of(VARIANTS[0]), WARM_UP_SECONDS)
    for variant in VARIANTS:
        await replace_policies(commands, settings, variant.policies)
        taken.append((variant, await clients.run(traffic_of(variant), seconds)))
        await asyncio.sleep(SETTLE_SECONDS)
    return round_of(taken)


def _clients(fleet: FleetFile, seed: int) -> TenantClients:
    return TenantClients(fleet.model, [process.url for process in fleet.of_role("ingress")], seed)


def _show(report: TenantsReport) -> None:
    console, limits = output_console(), report.limits
    shown = table("limit", ">of the limit", f">fullest {limits.window_s:g} s", title="limits under overload")
    shown.add_row("requests a second", f"{limits.requests:.1%}", f"{limits.requests_most:.1%}")
    shown.add_row("tokens a minute", f"{limits.tokens:.1%}", f"{limits.tokens_most:.1%}")
    shown.add_row("concurrency", "", f"{limits.concurrency_most} of {limits.concurrency_limit}")
    console.print(shown)
    say(console, f"leader killed at {limits.killed_at_s:g} s, elections at {limits.elections_s} s")
    shown = table("round", "flood", ">P50 TTFT", ">P90 TTFT", ">to behaved", ">flood served", title="others' TTFT")
    for number, done in enumerate(report.rounds):
        for run in done.runs:
            ratio = done.p90_ratios.get(run.variant)
            shown.add_row(
                f"{number}{' (quietest)' if number == report.quietest_round else ''}",
                run.variant,
                f"{run.ttft_p50 or 0:.3f} s",
                f"{run.ttft_p90 or 0:.3f} s",
                f"{ratio:.2f}" if ratio else "",
                f"{run.flood_served} of {run.flood_sent}",
            )
    console.print(shown)
    say(console, f"load average of the machine: {report.load_average:.1f}")
