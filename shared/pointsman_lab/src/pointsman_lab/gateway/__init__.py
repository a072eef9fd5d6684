"""`pointsman-lab gateway`: the latency and CPU time that ingress and scheduler add to a direct call of the engine."""
