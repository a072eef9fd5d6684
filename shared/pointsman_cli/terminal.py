"""Prints text that others wrote: no escape sequence, markup, newline, change of writing direction or spreadsheet
formula of a log, bundle, trace, engine or peer has an effect. Everything that a command prints passes here. Times are
local."""

import re
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from pointsman.primitives import EngineSeconds, wall_time_of

UNIX_SECONDS_MAX = 250_000_000_000.0
PIPE_WIDTH = 180
BASIC_PLANE_MAX = 0xFFFF
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
CELL_WIDTH_MAX = 1_000
TEXT_WIDTH_MIN = 12
TABLE_PADDING = 2
_DOUBTFUL = re.compile(r"[^\x20-\x7e]")
_DOUBTFUL_IN_LINES = re.compile(r"[^\n\x20-\x7e]")


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


class SeveralLinesError(click.ClickException):
    """Its message is printed with its line breaks; that of any other error as one line."""


class SafeConsole(Console):
    """Each string, table cell and Text is one line: what is to be several lines is several of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(one_line(text), **options)

    @override
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = renderable.copy()
            renderable.plain = one_line(renderable.plain)
        return super().render(renderable, options)

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        """What is wider than the screen is not cut: the terminal breaks the line."""
        super().print(*objects, **({"crop": False} | options))

    @override
    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(printable(segment.text), segment.style) for segment in buffer
        )


class DataTable(Table):
    """Where the screen is too narrow, texts are cut, the longest first. Numbers (columns to the right) and headings never
    are."""

    @override
    def _calculate_column_widths(self, console: Console, options: ConsoleOptions) -> list[int]:
        unbounded = options.update_width(CELL_WIDTH_MAX)
        measured = [self._measure_column(console, unbounded, column) for column in self.columns]
        widths = [column.maximum for column in measured]
        floors = [self._width_min(column, size) for column, size in zip(self.columns, measured, strict=True)]
        for _ in range(sum(widths) - options.max_width):
            spare, longest = max(
                (width if width > floor else 0, place)
                for place, (width, floor) in enumerate(zip(widths, floors, strict=True))
            )
            if not spare:
                break
            widths[longest] -= 1
        return widths

    def _width_min(self, column: Column, size: Measurement) -> int:
        if not column.no_wrap:
            return size.minimum
        if column.justify == "right":
            return size.maximum
        heading = cell_len(one_line(str(column.header))) + TABLE_PADDING
        return min(size.maximum, max(heading, TEXT_WIDTH_MIN))


def table(*columns: str, title: str | None = None) -> Table:
    made = DataTable(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return made


def status(text: str) -> Text:
    return Text(text, style=STATUS_STYLES.get(text.partition(",")[0], ""))


def say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, soft_wrap=True)


def heading(console: Console, text: str) -> None:
    say(console, "")
    say(console, text, "bold")


def output_console() -> Console:
    return SafeConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def progress_console() -> Console:
    return SafeConsole(stderr=True)


def print_line(text: str, *, error: bool = False) -> None:
    print(one_line(text), file=sys.stderr if error else sys.stdout, flush=True)


def one_line(text: str) -> str:
    return text if text.isprintable() else _DOUBTFUL.sub(_replaced, text)


def printable(text: str) -> str:
    """As `one_line`, but newlines stay."""
    return text if text.isprintable() else _DOUBTFUL_IN_LINES.sub(_replaced, text)


def json_text(encoded: bytes) -> str:
    """The same JSON; what a terminal would obey is escaped."""
    return _DOUBTFUL_IN_LINES.sub(_escaped, encoded.decode())


def csv_cell(text: str) -> str:
    """One line that no spreadsheet takes for a formula."""
    safe = one_line(text)
    return f"'{safe}" if text.startswith(FORMULA_STARTS) else safe


def _replaced(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else "\N{REPLACEMENT CHARACTER}"


def _escaped(found: re.Match[str]) -> str:
    if found[0].isprintable():
        return found[0]
    code = ord(found[0])
    if code <= BASIC_PLANE_MAX:
        return f"\\u{code:04x}"
    high, low = divmod(code - BASIC_PLANE_MAX - 1, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def wall_time(at: EngineSeconds, speed: float) -> datetime:
    return datetime.fromtimestamp(min(max(0.0, wall_time_of(at, speed)), UNIX_SECONDS_MAX)).astimezone()


def wall_span(begun: EngineSeconds, ended: EngineSeconds, speed: float) -> str:
    """Local times; the day of its end only if that is another."""
    first, last = wall_time(begun, speed), wall_time(ended, speed)
    day = "" if last.date() == first.date() else f"{last:%Y-%m-%d} "
    return f"{first:%Y-%m-%d %H:%M:%S} to {day}{last:%H:%M:%S}"
