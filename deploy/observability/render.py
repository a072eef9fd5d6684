"""Draws the dashboards as pictures from a Prometheus's answers, where no Grafana is at hand: panels, queries, units and
positions are the dashboards' own, drawn by matplotlib.

python deploy/observability/render.py http://127.0.0.1:9090 docs/images --minutes 10
"""

import argparse
import json
import math
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from PIL import Image

BOARDS = Path(__file__).parent / "dashboards"
COLUMN_INCHES, ROW_INCHES, DOTS = 0.62, 0.24, 100
POINTS = 120
LEGENDS_MAX = 6
COLORS = 96
Series = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--interval", default="20s", help="for $__rate_interval")
    given = parser.parse_args()
    mpl.use("agg")
    given.directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(BOARDS.glob("*.json")):
        draw(json.loads(path.read_text()), Source(given), given.directory / path.with_suffix(".png").name)


class Source:
    def __init__(self, given: argparse.Namespace) -> None:
        self._url = given.prometheus
        self._interval = given.interval
        self.end = datetime.now(UTC).timestamp()
        self.start = self.end - given.minutes * 60

    def ask(self, expression: str) -> list[Series]:
        values = {"pool": ".*", "model": ".*", "__rate_interval": self._interval}
        resolved = re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)
        query = {"query": resolved, "start": self.start, "end": self.end, "step": (self.end - self.start) / POINTS}
        with urlopen(f"{self._url}/api/v1/query_range?{urlencode(query)}", timeout=30) as answer:
            found: list[Series] = json.load(answer)["data"]["result"]
        return found


def draw(board: dict[str, Any], source: Source, file: Path) -> None:
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    size = (24 * COLUMN_INCHES, rows * ROW_INCHES + 0.4)
    figure = pyplot.figure(figsize=size, dpi=DOTS, facecolor="#f4f5f5")
    figure.text(0.01, 1 - 0.12 / size[1], board["title"], va="top", fontsize=12, weight="bold")
    for panel in board["panels"]:
        at = panel["gridPos"]
        left, top = at["x"] / 24, 1 - (0.4 + at["y"] * ROW_INCHES) / size[1]
        wide, high = at["w"] / 24, at["h"] * ROW_INCHES / size[1]
        if panel["type"] == "row":
            figure.text(left + 0.01, top - high / 2, panel["title"], va="center", fontsize=9, weight="bold")
            continue
        under = (0.25 if panel["type"] == "stat" else 0.45) / size[1]
        axes = figure.add_axes((left + 0.035, top - high + under, wide - 0.045, high - under - 0.28 / size[1]))
        axes.set_title(panel["title"], fontsize=8, loc="left", weight="bold")
        answers = [(target, source.ask(target["expr"])) for target in panel["targets"]]
        {"stat": _stat, "heatmap": _heatmap}.get(panel["type"], _lines)(axes, panel, answers, source)
    figure.savefig(file)
    pyplot.close(figure)
    Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)


def _unit(panel: dict[str, Any]) -> str:
    return str(panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short"))


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}{'B' if unit == 'bytes' else ''}"
    return f"{value:.3g}"


def _name(target: dict[str, Any], series: Series) -> str:
    labels = series["metric"]
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), target.get("legendFormat", "")).strip()


def _values(series: Series) -> tuple[list[float], list[float]]:
    return [float(at) for at, _ in series["values"]], [float(value) for _, value in series["values"]]


def _stat(axes: Axes, panel: dict[str, Any], answers: Any, _source: Source) -> None:
    found = [series for _, result in answers for series in result]
    value = float(found[0]["values"][-1][1]) if found else math.nan
    axes.axis("off")
    axes.text(0.5, 0.4, _shown(value, _unit(panel)), ha="center", va="center", fontsize=20, color="#1a7f37")


def _lines(axes: Axes, panel: dict[str, Any], answers: Any, source: Source) -> None:
    found = [(_name(target, series), *_values(series)) for target, result in answers for series in result]
    custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
    if custom.get("stacking", {}).get("mode") == "normal" and found:
        times = sorted({at for _, ats, _ in found for at in ats})
        known = [dict(zip(ats, values, strict=True)) for _, ats, values in found]
        axes.stackplot(
            times, [[k.get(at, 0.0) for at in times] for k in known], labels=[n for n, _, _ in found], alpha=0.7
        )
    else:
        for name, times, values in found:
            axes.plot(times, values, label=name, linewidth=1)
    _finish(axes, panel, source, len(found))


def _heatmap(axes: Axes, panel: dict[str, Any], answers: Any, source: Source) -> None:
    buckets = sorted(
        (float(series["metric"]["le"]), dict(zip(*_values(series), strict=True))) for series in answers[0][1]
    )
    times = sorted({at for _, values in buckets for at in values})
    below = [0.0] * len(times)
    cells, bounds = [], []
    for bound, values in buckets:
        counts = [values.get(at, 0.0) for at in times]
        cells.append([max(0.0, now - before) for now, before in zip(counts, below, strict=True)])
        bounds.append("inf" if math.isinf(bound) else f"{bound:g} s")
        below = counts
    if cells:
        axes.imshow(
            cells, aspect="auto", origin="lower", cmap="Blues", extent=(source.start, source.end, 0, len(cells))
        )
        axes.set_yticks([number + 0.5 for number in range(0, len(bounds), 3)], bounds[::3])
    _finish(axes, panel, source, 0)


def _finish(axes: Axes, panel: dict[str, Any], source: Source, legends: int) -> None:
    axes.set_xlim(source.start, source.end)
    ticks = [source.start + (source.end - source.start) * share for share in (0.0, 0.5, 1.0)]
    axes.set_xticks(ticks, [time.strftime("%H:%M:%S", time.gmtime(at)) for at in ticks])
    axes.tick_params(labelsize=6, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if panel["type"] != "heatmap":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: _shown(value, _unit(panel)))
        axes.grid(axis="y", linewidth=0.3)
    if not legends and panel["type"] != "heatmap":
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, fontsize=8, color="#888888")
    handles, names = axes.get_legend_handles_labels()
    if legends:
        axes.legend(handles[:LEGENDS_MAX], names[:LEGENDS_MAX], fontsize=6, loc="upper left", framealpha=0.6, ncols=2)


if __name__ == "__main__":
    main()
