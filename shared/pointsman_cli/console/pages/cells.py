"""Numbers, times, states and bars as HTML: one way to show each kind of value on every page. Text from outside is escaped
here or by the templates; what one line cannot hold is replaced."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

from markupsafe import Markup, escape

from pointsman_cli.formatting import plural
from pointsman_cli.terminal import UNIX_SECONDS_MAX, one_line

NOTHING = Markup('<span class="muted">\N{EN DASH}</span>')
Level = Literal["ok", "note", "warning", "serious"]
LEVELS: dict[str, Level] = {
    "ready": "ok", "joining": "note", "draining": "warning", "suspected": "serious", "ejected": "serious",
    "half-open": "warning",
    "unschedulable": "serious", "down": "serious", "left": "note", "gone": "note",
    "exact": "ok", "degraded": "warning", "blind": "serious",
    "in time": "ok", "late": "warning", "open": "note", "unserved": "serious", "left out": "note",
    "pending": "note", "prefill": "note", "handed over": "note", "decoding": "note", "finished": "ok",
    "failed": "serious", "cancelled": "note", "rejected": "serious",
    "live": "ok", "recorded": "note", "starting": "note", "catching up": "warning", "disconnected": "serious",
    "waiting": "note", "running": "note", "done": "ok",
    "note": "note", "warning": "warning", "serious": "serious", "ok": "ok",
}  # fmt: skip
"""How far a state that others named asks for attention; one that is not here is a note."""
BAR_STEPS = 20
MINUS = "\N{MINUS SIGN}"
ID_CHARS, TAIL_CHARS = 15, 8
EXAMPLE = "for example request "
"""What doctor's evidence writes before a request's id."""


def text(value: object) -> Markup:
    """Any value from outside, as one line."""
    return value if isinstance(value, Markup) else escape(one_line(str(value)))


def prose(value: str) -> Markup:
    """A sentence of ours or of the log. It begins with a capital unless its first word is a name (holds more than letters);
    what is in backticks becomes code."""
    said = one_line(value)
    if said.partition(" ")[0].rstrip(",:;").isalpha():
        said = said[:1].upper() + said[1:]
    parts = said.split("`")
    if len(parts) % 2 == 0:
        return escape(said)
    return Markup("").join(
        Markup(f"<code>{escape(part)}</code>") if i % 2 else escape(part) for i, part in enumerate(parts)
    )


def key(prefix: str, value: str) -> str:
    """An id of an element: unique, without spaces, whatever the name holds."""
    return f"{prefix}-{quote(value, safe='')}"


def state(word: str, shown: str = "") -> Markup:
    return Markup(f'<span class="s {level(word)}">{text(shown or word)}</span>')


def level(word: str) -> Level:
    return LEVELS.get(word, "note")


def count(value: float | None) -> Markup:
    return NOTHING if value is None or value < 0 else Markup(f"{value:,.0f}")


def decimal(value: float | None, digits: int = 1) -> Markup:
    return NOTHING if value is None or value < 0 else Markup(f"{value:,.{digits}f}")


def seconds(value: float | None) -> Markup:
    """For columns and key figures whose heading names the unit; at most four digits."""
    if value is None or value < 0:
        return NOTHING
    return Markup(f"{value:.2f}" if value < 100 else f"{value:,.0f}")


def duration(value: float | None) -> Markup:
    """With its unit, in a sentence."""
    if value is None or value < 0:
        return NOTHING
    if value < 1:
        return Markup(f"{value * 1000:.0f}&nbsp;ms")
    return Markup(f"{value:.2f}&nbsp;s" if value < 10 else f"{value:,.1f}&nbsp;s")


def share(value: float | None, digits: int = 0) -> Markup:
    return NOTHING if value is None or value < 0 else Markup(f"{value * 100:.{digits}f}%")


def points(value: float | None) -> Markup:
    """A signed difference of two shares."""
    return NOTHING if value is None else Markup(f"{value * 100:+.1f}".replace("-", MINUS))


def signed(value: float | None, digits: int = 3) -> Markup:
    return NOTHING if value is None else Markup(f"{value:+,.{digits}f}".replace("-", MINUS))


def factor(value: float | None) -> Markup:
    return NOTHING if value is None or value < 0 else Markup(f"\N{MULTIPLICATION SIGN}{value:.2f}")


def bar(value: float | None, shown: Markup, attention: str = "") -> Markup:
    """A number over a bar of the share `value`. Its length has 20 steps, so that it changes seldom and needs no style."""
    if value is None or value < 0:
        return shown
    step = 5 * min(BAR_STEPS, max(0, round(value * BAR_STEPS)))
    return Markup(f'<span class="b b{step} {attention}">{shown}</span>')


def moment(at: float) -> datetime:
    return datetime.fromtimestamp(min(max(0.0, at), UNIX_SECONDS_MAX), UTC).astimezone()


def clock(at: float, digits: int = 0) -> Markup:
    """Time of day where the console runs; the element holds the whole date."""
    if at <= 0:
        return NOTHING
    when = moment(at)
    shown = f"{when:%H:%M:%S}" + (f".{when.microsecond // 1000:03d}" if digits else "")
    return Markup(f'<time datetime="{when.isoformat(timespec="milliseconds")}">{shown}</time>')


def day_and_clock(at: float) -> Markup:
    if at <= 0:
        return NOTHING
    when = moment(at)
    return Markup(f'<time datetime="{when.isoformat(timespec="seconds")}">{when:%Y-%m-%d %H:%M:%S}</time>')


def link(path: str, *names: str, shown: object = None) -> Markup:
    """A link to `path` with names from outside in it, each quoted."""
    address = path.format(*(quote(one, safe="") for one in names))
    return Markup(f'<a href="{escape(address)}">{text(names[-1] if shown is None else shown)}</a>')


def shortened(name: str) -> Markup:
    """A long name is cut in its middle for the eye alone: ids of one ingress begin alike, and pods of one engine do."""
    if len(name) <= ID_CHARS:
        return text(name)
    head, tail = text(name[:-TAIL_CHARS]), text(name[-TAIL_CHARS:])
    return Markup(f'<span class="short" title="{text(name)}"><span class="cut">{head}</span>{tail}</span>')


def name_link(path: str, name: str) -> Markup:
    """As `link`, with the name shortened."""
    if len(name) <= ID_CHARS:
        return link(path, name)
    address = escape(path.format(quote(name, safe="")))
    return Markup(f'<a href="{address}" aria-label="{text(name)}">{shortened(name)}</a>')


def request_link(request: str) -> Markup:
    return name_link("/requests/{}", request)


def evidence(line: str) -> Markup:
    """A line of evidence. The request that it names as its example is a link."""
    before, said, name = one_line(line).rpartition(EXAMPLE)
    request, comma, after = name.partition(",")
    if not said or " " in request:
        return prose(line)
    return prose(f"{before}{said}") + request_link(request) + escape(f"{comma}{after}")


def listed(names: Iterable[str], at_most: int = 4) -> str:
    found = list(names)
    more = len(found) - at_most
    return ", ".join(found[:at_most]) + (f" and {more:,} more" if more > 0 else "")


FUNCTIONS: dict[str, Any] = {
    one.__name__: one
    for one in (
        text, prose, key, state, level, count, decimal, seconds, duration, share, points, signed, factor, bar, clock,
        day_and_clock, link, request_link, evidence, plural, listed,
    )
}  # fmt: skip
"""For the templates."""
