"""Pictures of an experiment. Needs matplotlib (`pip install 'pointsman[plots]'`). Colours are Okabe and Ito's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pointsman.primitives import EngineSeconds
from pointsman.simulation.goodput import TARGET
from pointsman.simulation.metrics import mean_known
from pointsman_cli.simulate.experiment import Arrival, CellResult, Series
from pointsman_cli.simulate.report import labels
from pointsman_cli.terminal import one_line

Results: TypeAlias = Sequence[CellResult]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7F6000", "#666666")
OWN_COLOUR = "#D55E00"
OWN_POLICY = "pointsman"
LINE_STYLES = ("-", "--", ":", "-.")
OWN_MARKER = "*"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
PANELS_MAX = 6
WINDOWS = 40
HEAD_INCHES = 0.6
LEGEND_INCHES = 2.2
LEGEND_ROW_INCHES = 0.2
TICKS_MAX = 12
NAME_CHARS_MAX = 80
THRESHOLD_LINE: dict[str, Any] = {"color": "#555555", "linewidth": 0.9, "linestyle": (0, (2, 2))}
SMALL_PRINT: dict[str, Any] = {"fontsize": 8, "color": "#555555"}
BETTER: dict[str, Any] = {
    "xy": (0.98, 0.03),
    "xytext": (0.86, 0.15),
    "xycoords": "axes fraction",
    "arrowprops": {"arrowstyle": "->", "color": "#888888"},
    "color": "#888888",
    "fontsize": 9,
    "ha": "center",
}
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 150,
    "text.parse_math": False,
}


@dataclass(frozen=True, slots=True)
class _Look:
    label: str
    colour: str
    line_style: str
    marker: str
    width: float

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.line_style, "linewidth": self.width}

    @property
    def marked_line(self) -> dict[str, Any]:
        return self.line | {"marker": self.marker, "markersize": 9 if self.marker == OWN_MARKER else 4.5}


def draw_plots(results: Results, directory: Path, *only: str) -> list[Path]:
    """Draws `only` these pictures, by default all, as PNG. Returns the files. Raises OSError."""
    drawings: dict[str, Callable[[Results], Figure]] = {
        "pareto": hit_rate_against_cv,
        "capacity": capacity_against_rate,
        "ttft_cdf": ttft_distribution,
        "prompt_lengths": attainment_by_length,
        "timeline": timeline,
    }
    return [
        save_figure(partial(drawings[name], results), directory / f"{name}.png") for name in only or tuple(drawings)
    ]


def save_figure(draw: Callable[[], Figure], file: Path) -> Path:
    """Saves a figure as PNG. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with style.context(STYLE):
        figure = draw()
        figure.savefig(file, bbox_inches="tight", pad_inches=0.15)
    return file


# --- One picture each ---


def hit_rate_against_cv(results: Results) -> Figure:
    """Cache hits against load balance (DualMap, Fig. 1): down and to the right is better."""
    rates = _some(_rates(results))
    figure, panels = _panels(len(rates), "Cache affinity against load balance", results, share_x=True)
    for axes, rate in zip(panels, rates, strict=True):
        points = []
        for key, look in _looks(results).items():
            group = [r.report for r in _cells(results, key, rate)]
            hit, cv = mean_known(r.hit_rate for r in group), mean_known(r.load_cv for r in group)
            if hit is not None and cv is not None:
                points.append((hit, cv))
                size = 150 if look.marker == OWN_MARKER else 60
                axes.scatter(hit, cv, s=size, color=look.colour, marker=look.marker, label=look.label, zorder=3)
        front = _pareto_front(points)
        axes.plot([hit for hit, _ in front], [cv for _, cv in front], color="#AAAAAA", linewidth=1.0, zorder=1)
        axes.set_title(f"{rate:g} requests/s")
        axes.set_xlabel("cache hit rate (share of prompt tokens)")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.margins(0.15)
        axes.annotate("better", **BETTER)
    panels[0].set_ylim(bottom=0)
    _left_label(panels, "CV of pending tokens\nacross instances")
    _legend(figure, panels)
    return figure


