"""Each policy runs at each rate in a fleet and in the simulator. Prints a table and a verdict."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.policy_set import UnknownPolicyError, policy_set
from pointsman.runtime.settings import ENVIRONMENT_PREFIX
from pointsman.simulation.workload import WorkloadRequest, at_rate
from pointsman_cli.interruption import INTERRUPTED_EXIT_CODE
from pointsman_cli.options import CONTEXT, COUNT, DEFAULT_INPUT_CAP, POSITIVE, comma_list, out_option, rates
from pointsman_cli.output_file import write_json
from pointsman_cli.progress_bar import progress_bar
from pointsman_cli.terminal import table
from pointsman_cli.workload_options import check_one_workload, workload_name, workload_options, workload_requests
from pointsman_lab.agreement.runner import Pace, Pool, pace, run_live, run_simulated
from pointsman_lab.agreement.verdict import Agreement, AgreementReport, Number, Verdict, numbers, verdict

DEFAULT_POLICIES = "round_robin,dualmap,pointsman"
DEFAULT_REQUESTS = 500
WARMUP = 100
LOADS = (0.55, 0.85)
SEED = 1
TOLERANCE = 0.1
DIFFER_EXIT_CODE = 1
NOT_JUDGED_EXIT_CODE = 3
STYLES: dict[Verdict, str] = {"agree": "green", "differ": "bold red", "not judged": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementOptions:
    trace: Path | None
    workload: str | None
    policies: tuple[str, ...]
    order: str
    admission: str
    rates: tuple[float, ...]
    requests: int
    output_tokens_max: int
    speed: float | None
    out: Path | None


@click.command("agreement", context_settings=CONTEXT)
@workload_options
@click.option(
    "--policy",
    "policies",
    metavar="A[,B]",
    default=DEFAULT_POLICIES,
    show_default=True,
    callback=comma_list,
    help="Routing policies; a fresh fleet for each at each rate.",
)
@click.option("--order", type=click.Choice(tuple(sorted(ORDERING_POLICIES))), default="fcfs", show_default=True)
@click.option("--admission", type=click.Choice(tuple(sorted(ADMISSION_POLICIES))), default="none", show_default=True)
@click.option(
    "--rate",
    "rates",
    metavar="R[,R]",
    callback=rates,
    help="Requests a second. Default: {:.0%} and {:.0%} of what keeps the engines busy, as simulated.".format(*LOADS),
)
@click.option("--requests", type=COUNT, metavar="N", default=DEFAULT_REQUESTS, show_default=True, help="At most.")
@click.option(
    "--output-tokens-max",
    type=COUNT,
    metavar="N",
    default=1,
    show_default=True,
    help="Cut longer answers; 1 is the prefill-bound model.",
)
@click.option(
    "--speed",
    type=POSITIVE,
    metavar="X",
    help="Of the fleets. Default: so that processes take little beside a prefill.",
)
@out_option
def agreement_command(**values: object) -> None:
    """Show that the simulator and a running fleet give the same numbers for the same run.

    For each policy and rate a fresh fleet of simulated engines is started, the requests go through its ingress over
    HTTP, and the simulator runs the same with the same settings. TTFT P50 and P90 and the engines' hit rate must agree
    within 10%. The first 100 requests are not counted.

    \b
      pointsman-lab agreement --workload chat --policy pointsman --requests 200
      pointsman-lab agreement --trace conversation.jsonl --out agreement.json
      pointsman-lab agreement --trace conversation.jsonl --policy dualmap --rate 2 --order edf --admission predicted_ttft

    Exit code 0 when all agree, 1 when any differs, 3 when none differs for sure but this machine was too busy to judge
    all. It takes requests / (rate * speed) seconds for each policy and rate: at the defaults and with the conversation
    trace some 12 minutes.
    """
    options = AgreementOptions(**values)  # type: ignore[arg-type]
    console = Console(highlight=False)
    _check(options)
    _forget_settings(console)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(_Comparison(options, console).run(runner))


def _check(options: AgreementOptions) -> None:
    check_one_workload(options.trace, options.workload)
    for policy in options.policies:
        try:
            policy_set(routing=policy, ordering=options.order, admission=options.admission)
        except UnknownPolicyError as error:
            raise click.UsageError(str(error)) from error


def _forget_settings(console: Console) -> None:
    """Environment variables would change the fleet and not the simulator."""
    named = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX))
    for name in named:
        del os.environ[name]
    if named:
        console.print(Text(f"not used, so that both run alike: {', '.join(named)}", style="yellow"), soft_wrap=True)


class _Comparison:
    def __init__(self, options: AgreementOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._requests = _requests(options)

    def run(self, runner: asyncio.Runner) -> int:
        """The exit code. Raises click.ClickException."""
        options, found, interrupted = self._options, list[Agreement](), False
        paced = pace(self._pool(options.policies[0]), self._requests, warmup=WARMUP)
        rates = options.rates or tuple(round(load * paced.saturation, 2) for load in LOADS)
        cells = [(policy, rate) for rate in rates for policy in options.policies]
        try:
            for turn, (policy, rate) in enumerate(cells, 1):
                compared = self._compared(runner, policy, rate, paced, f"[{turn}/{len(cells)}]")
                self._show(compared)
                found.append(compared)
        except KeyboardInterrupt:
            interrupted = True
        self._conclude(found)
        if options.out and found:
            write_json(
                options.out,
                AgreementReport(
                    tolerance=TOLERANCE, workload=workload_name(options.trace, options.workload), runs=found
                ),
            )
            self._console.print(f"numbers written to {options.out}", soft_wrap=True)
        return INTERRUPTED_EXIT_CODE if interrupted else exit_code(found)

    def _pool(self, policy: str) -> Pool:
        return Pool(routing=policy, ordering=self._options.order, admission=self._options.admission)

    def _compared(self, runner: asyncio.Runner, policy: str, rate: float, paced: Pace, turn: str) -> Agreement:
        options, pool = self._options, self._pool(policy)
        requests = at_rate(self._requests, rate)
        speed = options.speed or paced.speed
        seconds = requests[-1].arrival_s / speed
        text = f"{turn} {policy} at {rate:g}/s: a fleet of {pool.engines} engines at speed {speed:g}, {seconds:.0f} s"
        simulated = run_simulated(pool, requests, speed=speed, warmup=WARMUP)
        started = time.monotonic()
        with progress_bar(self._console, len(requests), text) as update:
            live, machine = runner.run(
                run_live(
                    pool,
                    requests,
                    speed=speed,
                    warmup=WARMUP,
                    tick=lambda tally: update(sum(tally.counts.values()), ""),
                )
            )
        compared = numbers(live, simulated, TOLERANCE)
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
        console.print(_table(compared, TOLERANCE))
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
    verdicts = {run.verdict for run in found}
    if "differ" in verdicts or not found:
        return DIFFER_EXIT_CODE
    return NOT_JUDGED_EXIT_CODE if "not judged" in verdicts else 0


def _requests(options: AgreementOptions) -> list[WorkloadRequest]:
    found = workload_requests(
        options.trace, options.workload, requests=options.requests, seed=SEED, input_tokens_max=DEFAULT_INPUT_CAP
    )
    if len(found) <= WARMUP:
        raise click.UsageError(
            f"{len(found)} requests, of which the first {WARMUP} are not counted: nothing is left; raise --requests"
        )
    most = options.output_tokens_max
    return [replace(request, output_tokens=max(1, min(request.output_tokens, most))) for request in found]


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
    title = f"{compared.policy} at {compared.qps:g}/s, {compared.requests} requests"
    made = table(title, ">live", ">simulated", ">least", ">most", ">ratio", f">within {tolerance:.0%}")
    for one in compared.numbers:
        if one.live or one.simulated:
            made.add_row(*_cells(one))
    return made


def _cells(one: Number) -> list[str | Text]:
    label, shape = LABELS[one.name]
    shown = ["-" if value is None else shape.format(value) for value in (one.live, one.simulated, one.least, one.most)]
    ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
    if not one.judged:
        return [Text(text, style="dim") for text in (label, *shown, ratio, "")]
    return [label, *shown, ratio, Text("yes", style="green") if one.within else Text("no", style="bold red")]
