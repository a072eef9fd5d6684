"""Progress of a long command: a bar on a terminal, otherwise a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_WALL_SECONDS = 20.0
Update = Callable[[float, str], None]


@contextmanager
def progress_bar(console: Console, total: float, text: str = "", *, counts: bool = True) -> Iterator[Update]:
    if not console.is_terminal:
        if text:
            console.print(text, markup=False, soft_wrap=True)
        yield _line_printer(console, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *([MofNCompleteColumn()] if counts else []))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(text, total=total)

        def update(completed: float, step: str) -> None:
            progress.update(task, completed=completed, description=step or text)

        yield update


def _line_printer(console: Console, total: float) -> Update:
    started = shown = time.monotonic()

    def update(completed: float, step: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if step:
            console.print(f"[{completed:g}/{total:g}] {step}", markup=False)
        elif now - shown >= LINE_WALL_SECONDS and completed:
            shown = now
            left = (now - started) * max(0.0, total / completed - 1)
            console.print(f"{min(1.0, completed / total):.0%} after {now - started:.0f} s, about {left:.0f} s to go")

    return update
