"""`pointsman replay`: fold a log again, and with `--verify` decide everything again."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from pointsman.ports import LogEntry
from pointsman.runtime.telemetry import configure_logging
from pointsman.simulation.replay import Verdict, fold, verify
from pointsman.state.state import State
from pointsman_cli.history.differences import show_difference
from pointsman_cli.history.output import console_for, json_option, progress_console, write_json
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import History, Source, source_options
from pointsman_cli.history.start_point import StartPoint, beginning_of
from pointsman_cli.history.time_options import HELP, UpTo, moment_in
from pointsman_cli.terminal import wall_time

DIFFERENT_EXIT_CODE = 1


@click.command("replay", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@source_options
@click.option(
    "--verify", "verifying", is_flag=True, help="Recompute every decision and compare; exit code 1 if one differs."
)
@click.option("--to", metavar="MOMENT", help=f"End there: {HELP}.")
@json_option
def replay_command(source: Source, verifying: bool, to: str | None, json_file: Path | None) -> None:
    """Fold a log through the production State; with --verify, take every decision again and compare.

    \b
      pointsman replay                                       the running fleet's log, up to now
      pointsman replay --verify                              the same, and every decision of it
      pointsman replay --from .pointsman/archive.sqlite --verify       what the recorder kept
      pointsman replay --from incident.pmlog --verify --to 07:31:05    an exported bundle, up to a time of day
      pointsman tap --all --no-follow --json | pointsman replay --from - --verify

    A decision is recomputed from the state that its leader had: the log up to its as_of, and all decisions before it.
    It is identical only if every field is, bit for bit. Exit codes: 0 nothing differs, 1 something does, 2 no log.
    """
    configure_logging("error", "text")
    console = console_for(json_file)
    with source.open() as history:
        moment = moment_in(history, to)
        beginning = beginning_of(history, moment)
        entries = UpTo(shown(history, progress_console(), "replaying", beginning.start), moment)
        replayed = (_verified if verifying else _folded)(history, beginning, entries)
    _show(console, replayed)
    if json_file:
        write_json(json_file, replayed.as_json())
    sys.exit(DIFFERENT_EXIT_CODE if replayed.verdict and not replayed.verdict.ok else 0)


@dataclass(slots=True)
class _Tally:
    """Counts entries while others read them."""

    entries: Iterable[LogEntry]
    types: Counter[str]
    first: LogEntry | None = None
    last: LogEntry | None = None
    counted: bool = False

    def __iter__(self) -> Iterator[LogEntry]:
        if self.counted:  # a second cursor
            return iter(self.entries)
        self.counted = True
        return self._counting()

    def _counting(self) -> Iterator[LogEntry]:
        types = self.types
        for entry in self.entries:
            self.first = self.first or entry
            self.last = entry
            types[type(entry.event).__name__ if entry.event else "undecodable"] += 1
            yield entry


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What came out, and how fast."""

    origin: str
    beginning: str
    tally: _Tally
    speed: float
    state: State | None
    verdict: Verdict | None
    seconds: float
    cpu_seconds: float

    @property
    def entries(self) -> int:
        return self.tally.types.total()

    @property
    def bench(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "entries_per_second": self.entries / max(1e-9, self.seconds),
            "entries_per_cpu_second": self.entries / max(1e-9, self.cpu_seconds),
        }

    def as_json(self) -> dict[str, Any]:
        first, last = self.tally.first, self.tally.last
        content: dict[str, Any] = {
            "origin": self.origin,
            "beginning": self.beginning,
            "first": first.sequence if first else 0,
            "last": last.sequence if last else 0,
            "types": dict(self.tally.types.most_common()),
            "bench": self.bench,
        }
        if self.verdict is not None:
            content["verdict"] = verdict_as_json(self.verdict)
        if self.state is not None:
            content["requests_under_way"] = len(self.state.workload.requests)
            content["instances"] = [instance.id for instance in self.state.fleet.instances]
            content["writes_lost"] = self.state.writes_lost
            content["undecodable"] = self.state.dead_letters.undecodable
            content["unapplied"] = self.state.dead_letters.unapplied
        return content


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict with both sides of its differences."""
    return {
        "known_as_of": verdict.known_as_of,
        "decisions": verdict.decisions,
        "identical": verdict.identical,
        "different": verdict.different,
        "unchecked": dict(verdict.unchecked),
        "arrivals": verdict.arrivals,
        "undecodable": verdict.undecodable,
        "unapplied": verdict.unapplied,
        "failed": dict(verdict.failed),
        "problems": verdict.problems,
        "terms": [
            {
                "term": t.term,
                "scheduler": t.scheduler,
                "policy": t.policy,
                "elected": t.elected,
                "decisions": t.decisions,
            }
            for t in verdict.terms
        ],
        "differences": [difference.as_json() for difference in verdict.differences],
    }


def _folded(history: History, beginning: StartPoint, entries: Iterable[LogEntry]) -> _Replayed:
    settings = history.settings
    tally = _Tally(entries, Counter())
    wall, cpu = time.perf_counter(), time.process_time()
    state = fold(tally, settings=settings, known=beginning.state)
    took = time.perf_counter() - wall, time.process_time() - cpu
    return _Replayed(history.origin, beginning.note, tally, settings.speed, state, None, *took)


def _verified(history: History, beginning: StartPoint, entries: Iterable[LogEntry]) -> _Replayed:
    settings = history.settings
    tally = _Tally(entries, Counter())
    wall, cpu = time.perf_counter(), time.process_time()
    verdict = verify(tally, known=beginning.known)
    took = time.perf_counter() - wall, time.process_time() - cpu
    return _Replayed(history.origin, beginning.note, tally, settings.speed, None, verdict, *took)


def _show(console: Console, replayed: _Replayed) -> None:
    tally = replayed.tally
    console.print(replayed.origin, markup=False, soft_wrap=True)
    if replayed.beginning:
        console.print(replayed.beginning, style="yellow", markup=False, soft_wrap=True)
    if tally.first is None or tally.last is None:
        console.print("there is no entry in it")
        return
    span = _span(tally.first, tally.last, replayed.speed)
    console.print(f"{replayed.entries:,} entries, {tally.first.sequence:,} to {tally.last.sequence:,}{span}")
    if replayed.verdict is None:
        _show_fold(console, replayed)
    else:
        show_verdict(console, replayed.verdict)
    bench = replayed.bench
    console.print(
        f"{bench['entries_per_cpu_second']:,.0f} entries a second on one core ({bench['seconds']:.1f} s in all)",
        style="dim",
    )


def _span(first: LogEntry, last: LogEntry, speed: float) -> str:
    if first.event is None or last.event is None:
        return ""
    begun, ended = (wall_time(event.at, speed) for event in (first.event, last.event))
    return f", {begun:%Y-%m-%d %H:%M:%S} to {ended:%H:%M:%S}"


def _show_fold(console: Console, replayed: _Replayed) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("event", no_wrap=True)
    table.add_column("entries", justify="right")
    for name, count in replayed.tally.types.most_common():
        table.add_row(name, f"{count:,}")
    console.print(table)
    state = replayed.state
    if state is not None:
        lost = f", {state.writes_lost:,} writes lost" if state.writes_lost else ""
        console.print(
            f"{len(state.fleet.instances)} instances, {len(state.workload.requests):,} requests under way, "
            f"term {state.term}{lost}"
        )
        if dead := _dead_letters(state.dead_letters.undecodable, state.dead_letters.unapplied):
            console.print(f"{dead}; `pointsman doctor` says where", style="yellow")


def _dead_letters(undecodable: int, unapplied: int) -> str:
    """How many entries had no effect; empty where all had."""
    said = [f"{undecodable:,} entries do not decode"] if undecodable else []
    said += [f"{unapplied:,} entries could not be applied"] if unapplied else []
    return ", ".join(said)


def show_verdict(console: Console, verdict: Verdict) -> None:
    """The verdict as people read it: the terms, the line with the counts, and the first difference in full."""
    for term in verdict.terms:
        console.print(
            f"term {term.term}: {term.scheduler}, {term.policy or 'policy not named'}, from entry {term.elected:,}, "
            f"{term.decisions:,} stamped",
            markup=False,
        )
    for problem in verdict.problems:
        console.print(problem, style="yellow", markup=False)
    console.print(str(verdict), style="bold green" if verdict.ok else "bold red")
    if dead := _dead_letters(verdict.undecodable, verdict.unapplied):
        console.print(f"  {dead}: everyone passes over them; `pointsman doctor` says where", style="yellow")
    for reason, count in verdict.failed.most_common():
        console.print(f"  {count:,} calls failed when they were made again: {reason}", style="yellow", markup=False)
    for reason, count in verdict.unchecked.most_common():
        console.print(f"  {count:,} unchecked: {reason}", style="yellow", markup=False)
    if verdict.first is not None:
        show_difference(console, verdict.first)
