"""`pointsman-lab agreement`: the same run by a fleet and by the simulator, side by side."""
