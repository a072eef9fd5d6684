"""`pointsman-lab results`: every study of `docs/results.md`, run anew by one command."""

from pointsman_lab.results.command import results_command

__all__ = ["results_command"]