def capacity_against_rate(results: Results) -> Figure:
    figure, (axes,) = _panels(1, "Effective request capacity", results, width=7.5, height=4.4)
    rates = _rates(results)
    for key, look in _looks(results).items():
        shares = [[r.report.effective_capacity or 0.0 for r in _cells(results, key, rate)] for rate in rates]
        known = [(rate, group) for rate, group in zip(rates, shares, strict=True) if group]
        xs = [rate for rate, _ in known]
        axes.plot(xs, [fmean(group) for _, group in known], label=look.label, **look.marked_line)
        lows, highs = [min(group) for _, group in known], [max(group) for _, group in known]
        axes.fill_between(xs, lows, highs, color=look.colour, alpha=0.15, linewidth=0)
    axes.axhline(TARGET, **THRESHOLD_LINE)
    if 1 < len(rates) <= TICKS_MAX:
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xlabel("request rate (requests/s)")
    axes.set_ylabel("requests within the TTFT SLO")
    _shares(axes)
    _legend(figure, [axes], f"goodput is read at {TARGET:.0%}")
    return figure


def ttft_distribution(results: Results) -> Figure:
    rates = _some(_rates(results))
    figure, panels = _panels(len(rates), "Time to first token", results, share_x=True)
    slo = results[0].cell.scenario.slo_ttft_s
    for axes, rate in zip(panels, rates, strict=True):
        for key, look in _looks(results).items():
            arrivals = [arrival for r in _cells(results, key, rate) for arrival in r.series.arrivals]
            seen = sorted(arrival.ttft for arrival in arrivals if arrival.ttft is not None)
            shares = [(number + 1) / len(arrivals) for number in range(len(seen))]
            axes.plot(seen, shares, label=look.label, **look.line)
        axes.axvline(slo, **THRESHOLD_LINE)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title(f"{rate:g} requests/s")
        axes.set_xlabel("time to first token (s, logarithmic)")
        _shares(axes)
    _left_label(panels, "share of all requests")
    _legend(figure, panels, f"TTFT SLO, {slo:g} s")
    return figure


def attainment_by_length(results: Results) -> Figure:
    rates = _some(_rates(results))
    figure, panels = _panels(len(rates), "Who is on time: attainment by prompt length", results, share_x=True)
    tokens = [f"{band.tokens_max / 1000:.1f}" for band in results[0].report.by_length]
    for axes, rate in zip(panels, rates, strict=True):
        for key, look in _looks(results).items():
            group = [r.report for r in _cells(results, key, rate)]
            bands = range(min((len(report.by_length) for report in group), default=0))
            shares = [fmean(report.by_length[band].attainment.share for report in group) for band in bands]
            axes.plot([band + 1 for band in bands], shares, label=look.label, **look.marked_line)
        axes.set_xticks(range(1, len(tokens) + 1), tokens, fontsize=8)
        axes.set_title(f"{rate:g} requests/s")
        axes.set_xlabel("tenths of the requests, each by its longest\nprompt (thousand tokens)")
        _shares(axes)
    _left_label(panels, "requests within the\nTTFT SLO")
    _legend(figure, panels)
    return figure


def timeline(results: Results) -> Figure:
    rate = telling_rate(results)
    title = f"Over time, at {rate:g} requests/s"
    figure, panels = _panels(3, title, results, columns=1, width=9.0, height=2.2, share_x=True, share_y=False)
    on_time, pending, instances = panels
    first_counted = 0.0
    for key, look in _looks(results).items():
        for series in [r.series for r in _cells(results, key, rate)[:1]]:
            windows = _windows(series.arrivals)
            on_time.plot([at for at, _ in windows], [share for _, share in windows], label=look.label, **look.line)
            times = [sample.at for sample in series.samples]
            pending.plot(times, [sum(sample.pending_tokens) / 1000 for sample in series.samples], **look.line)
            sizes = _sizes(series)
            instances.step([at for at, _ in sizes], [count for _, count in sizes], where="post", **look.line)
            first_counted = series.arrivals[0].at if series.arrivals else 0.0
    _shares(on_time)
    on_time.set_ylabel("within the SLO,\nby time of arrival")
    pending.set_ylabel("pending prompt tokens\n(thousand)")
    pending.set_ylim(bottom=0)
    instances.set_ylabel("ready instances")
    instances.yaxis.set_major_locator(MaxNLocator(integer=True))
    instances.set_ylim(bottom=0, top=instances.get_ylim()[1] * 1.1)
    instances.set_xlabel("time (s)")
    instances.set_xlim(left=0)
    for axes in panels:
        axes.axvspan(0, first_counted, color="#000000", alpha=0.05, linewidth=0)
    if first_counted:
        on_time.annotate("warm-up", xy=(first_counted / 2, 0.5), ha="center", va="center", **SMALL_PRINT)
    _legend(figure, [on_time])
    return figure


# --- What to show ---


def telling_rate(results: Results) -> float:
    served = [r.cell.qps for r in results if (r.report.effective_capacity or 0.0) >= TARGET]
    return max(served, default=_rates(results)[0])


