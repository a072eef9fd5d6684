"""`pointsman what-if`: recorded traffic once more, under another policy or with another fleet, in virtual time.

`record` turns a log into a workload and into the figures that the simulator gives, `calibration` makes the simulated
engines as fast as the recorded ones were, `runs` are the simulations, and `comparison` puts them side by side.
"""

from pointsman_cli.what_if.command import what_if_command

__all__ = ["what_if_command"]
