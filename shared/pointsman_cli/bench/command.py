"""The command itself: reads what was asked for, makes the workload, runs it once or for each policy, and prints."""

import asyncio
import contextlib
import random
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

import aiohttp
import click
import uvloop
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.telemetry import configure_logging
from pointsman.simulation import workload
from pointsman.simulation.workload import FIRST_TOKEN_ID, GENERATORS, TraceError, WorkloadRequest
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_cli.bench.comparison import REAL_START_SECONDS_MAX, START_SECONDS_MAX, FreshFleets, Variant
from pointsman_cli.bench.load import LoadGenerator, Tally, Target
from pointsman_cli.bench.moves import Moves, moves_in
from pointsman_cli.bench.report import (
    BenchReport,
    RunFacts,
    RunReport,
    attainment,
    errors_text,
    headline,
    instances_table,
    lateness_warning,
    runs_table,
    summarise,
)
from pointsman_cli.discovery import FleetFile, find_fleet, running_fleets
from pointsman_cli.history.errors import HistoryError
from pointsman_cli.history.live import LiveHistory
from pointsman_cli.options import COUNT, POSITIVE
from pointsman_cli.output_file import OUTPUT_FILE, write_json
from pointsman_cli.up.settings import SIMULATED, VLLM

DEFAULT_SLO_TTFT_S = 5.0
GENERATED_REQUESTS = 200
GENERATED_RATE = 4.0
"""Requests a second (engine time) of the generators where no --rate is given."""

COMPARED_SPEED = 20.0
"""Speed of the fleets that --compare starts, where no --speed is given."""

CHECK_SECONDS = 5.0
DISPLAY_SECONDS = 0.25
INTERRUPTED_EXIT_CODE = 130


class UnreachableError(click.ClickException):
    """Nothing usable answers at the URL; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What was asked for on the command line. None: not said."""

    url: str | None
    trace: Path | None
    workload: str | None
    requests: int | None
    rate: float | None
    time_scale: float | None
    warmup: int
    seed: int
    input_tokens_max: int | None
    output_tokens_max: int | None
    shrink: int
    slo_ttft: float | None
    speed: float | None
    model: str | None
    api_key: str | None
    vocab_size: int
    in_flight_max: int
    request_seconds_max: float
    json_file: Path | None
    compare: str | None
    engines: int
    engine: str
    engine_command: str | None
    engine_model: str | None
    kv_blocks: int | None
    nats: str | None
    data: Path | None

    @property
    def real_engines(self) -> bool:
        """Whether --compare starts engines whose time is the wall's."""
        return self.engine != SIMULATED or self.engine_command is not None


