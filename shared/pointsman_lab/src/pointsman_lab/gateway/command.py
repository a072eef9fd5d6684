"""A fleet, running or fresh, in; tables and JSON out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click
from rich.console import Console

from pointsman.bounds import Bounds
from pointsman.runtime.number_types import Whole
from pointsman_cli.bench.fresh_fleet import FreshFleet
from pointsman_cli.discovery import FleetFile, find_fleet
from pointsman_cli.options import CONTEXT, DIRECTORY, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table
from pointsman_lab.gateway.comparison import OURS, as_json, compare, goals, total
from pointsman_lab.gateway.connection import Target
from pointsman_lab.gateway.measurements import Added, Figures, Setup, measure
from pointsman_lab.gateway.routers import COMMANDS, running

FRESH_ENGINE_SPEED = 200.0
"""Fast enough that cores do not enter idle states while the engine computes, which slows the same instructions 2 to 3
times."""
FRESH_POLICY = "dualmap"
CONCURRENCY = 64
REQUESTS_MIN = 50
SLOW_ENGINE_MS = 5.0


@click.command("gateway", context_settings=CONTEXT)
@click.option(
    "--from",
    "place",
    metavar="DIRECTORY",
    type=DIRECTORY,
    help="Measure the fleet of this data directory. Default: a fresh one.",
)
@click.option("--requests", default=500, show_default=True, type=Whole(Bounds(10, 100_000)), help="Pairs of each kind.")
@click.option(
    "--against",
    metavar="ROUTER",
    multiple=True,
    type=click.Choice([*COMMANDS]),
    help=f"Measure this router too, in front of the same engine; several times. One of {', '.join(COMMANDS)}.",
)
@click.option(
    "--routers",
    default=Path(".venv-routers"),
    show_default=True,
    metavar="DIRECTORY",
    type=DIRECTORY,
    help="Environment of the routers; `make routers` makes it.",
)
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=Whole(Bounds(1, 100)),
    help="With --against: in each, all gateways take turns; the quietest counts.",
)
@out_option
def gateway_command(
    place: Path | None, requests: int, against: tuple[str, ...], routers: Path, rounds: int, out: Path | None
) -> None:
    """Measure what the gateway adds to a direct call of the same engine.

    \b
    Latency at concurrency 1 (a small chat, and 40 kB of token ids), requests a second at full load, and the CPU
    time per request and per streamed chunk of the ingress and of the scheduler.
      pointsman-lab gateway                      a fresh fleet with one engine that is fast enough not to matter
      pointsman-lab gateway --from .pointsman    the fleet of this directory
      pointsman-lab gateway --against smg --against vllm-router    beside other routers, in one run
    """
    if against:
        found = asyncio.run(_against(place, against, routers, max(REQUESTS_MIN, requests // rounds), rounds))
        _print_comparison(found)
        if out is not None:
            write_json(out, as_json(found, rounds))
        return
    figures = asyncio.run(_alone(place, requests))
    _print(figures)
    if out is not None:
        write_json(out, figures)


async def _alone(place: Path | None, requests: int) -> Figures:
    async with _fleet(place) as fleet:
        return await measure(_setup(fleet, requests))


async def _against(
    place: Path | None, names: tuple[str, ...], environment: Path, requests: int, rounds: int
) -> dict[str, Figures]:
    async with _fleet(place) as fleet:
        ours = _setup(fleet, requests)
        engine = next(iter(ours.engines.items()))
        async with running(names, environment, engine[1], fleet.model) as routers:
            setups = {
                name: Setup(
                    router.target,
                    dict([engine]),
                    {name: router.pid},
                    fleet.model,
                    requests,
                    CONCURRENCY,
                    may_refuse=True,
                )
                for name, router in routers.items()
            }
            return await compare({OURS: ours, **setups}, rounds)


def _setup(fleet: FleetFile, requests: int) -> Setup:
    engines = {process.name: Target.of(process.url) for process in fleet.of_role("engine") if process.url}
    pids = {one.role: one.pid for one in fleet.processes if one.role in ("ingress", "scheduler") and one.pid}
    return Setup(Target.of(fleet.ingress), engines, pids, fleet.model, requests, CONCURRENCY)


@asynccontextmanager
async def _fleet(place: Path | None) -> AsyncIterator[FleetFile]:
    if place is not None:
        yield find_fleet(data=place)
        return
    async with FreshFleet(policy=FRESH_POLICY, instances=1, speed=FRESH_ENGINE_SPEED).running() as fleet:
        yield fleet


def _print_comparison(found: dict[str, Figures]) -> None:
    console = Console()
    bodies = list(found[OURS].added)
    latency = [f">{name} {percentile}" for name in bodies for percentile in ("p50", "p99")]
    shown = table("gateway", *latency, ">requests/s", ">CPU a request", ">CPU a chunk", title="Added latency and work")
    for name, figures in found.items():
        added = [figures.added.get(body) for body in bodies]
        latencies = [text for one in added for text in _latencies(one)]
        shown.add_row(
            name,
            *latencies,
            f"{figures.requests_per_s['gateway']:,.0f}",
            *(f"{total(figures, attribute):,.0f} us" for attribute in ("cpu_us_per_request", "cpu_us_per_chunk")),
        )
    console.print(shown)
    for goal in goals(found):
        console.print(
            f"{goal.name}, at most that of {goal.other}: {'met' if goal.met else 'missed'} "
            f"({goal.ours_us:,.0f} and {goal.others_us:,.0f} us)"
        )


def _latencies(added: Added | None) -> tuple[str, str]:
    if added is None:
        return "refused", ""
    return f"{added.added_p50_ms:.2f} ms", f"{added.added_p99_ms:.2f} ms"


def _print(figures: Figures) -> None:
    console = Console()
    headings = (">direct p50", ">gateway p50", ">added p50", ">added p90", ">pairs")
    latency = table("body", *headings, title="Latency, one at a time")
    for name, added in figures.added.items():
        numbers = (added.direct_p50_ms, added.gateway_p50_ms, added.added_p50_ms, added.added_p90_ms)
        latency.add_row(name, *(f"{value:.2f} ms" for value in numbers), str(added.requests))
    console.print(latency)
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in figures.requests_per_s.items())
    console.print(f"requests/s at concurrency {figures.concurrency}: {rates}")
    if figures.work:
        work = table("process", ">CPU a request", ">CPU a chunk", title="Work, per request and per streamed chunk")
        for name, done in figures.work.items():
            work.add_row(name, *(f"{us:,.0f} us" for us in (done.cpu_us_per_request, done.cpu_us_per_chunk)))
        console.print(work)
    if figures.not_measured:
        console.print(f"not measured: {figures.not_measured}")
    if any(added.direct_p50_ms > SLOW_ENGINE_MS for added in figures.added.values()):
        console.print(
            "This engine is slow enough for the cores to fall asleep between requests, which makes everything else "
            "slower too. Without --from a fast one is measured."
        )
