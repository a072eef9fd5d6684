"""`pointsman-lab torture`: runs seeds, and prints the first failure with the command that repeats it."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from pointsman_cli.interruption import INTERRUPTED_EXIT_CODE
from pointsman_cli.options import CONTEXT, COUNT, WHOLE, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.progress_bar import progress_bar
from pointsman_lab.torture.run import Verdict, run_seed

DEFAULT_SEEDS = 100
FAILURES_SHOWN_MAX = 3
PROBLEMS_SHOWN_MAX = 8
FAILED_EXIT_CODE = 1


@click.command("torture", context_settings=CONTEXT)
@click.option("--seeds", type=COUNT, default=DEFAULT_SEEDS, show_default=True, help="How many to run.")
@click.option("--first", type=WHOLE, default=1, show_default=True, help="The first of them.")
@click.option("--seed", type=WHOLE, help="Run this one seed and show everything that was done to it.")
@click.option("--jobs", type=COUNT, default=1, show_default=True, help="Processes to run seeds in.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first seed that fails.")
@out_option
def torture_command(seeds: int, first: int, seed: int | None, jobs: int, keep_going: bool, out: Path | None) -> None:
    """Run the whole system in one process, on virtual time, under faults drawn from a seed, and check what must hold.

    Ingress, scheduler, workers, recorder, rebalancer, scaler and simulated engines run as they are; the log, the network,
    the engines' sockets and the clocks are simulated. Messages are lost, doubled, delayed and overtaken; processes are
    killed, paused, cut off and started again; dates jump; engines restart. Then all faults end, and everything must
    come to agree. docs/testing.md says what is checked.

    \b
    Examples:
      pointsman-lab torture --seeds 200           seeds 1 to 200
      pointsman-lab torture --seed 4711           one seed again, with all that was done to it: same seed, same log
      pointsman-lab torture --first 1000 --seeds 1000 --jobs 2

    Failures are shown as they come; an interrupted run tells of the seeds that it
    has run. Exits 1 when a seed fails.
    """
    chosen = [seed] if seed is not None else range(first, first + seeds)
    console = Console(stderr=True)
    verdicts, failed, interrupted = list[Verdict](), list[Verdict](), False
    try:
        for verdict in _run(chosen, jobs=jobs, keep_going=keep_going, console=console):
            verdicts.append(verdict)
            if seed is not None:
                _show_trace(verdict)
            if verdict.problems:
                failed.append(verdict)
                if len(failed) <= FAILURES_SHOWN_MAX:
                    _show_failure(verdict, with_trace=seed is None)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted")
    _show_sum(verdicts, failed)
    if out is not None:
        write_json(out, [asdict(verdict) for verdict in verdicts])
    if failed or interrupted:
        raise SystemExit(FAILED_EXIT_CODE if failed else INTERRUPTED_EXIT_CODE)


def _run(seeds: Iterable[int], *, jobs: int, keep_going: bool, console: Console) -> Iterator[Verdict]:
    chosen = list(seeds)
    started, entries, steps = time.monotonic(), 0, 0
    with progress_bar(console, len(chosen), "torture") as update:
        for number, verdict in enumerate(_verdicts(chosen, jobs), 1):
            yield verdict
            entries += verdict.entries
            steps += verdict.steps
            seconds = time.monotonic() - started
            rate = f"{steps / seconds:,.0f} steps/s, {entries / seconds:,.0f} log events/s"
            update(number, rate if console.is_terminal else "")
            if verdict.problems and not keep_going:
                return


def _verdicts(seeds: list[int], jobs: int) -> Iterator[Verdict]:
    if jobs == 1 or len(seeds) == 1:
        yield from map(run_seed, seeds)
        return
    pool = ProcessPoolExecutor(jobs)
    try:
        yield from pool.map(run_seed, seeds)
    finally:
        pool.shutdown(cancel_futures=True)


def _show_failure(verdict: Verdict, *, with_trace: bool) -> None:
    print(f"seed {verdict.seed} FAILED:")
    for problem in verdict.problems[:PROBLEMS_SHOWN_MAX]:
        print(f"  {problem}")
    if len(verdict.problems) > PROBLEMS_SHOWN_MAX:
        print(f"  and {len(verdict.problems) - PROBLEMS_SHOWN_MAX} more")
    if with_trace:
        _show_trace(verdict)
    print(f"run it again: pointsman-lab torture --seed {verdict.seed}")


def _show_trace(verdict: Verdict) -> None:
    print(f"what was done to the fleet of seed {verdict.seed} (virtual seconds):")
    for at, what in verdict.trace:
        print(f"  {at:9.3f}  {what}")


def _show_sum(verdicts: list[Verdict], failed: list[Verdict]) -> None:
    outcomes: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for verdict in verdicts:
        outcomes.update(verdict.outcomes)
        events.update(verdict.events)
    requests = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    entries = sum(verdict.entries for verdict in verdicts)
    virtual = sum(verdict.virtual_seconds for verdict in verdicts)
    print(f"{len(verdicts)} seeds, {entries:,} log events, {virtual:,.0f} virtual seconds; requests: {requests}")
    print("entries: " + ", ".join(f"{count:,} {kind}" for kind, count in events.most_common()))
    if len(verdicts) == 1:
        print(f"digest of the log: {verdicts[0].digest}")
    print(f"{len(failed)} failed" if failed else "all passed")
