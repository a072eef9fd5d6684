"""Deterministic simulation testing: all services in one process, on virtual time, under faults drawn from a seed.

One seed is one run: the same seed gives the same log, bit for bit. `pointsman-lab torture` runs many; docs/testing.md tells
what is simulated, what is checked and what is not. It stands above the services because it starts them, and nothing
stands on it.
"""
