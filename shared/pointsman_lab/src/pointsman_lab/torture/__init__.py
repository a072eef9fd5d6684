"""Deterministic simulation testing: all services in one process, on virtual time, under faults drawn from a seed (docs/testing.md)."""
