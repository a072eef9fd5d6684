"""`pointsman bench`: replays a workload over HTTP (open loop) and reports latency and capacity."""

from pointsman_cli.bench.command import bench_command

__all__ = ["bench_command"]
