"""The progress line of a run on a terminal, and nothing elsewhere. `tick` redraws it, without a thread."""

import time

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pointsman_cli.bench.load import Tally
from pointsman_cli.bench.report import attainment
from pointsman_cli.bench.server import Server

REDRAW_WALL_SECONDS = 0.25


class Display:
    def __init__(self, console: Console, tally: Tally, server: Server) -> None:
        self._tally = tally
        self._server = server
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next = 0.0
        if self._live is None:
            console.print(f"sending {tally.total} requests to {server.url} ({server.policy})")

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        if self._live and time.monotonic() >= self._next:
            self._next = time.monotonic() + REDRAW_WALL_SECONDS
            self._live.update(self._line(), refresh=True)

    def _line(self) -> Table:
        tally = self._tally
        met = attainment(tally.outcomes, self._server.slo_ttft_s)
        ended = sum(tally.counts.values())
        line = Table.grid(padding=(0, 2))
        line.add_row(
            Text(self._server.policy, style="bold"),
            ProgressBar(total=tally.total, completed=ended, width=30),
            f"{tally.sent}/{tally.total} sent",
            f"{tally.in_flight} running",
            Text(f"{tally.counts['completed']} done", style="green"),
            Text(f"{tally.counts['rejected']} rejected", style="yellow" if tally.counts["rejected"] else "dim"),
            Text(f"{tally.counts['failed']} failed", style="red" if tally.counts["failed"] else "dim"),
            "" if met is None else f"{met:.1%} within the SLO",
        )
        return line
