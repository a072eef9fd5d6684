"""The command itself: reads what was asked for, runs each policy at each rate in both worlds, and says who agrees."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
import uvloop
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pointsman.contracts.decisions import Settings
from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.policy_set import UnknownPolicyError, policy_set
from pointsman.runtime.settings import ENVIRONMENT_PREFIX
from pointsman.simulation import workload
from pointsman.simulation.workload import GENERATORS, TraceError, WorkloadRequest, at_rate
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_cli.bench.load import Tally
from pointsman_cli.options import COUNT, POSITIVE, comma_list, rates, workload_size
from pointsman_cli.output_file import OUTPUT_FILE, write_json
from pointsman_lab.agreement.runner import Pace, Pool, pace, run_live, run_simulated
from pointsman_lab.agreement.verdict import Agreement, AgreementReport, Number, Verdict, numbers, verdict

DEFAULT_POLICIES = "round_robin,dualmap,pointsman"
DEFAULT_REQUESTS = 500
DEFAULT_WARMUP = 100
GENERATED_RATE = 4.0
LOADS = (0.55, 0.85)
"""Of saturation, where no rates are asked for: moderate, and near it."""

DIFFER_EXIT_CODE = 1
NOT_JUDGED_EXIT_CODE = 3
INTERRUPTED_EXIT_CODE = 130
AS_STARTED = Pool(routing="")
STYLES: dict[Verdict, str] = {"agree": "green", "differ": "bold red", "not judged": "yellow"}


def _settings(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> Settings:
    pairs = [text.partition("=") for text in values]
    if any(not (name and equals) for name, equals, _ in pairs):
        msg = "write NAME=VALUE, such as ttft_slo_threshold=0.8 or admission.tpot_check=true"
        raise click.BadParameter(msg)
    return {name: value for name, _, value in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementOptions:
    """What was asked for on the command line."""

    trace: Path | None
    workload: str | None
    policies: tuple[str, ...]
    order: str
    admission: str
    settings: Settings
    qps: tuple[float, ...]
    requests: int
    warmup: int
    input_cap: int
    output_tokens_max: int
    engines: int
    engine_model: str
    kv_blocks: int | None
    prefill_window_tokens: int
    slo_ttft: float
    speed: float | None
    seed: int
    tolerance: float
    json_file: Path | None


@click.command("agreement", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Mooncake-format trace (JSONL).")
@click.option("--workload", type=click.Choice(tuple(GENERATORS)), help="Generated workload instead of a trace.")
@click.option(
    "--policies",
    metavar="A,B,C",
    default=DEFAULT_POLICIES,
    show_default=True,
    callback=comma_list,
    help="Routing policies; a fresh fleet for each at each rate.",
)
@click.option(
    "--order",
    type=click.Choice(tuple(sorted(ORDERING_POLICIES))),
    default=AS_STARTED.ordering,
    show_default=True,
    help="Who is granted first.",
)
@click.option(
    "--admission",
    type=click.Choice(tuple(sorted(ADMISSION_POLICIES))),
    default=AS_STARTED.admission,
    show_default=True,
    help="What is refused early.",
)
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_settings,
    help="A setting of the routing policy; admission.NAME and order.NAME for the other two. Repeatable.",
)
@click.option(
    "--qps",
    metavar="1.5,2.25",
    callback=rates,
    help="Requests a second. Default: {:.0%} and {:.0%} of what keeps the engines busy, as simulated.".format(*LOADS),
)
@workload_size(requests=DEFAULT_REQUESTS, warmup=DEFAULT_WARMUP)
@click.option(
    "--output-tokens-max",
    type=COUNT,
    metavar="N",
    default=1,
    show_default=True,
    help="Cut longer answers; 1 is the prefill-bound model.",
)
@click.option(
    "--engines", type=COUNT, metavar="N", default=AS_STARTED.engines, show_default=True, help="Engines of each fleet."
)
@click.option(
    "--engine-model",
    type=click.Choice(tuple(PROFILES)),
    default=DEFAULT_PROFILE,
    show_default=True,
    help="Their model.",
)
@click.option("--kv-blocks", type=COUNT, metavar="N", help="KV cache of each engine, in its blocks of 64 tokens.")
@click.option(
    "--prefill-window-tokens",
    type=COUNT,
    metavar="N",
    default=AS_STARTED.prefill_window_tokens,
    show_default=True,
    help="Uncached prompt tokens that may be inside one engine before their first token.",
)
@click.option(
    "--slo-ttft", type=POSITIVE, metavar="S", default=AS_STARTED.slo_ttft_s, show_default=True, help="TTFT objective."
)
@click.option(
    "--speed",
    type=POSITIVE,
    metavar="X",
    help="Of the fleets. Default: so that the way through the processes is small beside a prefill.",
)
@click.option("--seed", type=int, default=AS_STARTED.seed, show_default=True, help="For arrivals, tokens and keys.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, max=1),
    default=0.1,
    show_default=True,
    help="How far live may be from simulated, as a share of the latter.",
)
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write the numbers here.")
def agreement_command(**values: object) -> None:
    """Show that the simulator and a running fleet give the same numbers for the same run.

    For each policy and rate a fresh fleet of simulated engines is started, the requests go through its ingress over
    HTTP, and the simulator runs the same with the same settings. TTFT P50 and P90 and the engines' hit rate must agree
    within the tolerance.

    \b
      pointsman-lab agreement --workload chat --policies pointsman --requests 200
      pointsman-lab agreement --trace conversation.jsonl --json agreement.json
      pointsman-lab agreement --trace conversation.jsonl --policies dualmap --qps 2 --order edf --admission predicted_ttft

    Exit code 0 when all agree, 1 when any differs, 3 when none differs for sure but this machine was too busy to judge
    all. It takes requests / (qps * speed) seconds for each policy and rate: at the defaults and with the conversation
    trace some 12 minutes.
    """
    options = AgreementOptions(**values)  # type: ignore[arg-type]
    console = Console(highlight=False)
    _check(options)
    _forget_settings(console)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(_Both(options, console).run(runner))


def _check(options: AgreementOptions) -> None:
    if (options.trace is None) == (options.workload is None):
        msg = "give --trace or --workload, one of them"
        raise click.UsageError(msg)
    for policy in options.policies:
        try:
            policy_set(routing=policy, ordering=options.order, admission=options.admission, settings=options.settings)
        except UnknownPolicyError as error:
            raise click.UsageError(str(error)) from error


def _forget_settings(console: Console) -> None:
    """Variables that would tell the fleet what nobody tells the simulator."""
    named = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX))
    for name in named:
        del os.environ[name]
    if named:
        console.print(Text(f"not used, so that both run alike: {', '.join(named)}", style="yellow"), soft_wrap=True)


class _Both:
    """The whole command. Ctrl-C keeps what has been compared so far."""

    def __init__(self, options: AgreementOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._requests = _requests(options)

    def run(self, runner: asyncio.Runner) -> int:
        """The exit code. Raises click.ClickException."""
        options, found, interrupted = self._options, list[Agreement](), False
        paced = pace(self._pool(options.policies[0]), self._requests, warmup=options.warmup)
        cells = [(policy, rate) for rate in self._rates(paced) for policy in options.policies]
        try:
            for turn, (policy, rate) in enumerate(cells, 1):
                compared = self._compared(runner, policy, rate, paced, f"[{turn}/{len(cells)}]")
                self._show(compared)
                found.append(compared)
        except KeyboardInterrupt:
            interrupted = True
        self._conclude(found)
        if options.json_file and found:
            write_json(options.json_file, AgreementReport(tolerance=options.tolerance, workload=self._name, runs=found))
            self._console.print(f"numbers written to {options.json_file}", soft_wrap=True)
        return INTERRUPTED_EXIT_CODE if interrupted else exit_code(found)

    @property
    def _name(self) -> str:
        return self._options.trace.name if self._options.trace else self._options.workload or ""

    def _pool(self, policy: str) -> Pool:
        options = self._options
        return Pool(
            routing=policy,
            settings=options.settings,
            ordering=options.order,
            admission=options.admission,
            engines=options.engines,
            profile=options.engine_model,
            kv_blocks=options.kv_blocks,
            prefill_window_tokens=options.prefill_window_tokens,
            slo_ttft_s=options.slo_ttft,
            seed=options.seed,
        )

    def _rates(self, paced: Pace) -> tuple[float, ...]:
        return self._options.qps or tuple(round(load * paced.saturation, 2) for load in LOADS)

    def _compared(self, runner: asyncio.Runner, policy: str, rate: float, paced: Pace, turn: str) -> Agreement:
        options, pool = self._options, self._pool(policy)
        requests = at_rate(self._requests, rate)
        speed = options.speed or paced.speed
        seconds = requests[-1].arrival_s / speed
        said = f"{turn} {policy} at {rate:g}/s: a fleet of {pool.engines} engines at speed {speed:g}, {seconds:.0f} s"
        simulated = run_simulated(pool, requests, speed=speed, warmup=options.warmup)
        started = time.monotonic()
        with _progress(self._console, len(requests), said) as tick:
            live, machine = runner.run(run_live(pool, requests, speed=speed, warmup=options.warmup, tick=tick))
        compared = numbers(live, simulated, options.tolerance)
        return Agreement(
            policy=policy,
            ordering=pool.ordering,
            admission=pool.admission,
            qps=rate,
            engines=pool.engines,
            speed=speed,
            requests=live.requests,
            verdict=verdict(compared, disturbed=machine.disturbed(paced.prefill_p50_s)),
            waited_s=machine.waited_s,
            late_p90_s=machine.late_p90_s,
            stood_still_s=machine.stood_still_s,
            warned=machine.warned,
            wall_s=time.monotonic() - started,
            numbers=compared,
        )

    def _show(self, compared: Agreement) -> None:
        console = self._console
        console.print(_table(compared, self._options.tolerance))
        console.print(
            f"a request waited {compared.waited_s:.3f} s for a core and was sent {compared.late_p90_s:.3f} s late (P90), "
            f"nothing at all ran for {compared.stood_still_s:.3f} s at most, engine time",
            style="dim",
            soft_wrap=True,
        )
        for warning, times in compared.warned.items():
            console.print(f"the fleet warned, {times}x: {warning}", style="yellow", soft_wrap=True)

    def _conclude(self, found: Sequence[Agreement]) -> None:
        for word, style in STYLES.items():
            runs = [f"{run.policy} at {run.qps:g}/s" for run in found if run.verdict == word]
            if runs:
                self._console.print(Text(f"{word}: {', '.join(runs)}", style=style), soft_wrap=True)
        if any(run.verdict == "not judged" for run in found):
            self._console.print("this machine was too busy: run again with a lower --speed, or when it is idle")


def exit_code(found: Sequence[Agreement]) -> int:
    """Of the command; nothing compared is nothing that agrees."""
    verdicts = {run.verdict for run in found}
    if "differ" in verdicts or not found:
        return DIFFER_EXIT_CODE
    return NOT_JUDGED_EXIT_CODE if "not judged" in verdicts else 0


def _requests(options: AgreementOptions) -> list[WorkloadRequest]:
    """What both worlds get, answers cut as well as prompts."""
    chance = random.Random(options.seed)
    if options.trace:
        try:
            read = workload.read_trace(
                options.trace, limit=options.requests, chance=chance, input_tokens_max=options.input_cap
            )
        except TraceError as error:
            raise click.ClickException(str(error)) from error
    else:
        generated = GENERATORS[options.workload or ""](options.requests, rate=GENERATED_RATE, chance=chance)
        read = workload.input_capped(generated, options.input_cap)
    if len(read) <= options.warmup:
        msg = f"{len(read)} requests, of which the first {options.warmup} are not counted: nothing is left; lower --warmup"
        raise click.UsageError(msg)
    most = options.output_tokens_max
    return [replace(request, output_tokens=max(1, min(request.output_tokens, most))) for request in read]


@contextmanager
def _progress(console: Console, total: int, said: str) -> Iterator[Callable[[Tally], None]]:
    """A bar on a terminal, a line elsewhere. Gives what to call while a fleet serves."""
    if not console.is_terminal:
        console.print(said, markup=False, soft_wrap=True)
        yield lambda _tally: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(said.replace("[", r"\["), total=total)
        yield lambda tally: progress.update(task, completed=sum(tally.counts.values()))


# --- Tables ---

LABELS: dict[str, tuple[str, str]] = {
    "ttft_p50_s": ("TTFT P50", "{:.3f} s"),
    "ttft_p90_s": ("TTFT P90", "{:.3f} s"),
    "hit_rate": ("hit rate (engines)", "{:.2%}"),
    "ttft_p99_s": ("TTFT P99", "{:.3f} s"),
    "tpot_p50_s": ("TPOT P50", "{:.4f} s"),
    "effective_capacity": ("effective capacity", "{:.1%}"),
    "completed": ("completed", "{:,.0f}"),
    "rejected": ("rejected", "{:,.0f}"),
    "failed": ("failed", "{:,.0f}"),
}


def _table(compared: Agreement, tolerance: float) -> Table:
    """A row for each figure; those that are judged say how it went."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{compared.policy} at {compared.qps:g}/s, {compared.requests} requests")
    for heading in ("live", "simulated", "least", "most", "ratio", f"within {tolerance:.0%}"):
        table.add_column(heading, justify="right")
    for one in compared.numbers:
        if one.live or one.simulated:
            table.add_row(*_cells(one))
    return table


def _cells(one: Number) -> list[str | Text]:
    label, shape = LABELS[one.name]
    shown = ["-" if value is None else shape.format(value) for value in (one.live, one.simulated, one.least, one.most)]
    ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
    if not one.judged:
        return [Text(text, style="dim") for text in (label, *shown, ratio, "")]
    return [label, *shown, ratio, Text("yes", style="green") if one.within else Text("no", style="bold red")]
