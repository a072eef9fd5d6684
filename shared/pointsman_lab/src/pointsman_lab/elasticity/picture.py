"""The timeline as a picture. Needs matplotlib (`pip install 'pointsman[plots]'`)."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pointsman.primitives import EngineSeconds
from pointsman_cli.simulate.plots import OWN_COLOUR, SMALL_PRINT, THRESHOLD_LINE, save_figure
from pointsman_lab.elasticity.timeline import Timeline

SIZE_COLOUR = "#0072B2"
LOAD_COLOUR = "#666666"


def draw_timeline(timeline: Timeline, directory: Path, *, title: str, target: float) -> Path:
    """Load, attainment and size over time, as `elasticity.png`. Raises OSError."""
    return save_figure(lambda: _figure(timeline, title, target), directory / "elasticity.png")


def _figure(timeline: Timeline, title: str, target: float) -> Figure:
    figure = Figure(figsize=(9.0, 6.6), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    load, on_time, size = figure.subplots(3, 1, sharex=True)
    stretches = [s for s in timeline.stretches if s.requests]
    middle = [s.start_s + timeline.stretch_s / 2 for s in stretches]
    load.plot(middle, [s.requests / timeline.stretch_s for s in stretches], color=LOAD_COLOUR)
    load.set_ylabel("arrivals (1/s)")
    load.set_ylim(bottom=0)
    on_time.plot(middle, [s.on_time / s.requests for s in stretches], color=OWN_COLOUR, marker=".")
    on_time.axhline(target, **THRESHOLD_LINE)
    on_time.set_ylim(0, 1.05)
    on_time.yaxis.set_major_formatter(PercentFormatter(1.0))
    on_time.set_ylabel("on time,\nby time of arrival")
    _draw_size(size, timeline, end=max(middle, default=0.0))
    size.set_xlabel("engine time (s)")
    size.set_xlim(left=0)
    return figure


def _draw_size(axes: Axes, timeline: Timeline, *, end: EngineSeconds) -> None:
    sizes = [(max(0.0, at), count) for at, count in timeline.sizes]
    if sizes:
        sizes.append((max(end, sizes[-1][0]), sizes[-1][1]))
    axes.step(
        [at for at, _ in sizes], [count for _, count in sizes], where="post", color=SIZE_COLOUR, label="in service"
    )
    wanted = [(max(0.0, decided.at_s), decided.wanted) for decided in timeline.decisions]
    if wanted:
        wanted.append((max(end, wanted[-1][0]), wanted[-1][1]))
        axes.step(
            [at for at, _ in wanted], [count for _, count in wanted], where="post", linestyle=":", color="#000000",
            label="wanted",
        )  # fmt: skip
    for change in timeline.changes:
        if change.at_s > 0:
            axes.annotate(f"{change.remapped:.0%}", xy=(change.at_s, change.after), **SMALL_PRINT)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, max((count for _, count in sizes), default=1) + 1)
    axes.set_ylabel("instances\n(% of prefixes remapped)")
    axes.legend(loc="upper right", ncols=2)
