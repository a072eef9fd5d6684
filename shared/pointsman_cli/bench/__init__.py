"""`pointsman bench`: replays a workload over HTTP (open loop) and reports latency and capacity."""
