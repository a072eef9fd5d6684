"""`pointsman-lab elasticity`: how a fleet of real processes scales under a load that doubles and halves."""

from pointsman_lab.elasticity.command import elasticity_command

__all__ = ["elasticity_command"]
