"""How far a reading has come: a bar on a terminal, a line every few seconds elsewhere, nothing where it is over at once."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from pointsman.ports import LogEntry
from pointsman.tooling.history.entries import History

STEP_ENTRIES = 2000
QUIET_SECONDS = 5.0
"""Between two lines where the output is no terminal."""


class Reading:
    """A history that shows how far it is read, each time that it is. Re-readable like the history itself."""

    def __init__(self, history: History, console: Console, what: str) -> None:
        self._history = history
        self._console = console
        self._what = what
        self._shown = False
        self.entries_read = 0
        """Of all readings together."""

    def __iter__(self) -> Iterator[LogEntry]:
        if self._shown:  # a second cursor over the same log: one bar is enough
            return iter(self._history)
        self._shown = True
        return self._with_bar() if self._console.is_terminal else self._with_lines()

    def _with_bar(self) -> Iterator[LogEntry]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} entries"),
            TimeRemainingColumn(),
        )
        total = self._history.header.entries or None
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(self._what, total=total)
            for entry in self._counted():
                if self.entries_read % STEP_ENTRIES == 0:
                    progress.update(task, completed=self.entries_read)
                yield entry

    def _with_lines(self) -> Iterator[LogEntry]:
        total = self._history.header.entries
        due = time.monotonic() + QUIET_SECONDS
        for entry in self._counted():
            if self.entries_read % STEP_ENTRIES == 0 and time.monotonic() > due:
                due = time.monotonic() + QUIET_SECONDS
                of = f" of {total:,}" if total else ""
                self._console.print(f"{self._what}: {self.entries_read:,}{of} entries", markup=False)
            yield entry

    def _counted(self) -> Iterator[LogEntry]:
        for entry in self._history:
            self.entries_read += 1
            yield entry


def shown(history: History, console: Console, what: str) -> Reading:
    """The history's entries, with progress on `console` (best the one of standard error)."""
    return Reading(history, console, what)
