"""A click group that imports a command only when it runs, so that `--help` is fast. Error messages are made printable
here, since they quote logs, files and servers, and Ctrl-C gets its exit code."""

import errno
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from typing_extensions import override

from pointsman_cli.interruption import interruptible


class LazyGroup(click.Group):
    def __init__(
        self, *args: object, commands_by_name: Mapping[str, tuple[str, str, str]], **attributes: object
    ) -> None:
        super().__init__(*args, **attributes)  # type: ignore[arg-type]
        self._found = commands_by_name

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._found)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._found:
            return None
        module, attribute, _ = self._found[cmd_name]
        found = getattr(import_module(module), attribute)
        if not isinstance(found, click.Command):
            raise TypeError(f"{module}.{attribute} is not a command")
        return found

    @override
    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except click.ClickException as error:
            from pointsman_cli.terminal import SeveralLinesError, one_line, printable

            error.message = (printable if isinstance(error, SeveralLinesError) else one_line)(error.message)  # type: ignore[misc]
            raise
        except OSError as error:
            if not error.filename and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise  # no file's fault
            from pointsman_cli.terminal import one_line

            where = error.filename or "cannot write the output"
            raise click.ClickException(one_line(f"{where}: {error.strerror}")) from error

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, _, help_line) in self._found.items()])
