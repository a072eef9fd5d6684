"""Progress of reading a log: a bar on a terminal, otherwise a line every few seconds."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman_cli.history.entries import History
from pointsman_cli.terminal import progress_console

STEP_ENTRIES = 2000
QUIET_SECONDS = 5.0


class Reading:
    def __init__(self, history: History, console: Console, what: str, start: Sequence) -> None:
        self._history = history
        self._start = start
        self._console = console
        self._what = what
        self._shown = False

    def __iter__(self) -> Iterator[LogEntry]:
        if self._shown:
            return self._history.entries(self._start)
        self._shown = True
        return self._with_bar() if self._console.is_terminal else self._with_lines()

    @property
    def _total(self) -> int:
        header = self._history.header
        return header.entries and header.entries - max(0, self._start - header.first)

    def _with_bar(self) -> Iterator[LogEntry]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} entries"),
            TimeRemainingColumn(),
        )
        total = self._total or None
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(self._what, total=total)
            for read, entry in enumerate(self._history.entries(self._start), 1):
                yield entry
                if read % STEP_ENTRIES == 0:
                    progress.update(task, completed=read)

    def _with_lines(self) -> Iterator[LogEntry]:
        total = self._total
        due = time.monotonic() + QUIET_SECONDS
        for read, entry in enumerate(self._history.entries(self._start), 1):
            yield entry
            if read % STEP_ENTRIES == 0 and time.monotonic() > due:
                due = time.monotonic() + QUIET_SECONDS
                of = f" of {total:,}" if total else ""
                self._console.print(f"{self._what}: {read:,}{of} entries", markup=False)


def shown(history: History, what: str, start: Sequence = 1) -> Reading:
    return Reading(history, progress_console(), what, start)
