"""Options that several commands take, so that they mean, check and explain the same thing everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

DEFAULT_INPUT_CAP = 20_480
COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)

Command = TypeVar("Command", bound=Callable[..., object])


def comma_list(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Names between commas, each once, in the order given."""
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    if not names:
        msg = "names nothing"
        raise click.BadParameter(msg)
    return names


def rates(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    """Requests a second between commas, ascending; none where nothing is given."""
    try:
        found = sorted({float(rate) for rate in value.split(",")}) if value else []
    except ValueError as error:
        msg = f"{value} is no list of rates such as 4,5.5,6"
        raise click.BadParameter(msg) from error
    if any(not 0 < rate < float("inf") for rate in found):
        msg = "rates are positive"
        raise click.BadParameter(msg)
    return tuple(found)


def workload_size(*, requests: int, warmup: int) -> Callable[[Command], Command]:
    """How many requests are run and how many of them counted, and how long a prompt may be: three options."""
    return _with_all(
        click.option("--requests", type=COUNT, metavar="N", default=requests, show_default=True, help="At most."),
        click.option(
            "--warmup",
            type=click.IntRange(min=0),
            metavar="N",
            default=warmup,
            show_default=True,
            help="The first N requests fill the caches and are not counted.",
        ),
        click.option(
            "--input-cap",
            type=COUNT,
            metavar="N",
            default=DEFAULT_INPUT_CAP,
            show_default=True,
            help="Cut longer prompts after N tokens.",
        ),
    )


def which_fleet(command: Command) -> Command:
    """Where the fleet is that a command asks, if not the one that runs here: `nats`, `data` and `pool`."""
    directory = click.Path(path_type=Path, file_okay=False)
    return _with_all(
        click.option("--nats", metavar="URL", help="The fleet on this nats-server."),
        click.option("--data", type=directory, help="The fleet with this data directory."),
        click.option("--pool", metavar="NAME", help="Another pool than the fleet's own."),
    )(command)


def _with_all(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """These options, in this order."""

    def with_them(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return with_them
