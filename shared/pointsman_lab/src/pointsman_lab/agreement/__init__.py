"""`pointsman-lab agreement`: the same run by a fleet and by the simulator, side by side.

`command` reads what was asked for and prints, `both` runs a pool in either world, `machine` says whether this machine
kept time meanwhile, `verdict` compares.
"""

from pointsman_lab.agreement.command import agreement_command

__all__ = ["agreement_command"]
