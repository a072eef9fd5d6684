"""The rebalancer service."""
