"""`pointsman bench`: replays a workload over HTTP (open loop) and reports how well it was served."""

from pointsman_cli.bench.command import bench_command

__all__ = ["bench_command"]
