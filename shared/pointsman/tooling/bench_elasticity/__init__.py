"""`pointsman bench-elasticity`: a fleet under a load that doubles and halves, and how it grows and shrinks.

The running system throughout: real processes, a real log, engines that a scaler starts and drains.
"""

from pointsman.tooling.bench_elasticity.command import bench_elasticity_command

__all__ = ["bench_elasticity_command"]
