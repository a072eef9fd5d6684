"""`--plot` of `simulate` and `what-if`: matplotlib is imported before anything is simulated, so that its lack is told first."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console

from pointsman_cli.simulate.experiment import CellResult
from pointsman_cli.terminal import say

Draw = Callable[[Sequence[CellResult]], None]


def drawing(console: Console, directory: Path, *only: str) -> Draw:
    """Draws `only` these pictures, by default all, and says where they are. Raises click.ClickException, both times."""
    try:
        from pointsman_cli.simulate.plots import draw_plots
    except ImportError as error:
        raise click.ClickException(
            "--plot needs matplotlib; install it with: pip install 'pointsman[plots]'"
        ) from error

    def draw(results: Sequence[CellResult]) -> None:
        try:
            pictures = draw_plots(results, directory, *only)
        except OSError as error:
            raise click.ClickException(f"cannot draw into {directory}: {error.strerror}") from error
        for picture in pictures:
            say(console, f"drew {picture}")

    return draw
