"""`pointsman-lab gateway`: the latency and CPU time that ingress and scheduler add to a direct call of the engine."""

from pointsman_lab.gateway.command import gateway_command

__all__ = ["gateway_command"]
