"""Options that several commands share."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pointsman import bounds
from pointsman.adapters.discovery.targets import TargetError, host_and_port
from pointsman.bounds import Bounds
from pointsman.policies.setting_text import SettingTextError, parts_of
from pointsman.runtime.number_types import Finite, Whole
from pointsman_cli.output_file import OUTPUT_FILE

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
DEFAULT_INPUT_CAP = 20_480
CONSOLE_PORT = 8090
COUNT = Whole(bounds.COUNT)
WHOLE = Whole(bounds.NOT_NEGATIVE)
INSTANCES = Whole(Bounds(1, 1000))
POSITIVE = Finite(bounds.POSITIVE)
NOT_NEGATIVE = Finite(bounds.NOT_NEGATIVE)
DIRECTORY = click.Path(path_type=Path, file_okay=False)

FLEET_HELP = "A data directory or nats://HOST:PORT. Default: the fleet running here."
MOMENT_HELP = "a sequence (4711), a time of day (07:31:05.250), a date and time (2026-11-21T07:31:05; UTC with Z behind it), engine time (@1767225600.5), or now"

Command = TypeVar("Command", bound=Callable[..., object])


json_switch = click.option("--json", "as_json", is_flag=True, help="Print only JSON on standard output.")
out_option = click.option("--out", type=OUTPUT_FILE, metavar="FILE", help="Also write the JSON to this file.")
since_option = click.option("--since", metavar="MOMENT", help=f"Start at {MOMENT_HELP}.")
until_option = click.option("--until", metavar="MOMENT", help=f"End at {MOMENT_HELP}.")
set_option = click.option(
    "--set",
    "settings",
    metavar="KIND.NAME=VALUE",
    multiple=True,
    callback=lambda _context, _option, texts: tuple(_checked_setting(text) for text in texts),
    help="Policy setting: routing.NAME, admission.NAME, order.NAME, ... or POLICY.NAME (docs/policies.md). Repeatable.",
)


def from_options(command: Command) -> Command:
    """Adds --from and --pool, as `place: str | None` and `pool: str | None`."""
    return with_all(
        click.option(
            "--from",
            "place",
            metavar="WHERE",
            help="Fleet or log: a data directory or nats://HOST:PORT; for recorded logs also an archive (file or SQLAlchemy "
            "URL), an exported bundle, or - for standard input. Default: the fleet running here.",
        ),
        click.option("--pool", metavar="NAME", help="Pool of the fleet, or log of the archive, if there are several."),
    )(command)


def fleet_options(command: Command) -> Command:
    """`from_options` of a command that needs a running fleet."""
    return with_all(
        click.option("--from", "place", metavar="WHERE", help=FLEET_HELP),
        click.option("--pool", metavar="NAME", help="Pool of the fleet, if there are several."),
    )(command)


def as_given() -> str:
    """The --from and --pool of the command that runs, for the commands that it advises."""
    context = click.get_current_context(silent=True)
    given = context.params if context else {}
    names = (("--from", given.get("place")), ("--pool", given.get("pool")))
    return "".join(f" {option} {shlex.quote(value)}" for option, value in names if value)


def comma_list(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    if not names:
        raise click.BadParameter("names nothing")
    return names


def rates(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[float, ...]:
    try:
        found = sorted({float(rate) for rate in value.split(",")}) if value else []
    except ValueError as error:
        raise click.BadParameter(f"{value} is not a list of rates such as 4,5.5,6") from error
    if any(not 0 < rate < float("inf") for rate in found):
        raise click.BadParameter("rates are positive")
    return tuple(found)


def http_url(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        try:
            host_and_port(value)
        except TargetError as error:
            raise click.BadParameter(str(error)) from error
    return value


def with_all(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:

    def with_them(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return with_them


def _checked_setting(text: str) -> str:
    try:
        parts_of(text)
    except SettingTextError as error:
        raise click.BadParameter(str(error)) from error
    return text
