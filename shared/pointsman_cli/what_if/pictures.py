"""Plots of a what-if, drawn by `simulate`. Importing this needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from pointsman_cli.simulate.experiment import CellResult
from pointsman_cli.simulate.plots import Drawing, attainment_by_length, draw_plot, timeline, ttft_distribution

DRAWINGS: dict[str, Drawing] = {
    "ttft_cdf": ttft_distribution,
    "timeline": timeline,
    "prompt_lengths": attainment_by_length,
}


def draw(results: Sequence[CellResult], directory: Path) -> list[Path]:
    """Returns the PNG files. Raises OSError."""
    return [draw_plot(drawing, results, directory / f"{name}.png") for name, drawing in DRAWINGS.items()]