def _rates(results: Results) -> list[float]:
    return sorted({result.cell.qps for result in results})


def _some(rates: Sequence[float]) -> list[float]:
    if len(rates) <= PANELS_MAX:
        return list(rates)
    return [rates[round(place * (len(rates) - 1) / (PANELS_MAX - 1))] for place in range(PANELS_MAX)]


def _cells(results: Results, key: str, rate: float) -> list[CellResult]:
    return [r for r in results if r.cell.variant.key == key and r.cell.qps == rate]


def _pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    front: list[tuple[float, float]] = []
    for hit, cv in sorted(points, key=lambda point: (-point[0], point[1])):
        if not front or cv < front[-1][1]:
            front.append((hit, cv))
    return front


def _sizes(series: Series) -> list[tuple[EngineSeconds, int]]:
    sizes = list(dict(series.instance_changes).items())
    if sizes and series.samples:
        sizes.append((max(sizes[-1][0], series.samples[-1].at), sizes[-1][1]))
    return sizes


def _windows(arrivals: Sequence[Arrival]) -> list[tuple[EngineSeconds, float]]:
    if not arrivals:
        return []
    start = arrivals[0].at
    width = max(arrivals[-1].at - start, 1e-9) / WINDOWS
    groups: dict[int, list[bool]] = {}
    for arrival in arrivals:
        groups.setdefault(min(WINDOWS - 1, int((arrival.at - start) / width)), []).append(arrival.on_time)
    return [(start + (number + 0.5) * width, fmean(group)) for number, group in sorted(groups.items())]


# --- How to show it ---


def _looks(results: Results) -> dict[str, _Look]:
    looks = {}
    colours, markers = cycle(COLOURS), cycle(MARKERS)
    others = 0
    for variant, label in labels(results):
        own = variant.policy == OWN_POLICY
        line = "-" if own else LINE_STYLES[others // len(COLOURS) % len(LINE_STYLES)]
        colour = OWN_COLOUR if own else next(colours)
        others += not own
        looks[variant.key] = _Look(
            one_line(label), colour, line, OWN_MARKER if own else next(markers), 2.6 if own else 1.5
        )
    return looks


def _panels(
    count: int,
    title: str,
    results: Results,
    *,
    columns: int | None = None,
    width: float = 4.2,
    height: float = 3.2,
    share_x: bool = False,
    share_y: bool = True,
) -> tuple[Figure, list[Axes]]:
    columns = columns or (2 if count == 4 else min(3, count))
    rows = ceil(count / columns)
    wide = max(6.4, width * columns)
    legend_rows = ceil((len(_looks(results)) + 1) / _legend_columns(wide))
    tall = height * rows + HEAD_INCHES + LEGEND_ROW_INCHES * legend_rows
    figure = Figure(figsize=(wide, tall), layout="constrained")
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)
    layout.set(rect=(0, 0, 1, 1 - HEAD_INCHES / tall))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=share_y)
    panels = [axes for row in grid for axes in row]
    for unused in panels[count:]:
        unused.remove()
    for axes in panels[:count]:
        axes.tick_params(labelbottom=columns > 1 or axes is panels[count - 1])
    figure.text(0.01, 1 - 0.08 / tall, title, va="top", fontweight="bold", fontsize=12)
    figure.text(0.01, 1 - 0.32 / tall, _subtitle(results), va="top", fontsize=9, color="#555555")
    return figure, panels[:count]


def _subtitle(results: Results) -> str:
    cell = results[0].cell
    name = f"{cell.source.name} (not the real trace)" if cell.source.is_reconstruction else cell.source.name
    engine = "prefill only" if cell.scenario.prefill_only else "decoding shares the engine"
    return one_line(
        f"{name[:NAME_CHARS_MAX]}; {cell.scenario.instances} instances of {cell.scenario.profile}, {engine}"
    )


def _left_label(panels: Sequence[Axes], text: str) -> None:
    for axes in panels:
        place = axes.get_subplotspec()
        if place is None or place.is_first_col():
            axes.set_ylabel(text)


def _shares(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend(figure: Figure, panels: Sequence[Axes], threshold: str = "") -> None:
    handles, names = panels[0].get_legend_handles_labels()
    if threshold:
        handles, names = [*handles, Line2D([], [], **THRESHOLD_LINE)], [*names, threshold]
    columns = min(len(names), _legend_columns(figure.get_figwidth()))
    figure.legend(handles, names, loc="outside lower left", ncols=max(1, columns), fontsize=9)


def _legend_columns(wide: float) -> int:
    return max(1, int(wide / LEGEND_INCHES))
