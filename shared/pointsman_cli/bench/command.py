"""Runs a workload against a server, or against a fresh fleet for each policy. Returns tables and JSON."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import click
import uvloop
from rich.console import Console
from rich.text import Text

from pointsman.analysis.tier_shares import TierCounter
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.ports import LogEntry
from pointsman.runtime.open_files import raised_open_files
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.structured_logs import configure_logging
from pointsman.simulation.workload import WorkloadRequest, at_rate, mean_rate
from pointsman_cli.bench.display import Display
from pointsman_cli.bench.fresh_fleet import REAL_START_SECONDS_MAX, START_SECONDS_MAX, FreshFleet
from pointsman_cli.bench.load import LoadGenerator, Target
from pointsman_cli.bench.moves import Moves, moves_in
from pointsman_cli.bench.report import (
    BenchReport,
    RunFacts,
    RunReport,
    errors_text,
    headline,
    instances_table,
    lateness_warning,
    runs_table,
    summarise,
)
from pointsman_cli.bench.server import Server, running_server, served_model, server_of
from pointsman_cli.history.entries import HistoryError
from pointsman_cli.history.live import LiveHistory
from pointsman_cli.interruption import INTERRUPTED_EXIT_CODE
from pointsman_cli.options import CONTEXT, COUNT, FLEET_HELP, INSTANCES, POSITIVE, http_url, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import output_console
from pointsman_cli.up.settings import SIMULATED, VLLM
from pointsman_cli.workload_options import GENERATED_RATE, workload_name, workload_options, workload_requests

DEFAULT_WORKLOAD = "chat"
GENERATED_REQUESTS = 200
COMPARED_SPEED = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    url: str | None
    place: str | None
    trace: Path | None
    workload: str | None
    requests: int | None
    rate: float | None
    seed: int
    input_tokens_max: int | None
    output_tokens_max: int | None
    shrink: int
    speed: float | None
    model: str | None
    policies: tuple[str, ...]
    rebalancing: tuple[str, ...]
    instances: int
    kv_blocks: int | None
    kv_offloading_size: tuple[float, ...]
    engine: str
    out: Path | None


def _names(known: Sequence[str]) -> Callable[..., tuple[str, ...]]:
    def read(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
        names = tuple(name.strip() for name in value.split(",")) if value else ()
        if unknown := [name for name in names if name not in known]:
            raise click.BadParameter(f"unknown policy {unknown[0]}; there are: {', '.join(sorted(known))}")
        return names

    return read


def _sizes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    """Raises click.BadParameter."""
    try:
        sizes = tuple(float(size) for size in value.split(",")) if value else ()
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if any(not 0 <= size < float("inf") for size in sizes):
        raise click.BadParameter(f"'{value}' has a size that is none")
    return sizes


@click.command("bench", context_settings=CONTEXT)
@click.option(
    "--url", metavar="URL", callback=http_url, help="Any OpenAI-compatible server. Default: the fleet of --from."
)
@click.option("--from", "place", metavar="WHERE", help=FLEET_HELP)
@workload_options
@click.option(
    "--requests",
    type=COUNT,
    metavar="N",
    help=f"How many. Default: the whole trace, or {GENERATED_REQUESTS} generated.",
)
@click.option("--rate", type=POSITIVE, metavar="X", help="Scale arrivals to this mean rate, requests/s of engine time.")
@click.option("--seed", type=int, default=1, show_default=True, help="For arrivals, generators and token ids.")
@click.option("--input-tokens-max", type=COUNT, metavar="N", help="Cut longer prompts.")
@click.option("--output-tokens-max", type=COUNT, metavar="N", help="Cut longer answers.")
@click.option(
    "--shrink",
    type=COUNT,
    metavar="N",
    default=1,
    show_default=True,
    help="Make prompts and answers N times shorter with the same prefixes shared: for small models on small machines.",
)
@click.option(
    "--speed",
    type=POSITIVE,
    metavar="X",
    help=f"Speed of the engines. Default: the fleet's, else 1; of fresh fleets {COMPARED_SPEED:g}.",
)
@click.option("--model", metavar="NAME", help="Model to ask for. Default: the first that the server names.")
@click.option(
    "--policy",
    "policies",
    metavar="A[,B]",
    callback=_names(tuple(ROUTING_POLICIES)),
    help="Run once for each routing policy, each on a fresh fleet.",
)
@click.option(
    "--rebalance",
    "rebalancing",
    metavar="A[,B]",
    callback=_names(tuple(REBALANCING_POLICIES)),
    help="With --policy: and once for each rebalancing policy.",
)
@click.option(
    "--instances", type=INSTANCES, metavar="N", default=4, show_default=True, help="Engines of a fresh fleet."
)
@click.option("--kv-blocks", type=COUNT, metavar="N", help="With --policy: KV blocks on each engine's device.")
@click.option(
    "--kv-offloading-size",
    metavar="A[,B]",
    callback=_sizes,
    help="With --policy: and once for each size of the engines' host memory for KV blocks, in GiB; 0: none.",
)
@click.option(
    "--engine",
    type=click.Choice((SIMULATED, VLLM)),
    default=SIMULATED,
    show_default=True,
    help="Engines of a fresh fleet: simulated, or vLLM's CPU build (docs/engines.md).",
)
@out_option
def bench_command(**values: object) -> None:
    """Replay a workload against a fleet (or any OpenAI-compatible server) and report how well it was served.

    Requests are sent at their own times, whether or not earlier answers have come. Prompts are token ids that share
    prefixes exactly where the trace's hash_ids do; answers are streamed. Each request asks for exactly the tokens that it
    gets (max_tokens with ignore_eos), as in other benchmarks: the scheduler knows how long each answer will be, which
    it does not in `pointsman simulate` or for most real clients. All latencies are engine time. POINTSMAN_API_KEY is sent as bearer token.

    \b
      pointsman bench --workload chat                          generated conversations, against the running fleet
      pointsman bench --trace conversation.jsonl --requests 1000 --out run.json
      pointsman bench --trace conversation.jsonl --rate 8      the same prompts, at 8 requests a second
      pointsman bench --workload tools --requests 1000 --policy round_robin,dualmap
      pointsman bench --workload two_hot_prefixes --rate 25 --policy pointsman --rebalance off,dualmap_pair
      pointsman bench --workload long_document_qa --rate 2 --input-tokens-max 8192 --output-tokens-max 20 --speed 4
        --policy pointsman --instances 2 --kv-blocks 400 --kv-offloading-size 0,32
      pointsman bench --url http://gpu:8000 --workload chat    one vLLM server, without Pointsman
      pointsman bench --policy round_robin,pointsman --engine vllm --instances 2 --requests 100 --shrink 8

    Mooncake (FAST'25) published its traces in this format; Pointsman ships none.
    """
    options = BenchOptions(**values)  # type: ignore[arg-type]
    _check(options)
    configure_logging("error", "text")
    raised_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_Bench(options, output_console()).run()))


def _check(options: BenchOptions) -> None:
    """Raises click.UsageError for options that contradict each other."""
    if options.trace and options.workload:
        msg = "give --trace or --workload, not both"
    elif options.policies and (options.url or options.place):
        msg = "--policy starts fleets of its own; leave --url and --from out"
    elif options.rebalancing and not options.policies:
        msg = "--rebalance is for the fleets that --policy starts"
    elif (options.kv_blocks or options.kv_offloading_size) and not options.policies:
        msg = "--kv-blocks and --kv-offloading-size are for the fleets that --policy starts"
    elif options.engine != SIMULATED and not options.policies:
        msg = "--engine is for the fleets that --policy starts"
    elif options.engine != SIMULATED and options.speed:
        msg = "real engines run at their own speed; leave --speed away"
    else:
        return
    raise click.UsageError(msg)


class _Bench:
    def __init__(self, options: BenchOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._load: LoadGenerator | None = None
        self._interrupted = False

    async def run(self) -> int:
        """The exit code. Raises click.ClickException."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, task.cancel)
        requests = self._requests()
        runs: list[RunReport] = []
        try:
            for prepared in self._servers():
                async with prepared as server:
                    runs.append(await self._run_against(server, requests))
                if self._interrupted:
                    break
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
        self._show(runs)
        return INTERRUPTED_EXIT_CODE if self._interrupted else 0

    def _interrupt(self, cancel: Callable[[], object]) -> None:
        """The first Ctrl-C stops the load and keeps its numbers; without a load, or the second time, it ends the
        command."""
        if self._load is not None and not self._interrupted:
            self._load.stop()
        else:
            cancel()
        self._interrupted = True

    def _requests(self) -> list[WorkloadRequest]:
        options = self._options
        generator = None if options.trace else options.workload or DEFAULT_WORKLOAD
        requests = workload_requests(
            options.trace,
            generator,
            requests=options.requests or (GENERATED_REQUESTS if generator else None),
            seed=options.seed,
            rate=options.rate,
            input_tokens_max=options.input_tokens_max,
        )
        rate = options.rate or (GENERATED_RATE if generator else None)
        return at_rate(requests, rate) if rate else requests

    def _servers(self) -> list[AbstractAsyncContextManager[Server]]:
        options = self._options
        if not options.policies:
            return [contextlib.nullcontext(running_server(options.url, options.place, options.speed))]
        real = options.engine != SIMULATED
        kv_blocks = ["--kv-blocks", str(options.kv_blocks)] if options.kv_blocks else []
        return [
            self._fresh(
                FreshFleet(
                    policy=policy,
                    rebalance=rebalance,
                    instances=options.instances,
                    speed=1.0 if real else options.speed or COMPARED_SPEED,
                    offloading_gib=size,
                    arguments=["--engine", options.engine, *kv_blocks],
                    start_seconds_max=REAL_START_SECONDS_MAX if real else START_SECONDS_MAX,
                )
            )
            for policy, rebalance, size in product(
                options.policies, options.rebalancing or ("",), options.kv_offloading_size or (None,)
            )
        ]

    @asynccontextmanager
    async def _fresh(self, fresh: FreshFleet) -> AsyncIterator[Server]:
        name = f"{fresh.policy}+{fresh.rebalance}" if fresh.rebalance else fresh.policy
        if fresh.offloading_gib is not None:
            name += f", {fresh.offloading_gib:g} GiB host" if fresh.offloading_gib else ", no host tier"
        self._console.print(f"starting a fleet of {fresh.instances} engines that routes by {name} ...", style="dim")
        async with fresh.running() as fleet:
            server = server_of(fleet, self._options.speed)
            yield replace(server, policy=name, rebalancing=fresh.rebalance or None, log=fleet.settings())

    async def _run_against(self, server: Server, requests: Sequence[WorkloadRequest]) -> RunReport:
        options = self._options
        api_key = os.environ.get("POINTSMAN_API_KEY")
        model, context = await served_model(server.url, api_key)
        self._warn_of_long_prompts(requests, context)
        target = Target(
            url=server.url,
            model=options.model or model,
            speed=server.speed,
            seed=options.seed,
            api_key=api_key,
            output_tokens_max=options.output_tokens_max,
            shrink=options.shrink,
        )
        facts = RunFacts(
            policy=server.policy,
            slo_ttft_s=server.slo_ttft_s,
            speed=server.speed,
            offered_rate=mean_rate(requests),
            workload=workload_name(options.trace, options.workload or DEFAULT_WORKLOAD),
            trace=str(options.trace) if options.trace else None,
            seed=options.seed,
        )
        self._load = load = LoadGenerator(target, requests)
        started = time.monotonic()
        try:
            with Display(self._console, load.tally, server) as display:
                finished = await load.run(display.tick)
        finally:
            self._load = None
        report = summarise(load.tally.outcomes, facts, wall_s=time.monotonic() - started, interrupted=not finished)
        report.rebalancing = server.rebalancing
        if server.log is not None:
            try:
                report.moves, report.prompt_share_by_tier = await asyncio.to_thread(_from_log, server.log)
            except HistoryError as error:
                self._console.print(Text(f"migrations are unknown: {error}", style="yellow"), soft_wrap=True)
        return report

    def _warn_of_long_prompts(self, requests: Sequence[WorkloadRequest], context: int | None) -> None:
        cap = self._options.output_tokens_max or sys.maxsize
        shrink = self._options.shrink
        lengths = [r.input_length // shrink + min(r.output_tokens // shrink, cap) for r in requests]
        over = sum(context is not None and length > context for length in lengths)
        if over:
            text = f"{over} requests do not fit the model's {context} tokens; consider --input-tokens-max"
            self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def _show(self, runs: Sequence[RunReport]) -> None:
        if not runs:
            self._console.print("nothing was measured")
            return
        self._console.print(headline(runs[0]), soft_wrap=True)
        self._console.print(runs_table(runs))
        for run in runs:
            self._console.print(instances_table(run))
            if run.errors:
                self._console.print(Text(f"errors, {run.policy}:", style="bold"))
                self._console.print(errors_text(run.errors))
            if warning := lateness_warning(run):
                self._console.print(Text(f"{run.policy}: {warning}", style="yellow"), soft_wrap=True)
        if self._options.out:
            write_json(self._options.out, BenchReport(runs=list(runs)))
            self._console.print(f"numbers written to {self._options.out}", soft_wrap=True)


def _from_log(log: FleetSettings) -> tuple[Moves, dict[str, float] | None]:
    """Of the run in this fleet's log: its moves, and the shares of its prompt tokens by tier."""
    tiers = TierCounter()

    def watched() -> Iterator[LogEntry]:
        for entry in LiveHistory(log).entries():
            tiers.apply(entry.event)
            yield entry

    moves = moves_in(watched())
    return moves, tiers.shares or None