@click.command("bench", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--url", metavar="URL", help="Where to send requests. Default: the fleet that runs on this machine.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Mooncake-format trace (JSONL).")
@click.option("--workload", type=click.Choice(tuple(GENERATORS)), help="Generated workload instead of a trace.")
@click.option(
    "--requests",
    type=COUNT,
    metavar="N",
    help=f"How many. Default: the whole trace, or {GENERATED_REQUESTS} generated.",
)
@click.option(
    "--rate", type=POSITIVE, metavar="X", help="Scale arrivals to this mean rate, requests per second of engine time."
)
@click.option(
    "--time-scale", type=POSITIVE, metavar="X", help="Send this much faster than the workload says. Default: the speed."
)
@click.option("--warmup", type=click.IntRange(min=0), default=0, help="The first N requests are sent but not counted.")
@click.option("--seed", type=int, default=1, show_default=True, help="For arrivals, generators and token ids.")
@click.option("--input-tokens-max", type=COUNT, metavar="N", help="Cut longer prompts here.")
@click.option(
    "--output-tokens-max", "--max-tokens-cap", type=COUNT, metavar="N", help="Ask for no more output tokens than this."
)
@click.option(
    "--shrink",
    type=COUNT,
    metavar="N",
    default=1,
    show_default=True,
    help="Make prompts and answers N times shorter, with the same prefixes shared: for small models on small machines.",
)
@click.option(
    "--slo-ttft", type=POSITIVE, metavar="X", help="TTFT objective, engine seconds. Default: the fleet's, else 5."
)
@click.option(
    "--speed",
    type=POSITIVE,
    metavar="X",
    help=f"Speed of the engines. Default: the fleet's, else 1; with --compare {COMPARED_SPEED:g}.",
)
@click.option("--model", metavar="NAME", help="Model to ask for. Default: the first that the server names.")
@click.option("--api-key", envvar="POINTSMAN_API_KEY", show_envvar=True, help="Sent as bearer token.")
@click.option(
    "--vocab-size",
    type=click.IntRange(min=FIRST_TOKEN_ID + 1),
    default=4000,
    show_default=True,
    help="Token ids stay below this.",
)
@click.option(
    "--in-flight-max", type=COUNT, metavar="N", default=1000, show_default=True, help="Open requests at any moment."
)
@click.option(
    "--request-seconds-max",
    type=POSITIVE,
    metavar="X",
    default=600.0,
    show_default=True,
    help="Wall seconds per request.",
)
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write the numbers here.")
@click.option(
    "--compare",
    metavar="POLICY,POLICY",
    help="Run once for each policy, each on a fresh fleet of its own. POLICY+REBALANCING chooses both.",
)
@click.option(
    "--engines", type=COUNT, metavar="N", default=4, show_default=True, help="With --compare: engines of each fleet."
)
@click.option(
    "--engine",
    type=click.Choice((SIMULATED, VLLM)),
    default=SIMULATED,
    show_default=True,
    help="With --compare: simulated engines, or vLLM's CPU build (docs/engines.md).",
)
@click.option(
    "--engine-command", metavar="TEXT", help="With --compare: start engines so, as pointsman up --engine-command does."
)
@click.option(
    "--engine-model",
    type=click.Choice(tuple(PROFILES)),
    help=f"With --compare: their model. Default: {DEFAULT_PROFILE}, or that of the real engine.",
)
@click.option("--kv-blocks", type=COUNT, metavar="N", help="With --compare: KV cache of each engine, in its blocks.")
@click.option("--nats", metavar="URL", help="The fleet on this nats-server, where several run.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="The fleet with this data directory.")
def bench_command(**values: object) -> None:
    """Replay a workload against a fleet (or any OpenAI-compatible server) and say how well it was served.

    Requests go out at their own times, whether or not earlier answers have come; prompts are token ids that share
    prefixes exactly where the trace's hash_ids do; answers are streamed. All latencies are engine time.

    \b
      pointsman bench --workload chat                          generated conversations, against the running fleet
      pointsman bench --trace conversation.jsonl --requests 1000 --json run.json
      pointsman bench --trace conversation.jsonl --rate 8      the same prompts, at 8 requests a second
      pointsman bench --workload tools --requests 1000 --compare round_robin,dualmap
      pointsman bench --workload two_hot_prefixes --requests 1000 --rate 25 --compare pointsman+off,pointsman+dualmap_pair
      pointsman bench --url http://gpu:8000 --workload chat    one vLLM server, without Pointsman
      pointsman bench --compare round_robin,pointsman --engine vllm --engines 2 --requests 100 --shrink 8    real engines

    Mooncake (FAST'25) published its traces in this format; Pointsman ships none.
    """
    options = BenchOptions(**values)  # type: ignore[arg-type]
    _check(options)
    configure_logging("error", "text")
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_Bench(options, Console(highlight=False)).run()))


def _check(options: BenchOptions) -> None:
    if options.trace and options.workload:
        msg = "give --trace or --workload, not both"
        raise click.UsageError(msg)
    if options.rate and options.time_scale:
        msg = "give --rate or --time-scale, not both"
        raise click.UsageError(msg)
    if options.compare and options.url:
        msg = "--compare starts fleets of its own; leave --url away"
        raise click.UsageError(msg)
    if options.real_engines and not options.compare:
        msg = "--engine and --engine-command are for the fleets that --compare starts"
        raise click.UsageError(msg)
    if options.real_engines and options.speed:
        msg = "real engines run at their own speed; leave --speed away"
        raise click.UsageError(msg)
    _variants(options)


def _variants(options: BenchOptions) -> list[Variant]:
    """What is compared. Raises click.BadParameter."""
    return [Variant.named(text) for text in options.compare.split(",")] if options.compare else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """What the requests are sent to, and what is known of it."""

    url: str
    policy: str
    speed: float
    slo_ttft_s: float
    rebalancing: str | None = None
    log: FleetSettings | None = None
    """How to reach the log of a fleet that is all ours."""


