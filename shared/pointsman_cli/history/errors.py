"""What goes wrong when a log is looked for or read: said to people, with what to do."""

import click


class HistoryError(click.ClickException):
    """A log that is not there, or cannot be read; the message says where was looked and what to type."""

    exit_code = 2
    """Other than 1, which says that a decision differs."""
