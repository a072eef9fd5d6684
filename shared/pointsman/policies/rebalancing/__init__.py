"""Rebalancing policies: which waiting requests should move to another instance. One file a policy."""
