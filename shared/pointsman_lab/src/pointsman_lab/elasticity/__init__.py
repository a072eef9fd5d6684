"""`pointsman-lab elasticity`: a fleet under a load that doubles and halves, and how it grows and shrinks.

The running system throughout: real processes, a real log, engines that a scaler starts and drains.
"""

from pointsman_lab.elasticity.command import elasticity_command

__all__ = ["elasticity_command"]
