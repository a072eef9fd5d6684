"""The error of all commands that read a log."""

import click


class HistoryError(click.ClickException):
    """The log is missing or unreadable; the message says where, and what to type. Exit code 2: 1 is a found difference."""

    exit_code = 2
