"""The error of all commands that read a log."""

import click


class HistoryError(click.ClickException):
    """The log is missing or unreadable. Exit code 2, since 1 means that a difference was found."""

    exit_code = 2
