"""Where what came out of a log meets a terminal: no escape sequence of a stranger reaches it, no brackets are taken for
markup, and each moment has a local time that can be shown.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.segment import Segment
from typing_extensions import override

from pointsman.adapters.clocks import wall_time_of
from pointsman.primitives import Seconds

WALL_SECONDS_MAX: Seconds = 250_000_000_000.0
"""The year 9892: what a `datetime` can say, with any time zone."""

_CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)
}
_CONTROL |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\N{REPLACEMENT CHARACTER}")
"""C0 and C1 but for tab and newline, and what turns the direction of writing around."""


class SafeConsole(Console):
    """A console that prints text as it is, without markup, and shows control characters instead of sending them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @override
    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(printable(segment.text), segment.style) for segment in buffer
        )


def printable(text: str) -> str:
    """`text` with its control characters replaced, but for tabs and newlines."""
    return text if text.isprintable() else text.translate(_CONTROL)


def wall_time(at: Seconds, speed: float) -> datetime:
    """The wall's local time when engine time was `at`; the first or last that can be said where that is beyond."""
    return datetime.fromtimestamp(min(max(0.0, wall_time_of(at, speed)), WALL_SECONDS_MAX)).astimezone()
