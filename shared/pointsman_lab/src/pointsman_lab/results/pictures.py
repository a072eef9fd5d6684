"""Bars for numbers that are no curve: groups of them, one panel above the other. Importing this needs matplotlib."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from pointsman_cli.simulate.plots import COLOURS, OWN_COLOUR, save_figure
from pointsman_lab.results.studies import OURS

HEAD_INCHES = 0.25
PANEL_INCHES = (10.0, 2.6)
HATCHES = ("", "//", "..", "xx")
GROUP_SHARE = 0.85
"""Of the way from one group to the next, how much its bars take."""

LEGEND_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Bars:
    """One panel. `groups`: value by group and by name; every group has the same names. Names that differ only behind
    their last comma have one colour."""

    title: str
    unit: str
    groups: Mapping[str, Mapping[str, float]]
    logarithmic: bool = False


def draw_bars(panels: Sequence[Bars], file: Path, *, label: str) -> Path:
    """Draw them as PNG, with a label in the corner. Raises OSError."""
    return save_figure(lambda: _figure(panels), file, label=label)


def _figure(panels: Sequence[Bars]) -> Figure:
    wide, tall = PANEL_INCHES
    height = tall * len(panels) + 1.0 + HEAD_INCHES
    figure = Figure(figsize=(wide, height), layout="constrained")
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)
    layout.set(rect=(0, 0, 1, 1 - HEAD_INCHES / height))
    axes_of_all = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(axes_of_all, panels, strict=True):
        names = list(next(iter(panel.groups.values())))
        width = GROUP_SHARE / len(names)
        for number, (name, look) in enumerate(_looks(names).items()):
            places = [place - GROUP_SHARE / 2 + (number + 0.5) * width for place in range(len(panel.groups))]
            heights = [group.get(name, 0.0) for group in panel.groups.values()]
            axes.bar(places, heights, width * 0.92, label=name, **look)
        if panel.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xticks(range(len(panel.groups)), list(panel.groups))
        axes.set_title(panel.title)
        axes.set_ylabel(panel.unit)
        axes.grid(axis="x", visible=False)
    handles, names = axes_of_all[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=LEGEND_COLUMNS, fontsize=9)
    return figure


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By name: colour, and a hatching that tells bars of one colour apart, in grey too."""
    colours = cycle(COLOURS)
    by_stem: dict[str, str] = {}
    used: Counter[str] = Counter()
    looks = {}
    for name in names:
        stem = name.rpartition(", ")[0] or name
        if stem not in by_stem:
            by_stem[stem] = OWN_COLOUR if name.startswith(OURS) else next(colours)
        colour = by_stem[stem]
        looks[name] = {"color": colour, "hatch": HATCHES[used[colour] % len(HATCHES)], "edgecolor": "white"}
        used[colour] += 1
    return looks
