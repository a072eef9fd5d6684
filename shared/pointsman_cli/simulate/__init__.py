"""`pointsman simulate`: policies side by side on the same requests, in virtual time."""

from pointsman_cli.simulate.command import simulate_command

__all__ = ["simulate_command"]
