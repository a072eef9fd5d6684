"""`pointsman-lab results`: runs every study of `docs/results.md`."""

from pointsman_lab.results.command import results_command

__all__ = ["results_command"]
