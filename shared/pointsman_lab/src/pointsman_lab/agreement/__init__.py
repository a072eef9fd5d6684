"""`pointsman-lab agreement`: the same run by a fleet and by the simulator, side by side."""

from pointsman_lab.agreement.command import agreement_command

__all__ = ["agreement_command"]
