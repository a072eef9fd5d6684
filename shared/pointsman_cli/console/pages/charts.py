"""Pictures as SVG, drawn by the server: no script, no style, colours by class. Each is hidden from screen readers; the page
says the same beside it in words or in a table."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from pointsman_cli.console.jobs.views import PhaseView
from pointsman_cli.console.pages.cells import clock, text
from pointsman_cli.console.views import InstanceView, LadderGroupView, SizeView

STEPS = ((0.0, 0), (0.1, 1), (0.5, 2), (2.0, 3), (5.0, 4))
"""Seconds of prefill work ahead of a new request, and the shade of an engine's square."""
MAP_SIDE, MAP_GAP = 14, 2
SIZE_WIDTH, SIZE_HEIGHT = 960, 150
AXIS = 28


def shade(queue_seconds: float) -> int:
    return max(number for least, number in STEPS if queue_seconds >= least or not number)


def fleet_map(instances: Sequence[InstanceView], level_of: Mapping[str, str], columns: int) -> Markup:
    """A square for each engine in the order of the table; those out of service have a cross. One path for all of a shade:
    a browser draws it anew every second."""
    step = MAP_SIDE + MAP_GAP
    shades: dict[int, list[str]] = {}
    out: list[str] = []
    for place, engine in enumerate(instances):
        x, y = place % columns * step, place // columns * step
        square = f"M{x} {y}h{MAP_SIDE}v{MAP_SIDE}h-{MAP_SIDE}z"
        if level := level_of.get(engine.instance):
            title = f"<title>{text(engine.instance)}: {text(engine.status)}</title>"
            cross = f'<path class="cross" d="M{x + 4} {y + 4}l6 6m0-6l-6 6"/>'
            out.append(f'<g class="{level}">{title}<path d="{square}"/>{cross}</g>')
        else:
            shades.setdefault(shade(engine.queue_seconds), []).append(square)
    marks = "".join(
        f'<path class="q{number}" d="{"".join(found)}"/>' for number, found in sorted(shades.items())
    ) + "".join(out)
    width, height = columns * step - MAP_GAP, -(-len(instances) // columns) * step - MAP_GAP
    return Markup(
        f'<svg class="map" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true">{marks}</svg>'
    )


def phase_bar(phase: PhaseView, marks: Sequence[tuple[str, float]]) -> Markup:
    """One phase of a request on the axis of the whole; `marks` are vertical lines (class, share of the axis)."""
    x, width = 1000 * phase.since_share, max(3.0, 1000 * phase.share)
    x = min(x, 1000 - width)
    return _lane(f'<rect class="{phase.kind}" x="{x:.1f}" y="3" width="{width:.1f}" height="14"/>', marks)


def _lane(content: str, marks: Sequence[tuple[str, float]]) -> Markup:
    lines = "".join(
        f'<line class="{kind}" x1="{1000 * at:.1f}" x2="{1000 * at:.1f}" y1="0" y2="20"/>'
        for kind, at in marks
        if 0 <= at <= 1
    )
    return Markup(
        f'<svg class="lane" viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">{content}{lines}</svg>'
    )


def stacked(parts: Sequence[tuple[str, float]], whole: float) -> Markup:
    """Parts one behind another (class, value) on an axis from 0 to `whole`."""
    at, drawn = 0.0, []
    for kind, value in parts:
        width = 1000 * max(0.0, value) / whole if whole else 0.0
        drawn.append(f'<rect class="{kind}" x="{at:.1f}" y="4" width="{width:.1f}" height="12"/>')
        at += width
    return _lane("".join(drawn), ())


def rung_bar(share: float, above: float) -> Markup:
    """A rung of the ladder: its share, and what was lost against the rung above it."""
    lost = max(0.0, above - share)
    gap = f'<rect class="lost" x="{1000 * share:.1f}" y="2" width="{1000 * lost:.1f}" height="16"/>' if lost else ""
    return _lane(f'<rect class="kept" x="0" y="2" width="{1000 * share:.1f}" height="16"/>{gap}', ())


def sizes(view: Sequence[SizeView]) -> Markup:
    """Instances wanted and ready, and requests waiting, over time."""
    if len(view) < 2:
        return Markup("")
    first, last = view[0].at, view[-1].at
    most = max(1, *(max(one.ready, one.wanted) for one in view))
    waiting = max(1, *(one.pending for one in view))
    width, height = SIZE_WIDTH - AXIS, SIZE_HEIGHT - 24

    def x(at: float) -> float:
        return AXIS + width * (at - first) / ((last - first) or 1.0)

    def stair(values: Sequence[float], top: float) -> str:
        points = [f"{x(view[0].at):.1f},{8 + height * (1 - values[0] / top):.1f}"]
        for before, (one, value) in zip(values, list(zip(view, values, strict=True))[1:], strict=False):
            points += [f"{x(one.at):.1f},{8 + height * (1 - level / top):.1f}" for level in (before, value)]
        return " ".join(points)

    base = 8 + height
    area = f"{AXIS},{base} {stair([one.pending for one in view], waiting)} {x(last):.1f},{base}"
    lines = "".join(
        f'<polyline class="{kind}" points="{stair(values, most)}"/>'
        for kind, values in (("wanted", [one.wanted for one in view]), ("ready", [one.ready for one in view]))
    )
    axis = f'<line class="axis" x1="{AXIS}" x2="{SIZE_WIDTH}" y1="{base}" y2="{base}"/>'
    texts = (
        f'<text x="{AXIS - 6}" y="14" text-anchor="end">{most}</text><text x="{AXIS - 6}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{AXIS}" y="{SIZE_HEIGHT - 2}">{clock(first).striptags()}</text>'
        f'<text x="{SIZE_WIDTH}" y="{SIZE_HEIGHT - 2}" text-anchor="end">{clock(last).striptags()}</text>'
    )
    return Markup(
        f'<svg class="sizes" viewBox="0 0 {SIZE_WIDTH} {SIZE_HEIGHT}" aria-hidden="true"><polygon class="pending" points="{area}"/>{axis}{lines}{texts}</svg>'
    )


def hours(groups: Sequence[LadderGroupView]) -> Markup:
    """The highest rung and what engines delivered, for each hour."""
    known = [group for group in groups if group.rungs]
    if len(known) < 2:
        return Markup("")
    width, height = SIZE_WIDTH - AXIS - 12, SIZE_HEIGHT - 24
    base = 8 + height

    def line(kind: str, place: int) -> str:
        points = [
            f"{AXIS + width * i / (len(known) - 1):.1f},{8 + height * (1 - (group.rungs[place].share or 0.0)):.1f}"
            for i, group in enumerate(known)
            if group.rungs[place].share is not None
        ]
        dots = "".join(
            f'<circle class="{kind}" cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="2.5"/>'
            for point in points
        )
        return f'<polyline class="{kind}" points="{" ".join(points)}"/>{dots}'

    texts = (
        f'<text x="{AXIS - 6}" y="14" text-anchor="end">100</text><text x="{AXIS - 6}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{AXIS}" y="{SIZE_HEIGHT - 2}">{text(known[0].name)}</text>'
        f'<text x="{SIZE_WIDTH - 12}" y="{SIZE_HEIGHT - 2}" text-anchor="end">{text(known[-1].name)}</text>'
    )
    axis = f'<line class="axis" x1="{AXIS}" x2="{SIZE_WIDTH}" y1="{base}" y2="{base}"/>'
    return Markup(
        f'<svg class="sizes" viewBox="0 0 {SIZE_WIDTH} {SIZE_HEIGHT}" aria-hidden="true">{axis}{line("wanted", 0)}{line("ready", -1)}{texts}</svg>'
    )