class _Bench:
    """The whole command, from the workload to the printed tables. Ctrl-C keeps what was measured so far."""

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
        """The first Ctrl-C ends the load and keeps its numbers; without a load, or the second time, all ends."""
        if self._load is not None and not self._interrupted:
            self._load.stop()
        else:
            cancel()
        self._interrupted = True

    def _requests(self) -> list[WorkloadRequest]:
        options = self._options
        chance = random.Random(options.seed)
        if options.trace:
            try:
                requests = workload.read_trace(
                    options.trace, limit=options.requests, chance=chance, input_tokens_max=options.input_tokens_max
                )
            except TraceError as error:
                raise click.ClickException(str(error)) from error
            return workload.at_rate(requests, options.rate) if options.rate else requests
        generate = GENERATORS[options.workload or "chat"]
        rate = options.rate or GENERATED_RATE
        requests = generate(options.requests or GENERATED_REQUESTS, rate=rate, chance=chance)
        return workload.at_rate(workload.input_capped(requests, options.input_tokens_max), rate)

    def _servers(self) -> list[AbstractAsyncContextManager[_Server]]:
        """What to run against, one after the other; each is there while its context is open."""
        options = self._options
        if not options.compare:
            return [contextlib.nullcontext(self._running_server())]
        told = {
            "engine": options.engine,
            "engine-command": options.engine_command,
            "engine-model": options.engine_model,
            "slo-ttft": options.slo_ttft,
            "kv-blocks": options.kv_blocks,
        }
        arguments = [text for name, value in told.items() if value is not None for text in (f"--{name}", str(value))]
        fleets = FreshFleets(
            engines=options.engines,
            speed=1.0 if options.real_engines else options.speed or COMPARED_SPEED,
            arguments=arguments,
            start_seconds_max=REAL_START_SECONDS_MAX if options.real_engines else START_SECONDS_MAX,
        )
        return [self._fresh(fleets, variant) for variant in _variants(options)]

    @asynccontextmanager
    async def _fresh(self, fleets: FreshFleets, variant: Variant) -> AsyncIterator[_Server]:
        text = f"starting a fleet of {fleets.engines} engines that routes by {variant.label} ..."
        self._console.print(text, style="dim")
        async with fleets.running(variant) as fleet:
            yield replace(
                self._server_of(fleet),
                policy=variant.label,
                rebalancing=variant.rebalancing or None,
                log=fleet.settings(),
            )

    def _running_server(self) -> _Server:
        options = self._options
        if options.url is None:
            return self._server_of(find_fleet(options.nats, options.data))
        url = options.url.rstrip("/").removesuffix("/v1")
        known = next((fleet for fleet in running_fleets() if fleet.ingress.rstrip("/") == url), None)
        if known is not None:
            return self._server_of(known)
        slo_ttft_s = options.slo_ttft or DEFAULT_SLO_TTFT_S
        return _Server(url=url, policy="unknown", speed=options.speed or 1.0, slo_ttft_s=slo_ttft_s)

    def _server_of(self, fleet: FleetFile) -> _Server:
        return _Server(
            url=fleet.ingress.rstrip("/"),
            policy=fleet.policy,
            speed=self._options.speed or fleet.speed,
            slo_ttft_s=self._options.slo_ttft or fleet.slo_ttft,
        )

    async def _run_against(self, server: _Server, requests: Sequence[WorkloadRequest]) -> RunReport:
        options = self._options
        model, longest = await _served_model(server.url, options.api_key)
        self._warn_of_long_prompts(requests, longest)
        target = Target(
            url=server.url,
            model=options.model or model,
            speed=server.speed,
            vocab_size=options.vocab_size,
            seed=options.seed,
            slo_ttft_s=options.slo_ttft,
            api_key=options.api_key,
            output_tokens_max=options.output_tokens_max,
            shrink=options.shrink,
            in_flight_max=options.in_flight_max,
            request_seconds_max=options.request_seconds_max,
        )
        time_scale = options.time_scale or server.speed
        facts = RunFacts(
            policy=server.policy,
            slo_ttft_s=server.slo_ttft_s,
            speed=server.speed,
            time_scale=time_scale,
            offered_rate=workload.mean_rate(requests) * time_scale / server.speed,
            workload=options.trace.name if options.trace else options.workload or "chat",
            trace=str(options.trace) if options.trace else None,
            seed=options.seed,
        )
        self._load = load = LoadGenerator(target, requests, time_scale=time_scale, warmup=options.warmup)
        started = time.monotonic()
        try:
            with _Display(self._console, load.tally, server) as display:
                finished = await load.run(display.tick)
        finally:
            self._load = None
        wall_s = time.monotonic() - started
        report = summarise(load.tally.outcomes, facts, wall_s=wall_s, interrupted=not finished)
        report.rebalancing = server.rebalancing
        report.moves = await self._moves(server)
        return report

    async def _moves(self, server: _Server) -> Moves | None:
        """What the log says of rebalancing, where the log holds this run alone."""
        if server.log is None:
            return None
        try:
            return await asyncio.to_thread(_moves_of, server.log)
        except HistoryError as error:
            self._console.print(Text(f"what moved is not known: {error}", style="yellow"), soft_wrap=True)
            return None

    def _warn_of_long_prompts(self, requests: Sequence[WorkloadRequest], longest: int | None) -> None:
        """Requests that the model has no room for will be refused: better to say so before than after."""
        cap = self._options.output_tokens_max or sys.maxsize
        shrink = self._options.shrink
        lengths = [r.input_length // shrink + min(r.output_tokens // shrink, cap) for r in requests]
        over = sum(longest is not None and length > longest for length in lengths)
        if over:
            text = f"{over} requests do not fit the model's {longest} tokens; consider --input-tokens-max"
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
                self._console.print(Text(f"errors, {run.policy}:", style="bold"), errors_text(run.errors))
            if warning := lateness_warning(run):
                self._console.print(Text(f"{run.policy}: {warning}", style="yellow"), soft_wrap=True)
        if self._options.json_file:
            write_json(self._options.json_file, BenchReport(runs=list(runs)))
            self._console.print(f"numbers written to {self._options.json_file}", soft_wrap=True)


def _moves_of(settings: FleetSettings) -> Moves:
    """Raises HistoryError."""
    return moves_in(LiveHistory(settings).entries())


async def _served_model(url: str, api_key: str | None) -> tuple[str, int | None]:
    """The first model that the server names, and the longest context it allows, if it says. Raises UnreachableError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=CHECK_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/models", headers=headers) as answer,
        ):
            if answer.status == HTTPStatus.UNAUTHORIZED:
                msg = f"{url} asks for an API key; give one with --api-key"
                raise UnreachableError(msg)
            model = (await answer.json())["data"][0]
            return str(model["id"]), model.get("max_model_len")
    except (aiohttp.ClientConnectionError, TimeoutError, OSError) as error:
        msg = f"nothing answers at {url} ({str(error) or type(error).__name__}); start a fleet with: pointsman up"
        raise UnreachableError(msg) from error
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        msg = f"{url} does not look like an OpenAI-compatible server: /v1/models names no model"
        raise UnreachableError(msg) from error


class _Display:
    """The progress line: on a terminal live, elsewhere nothing. Redrawn by `tick`, no thread."""

    def __init__(self, console: Console, tally: Tally, server: _Server) -> None:
        self._tally = tally
        self._server = server
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next = 0.0
        if self._live is None:
            console.print(f"sending {tally.total} requests to {server.url} ({server.policy})")

    def __enter__(self) -> "_Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        """Redraw, unless that was done a moment ago."""
        if self._live and time.monotonic() >= self._next:
            self._next = time.monotonic() + DISPLAY_SECONDS
            self._live.update(self._line(), refresh=True)

    def _line(self) -> Table:
        tally = self._tally
        met = attainment(tally.outcomes, self._server.slo_ttft_s)
        ended = sum(tally.counts.values())
        line = Table.grid(padding=(0, 2))
        line.add_row(
            Text(self._server.policy, style="bold"),
            ProgressBar(total=tally.total, completed=ended, width=30),
            f"{tally.sent}/{tally.total} sent",
            f"{tally.in_flight} running",
            Text(f"{tally.counts['completed']} done", style="green"),
            Text(f"{tally.counts['rejected']} rejected", style="yellow" if tally.counts["rejected"] else "dim"),
            Text(f"{tally.counts['failed']} failed", style="red" if tally.counts["failed"] else "dim"),
            "" if met is None else f"{met:.1%} within the objective",
        )
        return line
