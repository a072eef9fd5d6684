"""Prints text from a log safely: without control characters or markup. Times are local."""

import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from pointsman.adapters.clocks import wall_time_of
from pointsman.primitives import EngineSeconds

UNIX_SECONDS_MAX = 250_000_000_000.0
PIPE_WIDTH = 180
_CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)
}
_CONTROL |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\N{REPLACEMENT CHARACTER}")
"""C0 and C1 without tab and newline, and changes of writing direction."""


STATUS_STYLES = {
    "exact": "green",
    "degraded": "yellow",
    "blind": "red",
    "suspected": "red",
    "unschedulable": "red",
    "down": "red",
    "draining": "yellow",
    "ejected": "red",
}


class SafeConsole(Console):
    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @override
    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(printable(segment.text), segment.style) for segment in buffer
        )


def table(*columns: str, title: str | None = None) -> Table:
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return made


def status(text: str) -> Text:
    return Text(text, style=STATUS_STYLES.get(text.partition(",")[0], ""))


def say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)


def output_console() -> Console:
    return SafeConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def progress_console() -> Console:
    return SafeConsole(stderr=True)


def printable(text: str) -> str:
    return text if text.isprintable() else text.translate(_CONTROL)


def wall_time(at: EngineSeconds, speed: float) -> datetime:
    return datetime.fromtimestamp(min(max(0.0, wall_time_of(at, speed)), UNIX_SECONDS_MAX)).astimezone()
