"""`pointsman tap`: prints what goes into the log, live. `command` reads and prints, `filters` chooses, `wording` says
each event in one line."""

from pointsman_cli.tap.command import tap_command

__all__ = ["tap_command"]
