"""`pointsman bench`: replays a workload over HTTP and says how well it was served.

`command` reads what was asked for, `load` sends (open loop: arrivals do not wait for answers), `answer` reads a
stream without disturbing what it measures, `report` turns outcomes into numbers and tables, `comparison` starts a
fresh fleet for each policy.
"""

from pointsman_cli.bench.command import bench_command

__all__ = ["bench_command"]
