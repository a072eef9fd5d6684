"""`pointsman replay`: folds a log and, with `--verify`, recomputes and compares every decision."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from pointsman.ports import LogEntry
from pointsman.simulation.replay import Difference, Verdict, fold, verify
from pointsman.state.state import State
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import History, open_history
from pointsman_cli.history.start_point import StartPoint, beginning_of
from pointsman_cli.history.time_options import UpTo, moment_in
from pointsman_cli.options import CONTEXT, as_given, from_options, json_switch, until_option
from pointsman_cli.output_file import json_of, print_json
from pointsman_cli.terminal import heading, json_text, output_console, say, table, wall_span

DIFFERENT_EXIT_CODE = 1


EQUAL_SETTINGS = "equal on both sides"


@click.command("replay", context_settings=CONTEXT)
@from_options
@click.option(
    "--verify", "verifying", is_flag=True, help="Recompute every decision and compare; exit code 1 if one differs."
)
@until_option
@json_switch
def replay_command(place: str | None, pool: str | None, verifying: bool, until: str | None, as_json: bool) -> None:
    """Fold a log through the production State; with --verify, recompute every decision and compare.

    \b
      pointsman replay --verify                                           the running fleet, up to now
      pointsman replay --from .pointsman/archive.sqlite --verify          the recorder's archive
      pointsman replay --from incident.pmlog --verify --until 07:31:05    an exported bundle
      pointsman tap --since 1 --until now --json | pointsman replay --from - --verify

    A decision is recomputed from its leader's state: the log up to its as_of, and all earlier decisions. Every field must
    be equal, bit for bit. Exit codes: 0 no difference, 1 a difference, 2 no log.
    """
    with open_history(place, pool) as history:
        moment = moment_in(history, until)
        beginning = beginning_of(history, moment)
        entries = UpTo(shown(history, "replaying", beginning.start), moment)
        replayed = _replayed(history, beginning, entries, verifying=verifying)
        if as_json:
            print_json(replayed.as_json())
        else:
            _show(output_console(), replayed)
    sys.exit(DIFFERENT_EXIT_CODE if replayed.verdict and not replayed.verdict.ok else 0)


@dataclass(slots=True)
class _Tally:
    entries: Iterable[LogEntry]
    types: Counter[str] = field(default_factory=Counter)
    first: LogEntry | None = None
    last: LogEntry | None = None
    counted: bool = False

    def __iter__(self) -> Iterator[LogEntry]:
        if self.counted:
            yield from self.entries
            return
        self.counted = True
        types = self.types
        for entry in self.entries:
            self.first = self.first or entry
            self.last = entry
            types[type(entry.event).__name__ if entry.event else "undecodable"] += 1
            yield entry


@dataclass(frozen=True, slots=True)
class _Replayed:
    origin: str
    beginning: str
    tally: _Tally
    speed: float
    state: State | None
    verdict: Verdict | None
    seconds: float
    cpu_seconds: float

    @property
    def bench(self) -> dict[str, Any]:
        entries = self.tally.types.total()
        return {
            "entries": entries,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "entries_per_second": entries / max(1e-9, self.seconds),
            "entries_per_cpu_second": entries / max(1e-9, self.cpu_seconds),
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
            content["verdict"] = _verdict_as_json(self.verdict)
        if self.state is not None:
            content["requests_under_way"] = len(self.state.workload.requests)
            content["instances"] = [instance.id for instance in self.state.fleet.instances]
            content["writes_lost"] = self.state.writes_lost
            content["undecodable"] = self.state.dead_letters.undecodable
            content["unapplied"] = self.state.dead_letters.unapplied
        return content


def _verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    names = ("known_as_of", "decisions", "identical", "different", "arrivals", "undecodable", "unapplied", "problems")
    return {name: getattr(verdict, name) for name in names} | {
        "unchecked": dict(verdict.unchecked),
        "failed": dict(verdict.failed),
        "terms": [asdict(term) for term in verdict.terms],
        "differences": [difference.as_json() for difference in verdict.differences],
    }


def _replayed(history: History, beginning: StartPoint, entries: Iterable[LogEntry], *, verifying: bool) -> _Replayed:
    settings, tally = history.settings, _Tally(entries)
    state: State | None = None
    verdict: Verdict | None = None
    wall, cpu = time.perf_counter(), time.process_time()
    if verifying:
        verdict = verify(tally, known=beginning.known)
    else:
        state = fold(tally, settings=settings, known=beginning.state)
    took = time.perf_counter() - wall, time.process_time() - cpu
    return _Replayed(history.origin, beginning.note, tally, settings.speed, state, verdict, *took)


def _show(console: Console, replayed: _Replayed) -> None:
    tally = replayed.tally
    say(console, replayed.origin)
    if replayed.beginning:
        say(console, replayed.beginning, "yellow")
    if tally.first is None or tally.last is None:
        say(console, "there is no entry in it")
        return
    bench = replayed.bench
    span = ""
    if tally.first.event is not None and tally.last.event is not None:
        span = f", {wall_span(tally.first.event.at, tally.last.event.at, replayed.speed)}"
    say(console, f"{bench['entries']:,} entries, {tally.first.sequence:,} to {tally.last.sequence:,}{span}")
    if replayed.verdict is None:
        _show_fold(console, replayed)
    else:
        _show_verdict(console, replayed.verdict)
    speed = f"{bench['entries_per_cpu_second']:,.0f} entries a second on one core ({bench['seconds']:.1f} s in all)"
    say(console, speed, "dim")


def _show_fold(console: Console, replayed: _Replayed) -> None:
    rows = table("event", ">entries")
    for name, count in replayed.tally.types.most_common():
        rows.add_row(name, f"{count:,}")
    console.print(rows)
    state = replayed.state
    if state is not None:
        lost = f", {state.writes_lost:,} writes lost" if state.writes_lost else ""
        counts = f"{len(state.fleet.instances)} instances, {len(state.workload.requests):,} requests in flight"
        say(console, f"{counts}, term {state.term}{lost}")
        if dead := _dead_letters(state.dead_letters.undecodable, state.dead_letters.unapplied):
            say(console, f"{dead}; `pointsman doctor{as_given()}` shows where", "yellow")


def _dead_letters(undecodable: int, unapplied: int) -> str:
    parts = [f"{undecodable:,} entries do not decode"] if undecodable else []
    parts += [f"{unapplied:,} entries could not be applied"] if unapplied else []
    return ", ".join(parts)


def _show_verdict(console: Console, verdict: Verdict) -> None:
    for term in verdict.terms:
        by = f"{term.scheduler}, {term.policy or 'policy not named'}"
        say(console, f"term {term.term}: {by}, from entry {term.elected:,}, {term.decisions:,} stamped")
    for problem in verdict.problems:
        say(console, problem, "yellow")
    say(console, str(verdict), "bold green" if verdict.ok else "bold red")
    if dead := _dead_letters(verdict.undecodable, verdict.unapplied):
        say(console, f"  {dead}: every process skips them; `pointsman doctor{as_given()}` shows where", "yellow")
    for reason, count in verdict.failed.most_common():
        say(console, f"  {count:,} calls failed when they were repeated: {reason}", "yellow")
    for reason, count in verdict.unchecked.most_common():
        say(console, f"  {count:,} unchecked: {reason}", "yellow")
    if verdict.first is not None:
        show_difference(console, verdict.first)


def show_difference(console: Console, difference: Difference) -> None:
    """Both decisions side by side, and the state before them."""
    event = difference.recorded or difference.recomputed
    where = f"entry {difference.sequence:,}" if difference.sequence else "not in the log"
    decision = f"decision {difference.number} of term {difference.term}, {type(event).__name__} ({where})"
    heading(console, f"first difference: {decision}")
    left = _lines(difference.recorded, "the log has no such decision here", like=difference.recomputed)
    right = _lines(difference.recomputed, "deciding again gives none", like=difference.recorded)
    rows = table("recorded in the log", "decided again")
    for column in rows.columns:
        column.no_wrap = False
    for ours, theirs, same in _side_by_side(left, right):
        style = "" if same else "bold red"
        rows.add_row(Text(ours, style=style), Text(theirs, style=style))
    console.print(rows)
    say(console, "known when it was decided:")
    for line in _known(difference.known):
        say(console, line)


def _lines(event: Any, absent: str, *, like: Any) -> list[str]:
    if event is None:
        return [absent]
    content = msgspec.to_builtins(event)
    if like is not None and "settings" in content and content["settings"] == getattr(like, "settings", None):
        content["settings"] = EQUAL_SETTINGS
    if "keys" in content:
        content["keys"] = f"{len(content['keys'])} characters of base64"
    return json_text(json_of(content)).rstrip("\n").split("\n")


def _known(known: dict[str, Any]) -> Iterator[str]:
    yield _compact({name: value for name, value in known.items() if name != "instances"})
    for instance in known.get("instances", []):
        yield "  " + _compact(instance)


def _compact(content: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=0).decode()


def _side_by_side(left: list[str], right: list[str]) -> Iterator[tuple[str, str, bool]]:
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for step in range(max(i2 - i1, j2 - j1)):
            ours = left[i1 + step] if i1 + step < i2 else ""
            theirs = right[j1 + step] if j1 + step < j2 else ""
            yield ours, theirs, tag == "equal"
