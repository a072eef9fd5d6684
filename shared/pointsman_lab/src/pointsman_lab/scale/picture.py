"""The picture of docs/scale.md: what grows with the number of instances, and what does not."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PANELS = (
    ("decision", "ms", (("decision_p50_ms", "P50"), ("decision_p99_ms", "P99"))),
    ("log of a request", "bytes", (("log_bytes_a_request", "all kinds"),)),
    ("without a decision", "s", (("take_over_seconds", "take-over"), ("start_seconds", "start from a checkpoint"))),
)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, (title, unit, lines) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for name, label in lines:
            axes.plot(
                [row["instances"] for row in rows], [row[name] or float("nan") for row in rows], marker="o", label=label
            )
        axes.set(title=title, ylabel=unit, xlabel="instances", ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
